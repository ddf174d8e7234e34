"""The state of lowering while it makes a program: buffers, the holders of rows, sums, and the tags of messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from cp_fast.compile.index_tables import RowKey, Tables
from cp_fast.compile.program import OWN, Accumulate, BufferSpec, Copy, Heads, Program, Role, Send, View
from cp_fast.tiles.row_spans import Placement, SpanSets, by_start, shared_out
from cp_ref.schedules.schedule import Message, RankSchedule
from cp_ref.schedules.table import Column, Spans

__all__ = [
    "RANGES",
    "Buffers",
    "Held",
    "Lowering",
    "LoweringInputs",
    "MessagePart",
    "Operands",
    "Partial",
    "Sums",
    "in_order",
    "message_parts",
    "split",
]

# ---- Messages in order
#
# Messages are sent in the order in which `verify` matched them, and posted by their tags. A planner's tags give this
# order. Those of a user's schedule may not: between two ranks the n-th message sent is the n-th received, so it gets n
# as its tag.


RANGES = 128  # of heads, in one message
_TAGS = 8 * RANGES  # tensors of one message


def in_order(rank_schedule: RankSchedule) -> RankSchedule:
    """One rank's steps of one pass with tags that rise from message to message between two ranks. A message with too
    many ranges of heads for one tag also takes the following tags.

    >>> from cp_ref.schedules.schedule import Pieces, Step
    >>> pieces = Pieces.of_rows([(0, 4, 0, 1)])
    >>> first, last = (Step(sends=(Message("q", 1, tag, pieces), Message("kv", 2, tag, pieces))) for tag in (7, 3))
    >>> [[(m.peer, m.tag) for m in step.sends] for step in in_order((first, last))]
    [[(1, 0), (2, 0)], [(1, 1), (2, 1)]]
    """
    sent, received = Counter[int](), Counter[int]()

    def numbered(message: Message, so_far: Counter[int]) -> Message:
        tag = so_far[message.peer]
        so_far[message.peer] += -(-len(message.by_heads) // RANGES)
        return replace(message, tag=tag)

    return tuple(
        step._replace(
            sends=tuple(numbered(message, sent) for message in step.sends),
            recvs=tuple(numbered(message, received) for message in step.recvs),
        )
        for step in rank_schedule
    )


# ---- Buffers, and which of them hold which rows


@dataclass
class Buffers:
    """The numbered buffers of a program."""

    specs: list[BufferSpec] = field(default_factory=list)
    _names: Counter[str] = field(default_factory=Counter)

    def new(
        self,
        name: str,
        kind: str,
        heads: Heads,
        rows: int | None,
        role: Role,
        *,
        dtype: Literal["input", "wide"] = "input",
        parts: int = 0,
    ) -> int:
        """The number of a new buffer; a name that was there before gains a number."""
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name} #{self._names[name]}"
        self.specs.append(BufferSpec(name, kind, heads, rows, role, dtype, parts))
        return len(self.specs) - 1

    def whole(self, number: int) -> View[RowKey]:
        """All of a buffer."""
        return View(number, None, self.specs[number].all_heads)


@dataclass(eq=False)
class Held:
    """A buffer of operands that the rank has, and where global rows lie in it."""

    number: int
    kind: str
    heads: Heads
    rows: Placement

    def has(self, kind: str, heads: Heads) -> bool:
        """Whether its rows are of this kind and have all of these heads."""
        return self.kind == kind and self.heads[0] <= heads[0] and heads[1] <= self.heads[1]


@dataclass
class Operands:
    """The buffers of operands that a rank has in a pass, the newest last."""

    buffers: Buffers
    tables: Tables
    sets: SpanSets
    held: list[Held] = field(default_factory=list)

    def new(self, name: str, kind: str, heads: Heads, rows: Placement, size: int) -> Held:
        """A new buffer. The rank does not have it yet."""
        return Held(self.buffers.new(name, kind, heads, size, "operand"), kind, heads, rows)

    def holder(self, kind: str, heads: Heads, spans: Spans) -> Held | None:
        """The newest buffer that has all of these rows and heads; None if none has."""
        for held in reversed(self.held):
            if held.has(kind, heads) and held.rows.covers(spans):
                return held
        return None

    def view(self, held: Held, spans: Spans, heads: Heads) -> View[RowKey]:
        """The rows of these spans, span after span, in the buffer that holds them."""
        found = held.rows.find(spans)
        return self._view(held, found.row, found.count, heads)

    def stretch(self, held: Held, spans: Spans, size: int, heads: Heads) -> View[RowKey]:
        """This many rows of a buffer, from the first one of these spans on."""
        first = int(held.rows.find(spans).row.min())
        return View(held.number, slice(first, first + size), (heads[0] - held.heads[0], heads[1] - held.heads[0]))

    def gather(self, kind: str, heads: Heads, parts: Sequence[Spans], step: int) -> tuple[Held, list[Copy[RowKey]]]:
        """A new buffer with all of these rows in the order of the global rows, and the copies that fill it."""
        together = self.sets.joined(list(parts)).merged()
        return self.in_order(kind, heads, self.sets.of(together.start, together.stop), step)

    def in_order(self, kind: str, heads: Heads, spans: Spans, step: int) -> tuple[Held, list[Copy[RowKey]]]:
        """A new buffer with these rows, span after span, and the copies that fill it."""
        rows = self.sets.packed(spans)
        made = self.new(f"step {step}: {kind} {heads[0]}:{heads[1]} gathered", kind, heads, rows, spans.total)
        copies: list[Copy[RowKey]] = []
        for part in split(heads, (edge for held in self.held if held.kind == kind for edge in held.heads)):
            shares, rest = shared_out(rows, ((held, held.rows) for held in self.held if held.has(kind, part)))
            for held, found in shares:
                order = by_start(found.there)  # in the source's order: a received buffer is then read in one piece
                there, here, count = found.there[order], found.here[order], found.count[order]
                copies.append(Copy(step, self._view(held, there, count, part), self._view(made, here, count, part)))
            if len(rest):
                raise ValueError(
                    f"the schedule needs {kind} rows {rest.start[0]}:{rest.stop[0]} at step {step}, which"
                    " are not there; verify names the step that should have brought them"
                )
        self.held.append(made)
        return made, copies

    def _view(self, held: Held, row: Column, size: Column, heads: Heads) -> View[RowKey]:
        return View(held.number, self.tables.rows(row, size), (heads[0] - held.heads[0], heads[1] - held.heads[0]))


def split(heads: Heads, edges: Iterable[int]) -> list[Heads]:
    """Heads as ranges that no edge cuts.

    >>> split((0, 8), [0, 2, 12])
    [(0, 2), (2, 8)]
    """
    return list(pairwise(sorted({*heads, *(edge for edge in edges if heads[0] < edge < heads[1])})))


# ---- Sums
#
# Where partial results go: into the sum of the next message that takes their rows along, or into a local sum.
#
# A local sum has the rank's own rows. No launch and no message of the pass cuts its heads.


class MessagePart(NamedTuple):
    """The part of a message that has the same heads: one tensor of each kind that the message carries."""

    kind: str
    heads: Heads
    spans: Spans
    peer: int
    tag: int
    complete: bool

    def has(self, other: MessagePart) -> bool:
        """Whether these have all rows and heads of others."""
        inside = self.heads[0] <= other.heads[0] and other.heads[1] <= self.heads[1]
        return inside and Placement.packed(self.spans).covers(other.spans)


def message_parts(message: Message, sets: SpanSets) -> list[MessagePart]:
    """A message by heads; sender and receiver get the same list."""
    return [
        MessagePart(
            message.kind, heads, sets.of(start, stop), message.peer, message.tag * _TAGS + 8 * n, message.complete
        )
        for n, (heads, start, stop) in enumerate(message.by_heads)
    ]


class Outgoing(NamedTuple):
    """The rows of one kind and one range of heads that leave at a step: their sum, and the buffer that is sent."""

    step: int
    sum: int
    message: int
    heads: Heads
    rows: Placement
    complete: bool


@dataclass
class Sums:
    """All sums of one pass. `sink`: whether a sink is still to be accumulated into every out."""

    buffers: Buffers
    tables: Tables
    sets: SpanSets
    own: dict[str, Placement]  # Kind -> the place of the rank's own rows.
    sink: bool
    local: dict[str, dict[Heads, int]] = field(default_factory=dict)  # Kind and heads -> a buffer.
    outgoing: dict[str, list[Outgoing]] = field(default_factory=dict)  # by kind
    _edges: dict[str, set[int]] = field(default_factory=dict)
    _stay: set[str] = field(default_factory=set)  # No row of these kinds is sent.

    def announce(
        self, steps: Sequence[Sequence[MessagePart]], edges: dict[str, set[int]]
    ) -> list[tuple[list[Copy[RowKey]], list[Send[RowKey]]]]:
        """Make the sums of all results that a pass sends. Returns, for each step, the copies from sums to messages and
        the sends. `edges`, by kind: where the heads of local sums are cut.
        """
        found: list[tuple[list[Copy[RowKey]], list[Send[RowKey]]]] = []
        self._edges = edges
        self.local = {kind: {} for kind in self.own}
        self.outgoing = {kind: [] for kind in self.own}
        for step, parts_of_step in enumerate(steps):
            copies, sends = list[Copy[RowKey]](), list[Send[RowKey]]()
            together: dict[tuple[str, Heads, bool], list[MessagePart]] = {}
            for part in parts_of_step:
                if part.kind in self.own:
                    together.setdefault((part.kind, part.heads, part.complete), []).append(part)
            for (kind, heads, complete), group in together.items():
                spans = self.sets.joined([p.spans for p in group])
                name, size = f"step {step}: {'complete ' if complete else ''}{kind} {heads[0]}:{heads[1]}", spans.total
                dtype = "input" if complete else "wide"
                of_sum = "wide" if self.sink and kind == "out" else dtype
                total = self.buffers.new(f"{name} sum", kind, heads, size, "sum", dtype=of_sum)
                message = self.buffers.new(f"{name} sent", kind, heads, size, "message", dtype=dtype)
                self.outgoing[kind].append(Outgoing(step, total, message, heads, self.sets.packed(spans), complete))
                whole, row = self.buffers.whole(message), 0
                copies.append(Copy(step, self.buffers.whole(total), whole))
                for part in group:
                    view: View[RowKey] = replace(whole, rows=slice(row, row + part.spans.total))
                    sends.append(Send(step, part.peer, part.tag, view))
                    row += part.spans.total
            found.append((copies, sends))
        self._stay = {kind for kind, out in self.outgoing.items() if not any(self.own[kind].meets(o.rows) for o in out)}
        return found

    def accumulates(
        self, partial: int, kind: str, heads: Heads, rows: Placement, step: int
    ) -> list[Accumulate[RowKey]]:
        """Where the rows of a partial result of `step` go: into the next message that takes them along, or a local sum.

        Args:
            partial: the buffer of the partial result.
            heads: its heads, of all.
            rows: its global rows, and where they lie in it.
        """
        own, edges = self.own[kind], self._edges[kind]
        later: list[Outgoing] = []
        if kind not in self._stay or not own.covers(rows.spans):
            later = [o for o in self.outgoing[kind] if o.step > step]
            edges = edges.union(*(o.heads for o in later))
        found: list[Accumulate[RowKey]] = []
        for part in split(heads, edges):
            places = [(o, o.rows) for o in later if o.heads[0] <= part[0] and part[1] <= o.heads[1]]
            shares, rest = shared_out(rows, [*places, (None, own)])
            if len(rest):
                raise ValueError(
                    f"the schedule leaves {kind} rows {rest.start[0]}:{rest.stop[0]} of step {step} on a rank "
                    "that does not own them; verify names where they should have gone"
                )
            for outgoing, common in shares:
                total = self._local(kind, part) if outgoing is None else outgoing.sum
                first = self.buffers.specs[total].heads[0]
                here, there = (self.tables.rows(side, common.count) for side in (common.here, common.there))
                source = View(partial, here, (part[0] - heads[0], part[1] - heads[0]))
                found.append(Accumulate(step, source, View(total, there, (part[0] - first, part[1] - first))))
        return found

    def _local(self, kind: str, heads: Heads) -> int:
        if heads not in self.local[kind]:
            dtype = "wide" if self.sink and kind == "out" else "input"
            name = f"local {kind} {heads[0]}:{heads[1]} sum"
            self.local[kind][heads] = self.buffers.new(name, kind, heads, None, "sum", dtype=dtype)
        return self.local[kind][heads]


# ---- The state


class Partial(NamedTuple):
    """A partial result: its buffer, the heads, and the global rows."""

    buffer: int
    heads: Heads
    rows: Placement


class LoweringInputs(NamedTuple):
    """The inputs of lowering, for both programs.

    Attributes:
        kinds: how many heads there are of each kind of rows, and where the rank's own rows lie in its tensors.
        sink: whether the softmax has a sink.
    """

    tables: Tables
    sets: SpanSets
    kinds: Mapping[str, tuple[int, Placement]]
    sink: bool = False


@dataclass
class Lowering:
    """One program while it is made.

    Attributes:
        kinds: the operands of its launches.
        results: the kinds of messages that are summed, or complete. All others are operands, whatever they are called.
        sent, received: in a backward pass, the complete outs of the forward pass. Both ends have these and their lse,
            so they are not sent again with the gradient.
        own: the numbers of the rank's own buffers, by kind, from 0 on.
    """

    shared: LoweringInputs
    direction: str
    kinds: Sequence[str]
    results: Sequence[str]
    sent: Sequence[MessagePart] = ()
    received: Sequence[MessagePart] = ()
    own: Mapping[str, int] = field(default_factory=lambda: OWN)
    buffers: Buffers = field(default_factory=Buffers)

    def __post_init__(self) -> None:
        shared, made = self.shared, list[Held]()
        for kind, number in self.own.items():
            heads, rows = shared.kinds[kind]
            own_number = self.buffers.new(f"own {kind}", kind, (0, heads), None, "own")
            assert own_number == number
            if kind in self.kinds:
                made.append(Held(number, kind, (0, heads), rows))
        self.operands = Operands(self.buffers, shared.tables, shared.sets)
        self.operands.held = made[2:] if self.direction == "backward" else made
        own = {kind: shared.kinds[kind][1] for kind in self.results}
        self.sums = Sums(self.buffers, shared.tables, shared.sets, own, shared.sink)
        self.stacked: dict[str, list[tuple[int, RowKey, tuple[int, ...]]]] = {kind: [] for kind in self.results}
        self.own_results: dict[str, int] = {}

    def keep(self, held: Held, forward: Program[RowKey]) -> int:
        """Add a buffer of operands kept by the forward pass; returns its number in this program."""
        number, spec = held.number, forward.buffers[held.number]
        if number >= len(OWN):
            number = self.buffers.new(f"kept {spec.name}", spec.kind, spec.heads, spec.rows, "operand")
        gradients = self.operands.held[-2:]
        self.operands.held[-2:] = [Held(number, held.kind, held.heads, held.rows), *gradients]
        return number

    def keep_out(self, heads: Heads, rows: Placement) -> int:
        """Add the complete out and lse of others' rows that the forward pass sent; returns the buffer's number."""
        made = self.operands.new(f"kept out {heads[0]}:{heads[1]}", "res", heads, rows, rows.spans.total)
        self.operands.held.append(made)
        return made.number
