"""A schedule as data: what every rank sends, receives and computes, step by step. The third of the three tables.

The meaning of a step:
    1. at its start the rank posts all its sends and receives; a send carries what the rank has at that moment,
    2. it computes its tiles with the operands that it has at that moment,
    3. the step ends when its tiles are done and its messages have arrived: they can be used from the next step on.

So the messages of a step travel while its tiles are computed, and a schedule shows which computation hides which
messages.

A tile of the forward pass needs q and kv and adds to out; a tile of the backward pass needs q, kv and do, and adds to
dq and dkv. Rows are those of the global packed buffers; a tile is a rectangle of one area, whose diagonal band masks
it.

The text form, one line each, reads back to an equal schedule (heads are shown where they are not all heads):

    schedule p2p cp_size 2 heads 8/2 saved -
    forward rank 0
      step
        send kv [0:2] [6:8] to 1 tag 0
        recv kv [2:6] from 1 tag 0
        tile 0 q[0:2] k[0:2]

Linear layers (skip this on a first reading) have scans in place of tiles: a scan needs the maps of the fragments that
it names. Messages of the kinds `STATES` carry maps (`cp_ref.schedules.linear_schedules`): "state" that of the state
which a fragment's rows make, "dstate" the same of the state's gradient, in the backward pass. A scan, of document 0,
reads `scan 0 [0:2] [2:6]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from cp_ref.schedules.table import Column, Spans, Table, constant, one_value
from cp_ref.schedules.values import MOST_RANKS

__all__ = [
    "KINDS",
    "MOST_TAGS",
    "OPERANDS",
    "RESULTS",
    "STATES",
    "STEP_TAGS",
    "TENSOR_TAGS",
    "Heads",
    "Message",
    "Pieces",
    "RankPasses",
    "RankSchedule",
    "Scans",
    "Schedule",
    "Step",
    "Tiles",
    "side_of",
    "tag",
]

# ---- messages: pieces of rows of one kind, from one rank to another
#
# The kinds of rows:
#     operands, copied to the receiver:    q      query rows                   kv     key and value rows
#                                          do     rows of the output's gradient, with the final lse and delta
#     results, sent once and added up:     out    partial output rows with their lse (the receiver merges them by lse)
#                                          dq     gradient of query rows       dkv    gradient of key and value rows


OPERANDS = ("kv", "q", "do")
RESULTS = ("out", "dq", "dkv")
KINDS = OPERANDS + RESULTS  # of attention

Heads = tuple[int, int]


def side_of(name: str) -> str:
    """Which buffer the rows of a kind of message, or of a tensor, are of: "q" or "kv".

    >>> [side_of(name) for name in ("dkv", "dk", "out")]
    ['kv', 'kv', 'q']
    """
    return "kv" if name in ("kv", "k", "v", "dkv", "dk", "dv") else "q"


# Tags. The order of the messages between two ranks decides which send belongs to which receive; their tags must agree.
STEP_TAGS = len(KINDS)  # of a step: one for each kind
TENSOR_TAGS = 4  # of a message, on the wire: one for each of its tensors
MOST_TAGS = 2**21  # of a schedule: process groups take tags of 31 bits, and the fast path needs 2**10 for a message


def tag(step: int, kind: str) -> int:
    """The tag of a step's messages of one kind.

    >>> tag(0, "kv"), tag(1, "kv")
    (0, 6)
    """
    return step * STEP_TAGS + KINDS.index(kind)


@dataclass(frozen=True, eq=False)
class Pieces(Table):
    """Pieces of messages: rows [start, stop) of a global buffer, for heads [head_start, head_stop).

    Heads count query heads in q, do, out and dq, and kv heads in kv and dkv.
    """

    start: Column
    stop: Column
    head_start: Column
    head_stop: Column

    @staticmethod
    def of(spans: Spans, heads: Heads) -> Pieces:
        """Pieces of the same heads."""
        return Pieces(*spans, *(constant(head, spans.start) for head in heads))

    @property
    def total(self) -> int:
        """The number of rows of all pieces; a row of some of the heads counts as one."""
        return int((self.stop - self.start).sum())

    @property
    def row_heads(self) -> int:
        """The number of rows of all pieces, each times its heads."""
        return int(((self.stop - self.start) * (self.head_stop - self.head_start)).sum())


@dataclass(frozen=True, eq=False)
class Message:
    """Pieces of one kind to, or from, one peer. A send and its receive differ only in the peer.

    `complete`: these are the whole results of their rows and heads, on the way to their owner. They may be rounded to
    the input's dtype before they travel, because nothing is added to them any more. `verify` proves it.

    `tag`: the same at both ends. Messages are in the order of the steps, whatever their tags: between two ranks the
    n-th message sent is the n-th received.
    """

    kind: str
    peer: int
    tag: int
    pieces: Pieces
    complete: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        mine, theirs = ((m.kind, m.peer, m.tag, m.complete) for m in (self, other))
        return mine == theirs and self.pieces == other.pieces

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # pieces are arrays

    @cached_property
    def by_heads(self) -> list[tuple[Heads, Column, Column]]:
        """(heads, start, stop) of the pieces; neighbours of the same heads are one entry."""
        p = self.pieces
        if one_value(p.head_start) and one_value(p.head_stop):
            return [((int(p.head_start[0]), int(p.head_stop[0])), p.start, p.stop)] if len(p) else []
        new = (p.head_start[1:] != p.head_start[:-1]) | (p.head_stop[1:] != p.head_stop[:-1])
        edges = [0, *(np.flatnonzero(new) + 1).tolist(), len(p)]
        return [((int(p.head_start[a]), int(p.head_stop[a])), p.start[a:b], p.stop[a:b]) for a, b in pairwise(edges)]


# ---- schedules


@dataclass(frozen=True, eq=False)
class Tiles(Table):
    """Tiles: rectangles of areas, for query heads [head_start, head_stop). `area` is a row of `Areas`."""

    area: Column
    q_start: Column
    q_stop: Column
    k_start: Column
    k_stop: Column
    head_start: Column
    head_stop: Column


STATES = ("state", "dstate")  # kinds of messages of linear layers, copied


@dataclass(frozen=True, eq=False)
class Scans(Table):
    """Of linear layers: maps of fragments [start, stop) of documents, in the order in which they are composed, document
    after document.

    The state that enters a fragment of the rank's is the composition of the maps before it in its document's rows.
    """

    document: Column
    start: Column
    stop: Column


class Step(NamedTuple):
    """Messages posted together, and the tiles, or the scans, computed while they travel."""

    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()
    tiles: Tiles = Tiles.of_rows([])
    scans: Scans = Scans.of_rows([])


RankSchedule = tuple[Step, ...]
RankPasses = tuple[RankSchedule, RankSchedule]  # One rank's forward and backward pass.


@dataclass(frozen=True, repr=False)
class Schedule:
    """Both passes of every rank: `forward[rank][step]`, `backward[rank][step]`.

    `heads` are the numbers of query heads and of kv heads. `saved` names the operands that a rank keeps after the
    forward pass, received ones included, and has again at the start of the backward pass; otherwise it starts the
    backward pass with what it owns.
    """

    name: str
    heads: Heads
    forward: tuple[RankSchedule, ...]
    backward: tuple[RankSchedule, ...]
    saved: tuple[str, ...] = ()

    @property
    def cp_size(self) -> int:
        """The number of ranks of the schedule."""
        return len(self.forward)

    def all_heads(self, kind: str) -> Heads:
        """All heads of one kind of operand or result: (0, number of heads)."""
        return _all_heads(self.heads, kind)

    def steps(self) -> Iterator[tuple[str, int, int, Step]]:
        """(direction, rank, number of the step, step): all of the forward pass, then all of the backward pass."""
        for direction, rank_schedules in (("forward", self.forward), ("backward", self.backward)):
            for rank, rank_schedule in enumerate(rank_schedules):
                for number, step in enumerate(rank_schedule):
                    yield direction, rank, number, step

    def __repr__(self) -> str:
        return f"Schedule.parse({str(self)!r})"

    def __str__(self) -> str:
        heads, saved = f"{self.heads[0]}/{self.heads[1]}", ",".join(self.saved) or "-"
        lines = [f"schedule {self.name} cp_size {self.cp_size} heads {heads} saved {saved}"]
        for direction, rank_schedules in (("forward", self.forward), ("backward", self.backward)):
            for rank, rank_schedule in enumerate(rank_schedules):
                lines.append(f"{direction} rank {rank}")
                for step in rank_schedule:
                    lines.append("  step")
                    lines += [f"    {line}" for line in self.lines(step)]
        return "\n".join(lines) + "\n"

    def lines(self, step: Step) -> Iterator[str]:
        """The text of a step, line by line, without indentation."""
        yield from (self.message_text(m, "send") for m in step.sends)
        yield from (self.message_text(m, "recv") for m in step.recvs)
        for row in step.tiles.rows():
            yield self.tile_text(row)
        for document, maps in groupby(step.scans.rows(), key=lambda row: row[0]):
            yield f"scan {document} {' '.join(f'[{start}:{stop}]' for _, start, stop in maps)}"

    def message_text(self, message: Message, verb: str) -> str:
        """A message as a line; `verb` is "send" or "recv"."""
        whole = self.all_heads(message.kind)
        pieces = " ".join(f"[{a}:{b}]{_heads_text((h0, h1), whole)}" for a, b, h0, h1 in message.pieces.rows())
        kind = f"complete {message.kind}" if message.complete else message.kind
        return f"{verb} {kind} {pieces} {'to' if verb == 'send' else 'from'} {message.peer} tag {message.tag}"

    def tile_text(self, tile: Sequence[int]) -> str:
        """A row of `Tiles` as a line."""
        area, q0, q1, k0, k1, h0, h1 = tile
        return f"tile {area}{_heads_text((h0, h1), self.all_heads('q'))} q[{q0}:{q1}] k[{k0}:{k1}]"

    @staticmethod
    def parse(text: str) -> Schedule:
        """The schedule that `str` printed.

        Raises:
            ValueError: naming the first line that is not understood, or that has a number of more than 18 digits.
        """
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if (long := next((line for line in lines if _LONG.search(line)), None)) is not None:
            raise ValueError(f"{long[:200]!r} has a number of more than 18 digits")
        head = re.fullmatch(r"schedule (\S+) cp_size (\d+) heads (\d+)/(\d+) saved (\S+)", lines[0] if lines else "")
        if head is None:
            raise ValueError("a schedule begins with 'schedule NAME cp_size N heads Q/KV saved KINDS'")
        cp_size, heads = int(head[2]), (int(head[3]), int(head[4]))
        if cp_size > MOST_RANKS:
            raise ValueError(f"{lines[0]!r}: cp_size is {cp_size}; a schedule has at most {MOST_RANKS} ranks")
        rank_schedules: dict[str, list[list[_StepText]]] = {
            d: [[] for _ in range(cp_size)] for d in ("forward", "backward")
        }
        rank_schedule: list[_StepText] | None = None
        for line in lines[1:]:
            if found := re.fullmatch(r"(forward|backward) rank (\d+)", line):
                if int(found[2]) >= cp_size:
                    raise ValueError(f"{line!r}: cp_size is {cp_size}")
                rank_schedule = rank_schedules[found[1]][int(found[2])]
            elif rank_schedule is None:
                raise ValueError(f"{line!r} stands before any 'forward rank R'")
            elif line == "step":
                rank_schedule.append(_StepText([], [], [], []))
            elif rank_schedule:
                rank_schedule[-1].read(line, heads)
            else:
                raise ValueError(f"{line!r} stands before any 'step'")
        forward, backward = (
            tuple(tuple(s.step() for s in p) for p in rank_schedules[d]) for d in ("forward", "backward")
        )
        return Schedule(head[1], heads, forward, backward, () if head[5] == "-" else tuple(head[5].split(",")))


_LONG = re.compile(r"\d{19}")  # columns are integers of 64 bits
_HEADS = r"(?:h(\d+):(\d+))?"
_PIECE = re.compile(rf"\[(\d+):(\d+)\]{_HEADS}")
_MESSAGE = re.compile(r"(send|recv)( complete)? (\S+) (.*?) ?(?:to|from) (\d+) tag (\d+)")
_SCAN = re.compile(r"scan (\d+)((?: \[\d+:\d+\])+)")
_TILE = re.compile(rf"tile (\d+){_HEADS} q\[(\d+):(\d+)\] k\[(\d+):(\d+)\]")


def _all_heads(heads: Heads, kind: str) -> Heads:
    return 0, heads[1] if side_of(kind) == "kv" else heads[0]


def _heads_text(heads: Heads, whole: Heads) -> str:
    return "" if heads == whole else f"h{heads[0]}:{heads[1]}"


class _StepText(NamedTuple):
    """A step while its lines are read."""

    sends: list[Message]
    recvs: list[Message]
    tiles: list[tuple[int, ...]]
    scans: list[tuple[int, ...]]

    def step(self) -> Step:
        return Step(tuple(self.sends), tuple(self.recvs), Tiles.of_rows(self.tiles), Scans.of_rows(self.scans))

    def read(self, line: str, heads: Heads) -> None:
        if found := _TILE.fullmatch(line):
            span = (0, heads[0]) if found[2] is None else (int(found[2]), int(found[3]))
            self.tiles.append((int(found[1]), *(int(found[n]) for n in (4, 5, 6, 7)), *span))
            return
        if found := _SCAN.fullmatch(line):
            self.scans.extend((int(found[1]), int(w[1]), int(w[2])) for w in _PIECE.finditer(found[2]))
            return
        if (found := _MESSAGE.fullmatch(line)) and found[3] in KINDS + STATES:
            words = [_PIECE.fullmatch(word) for word in found[4].split()]
            if all(words):
                whole = _all_heads(heads, found[3])
                pieces = Pieces.of_rows(
                    (int(w[1]), int(w[2]), *(whole if w[3] is None else (int(w[3]), int(w[4])))) for w in words if w
                )
                message = Message(found[3], int(found[5]), int(found[6]), pieces, found[2] is not None)
                (self.sends if found[1] == "send" else self.recvs).append(message)
                return
        raise ValueError(f"{line!r} is no line of a schedule")
