"""A program: one flat list of instructions for one rank and one direction, and the buffers that they work on.

The compiler makes it from the rank's schedule (`cp_fast.compile`), the runtime runs it in one loop (`cp_fast.runtime`).

    Send, Recv   tensors to or from one peer; neighbours in the list travel together
    Wait         until the messages that were posted last have arrived
    Copy         rows and heads of one buffer into another
    Launch       one call of a kernel library on one varlen batch
    Accumulate   a partial result into a sum, by log-sum-exp (out) or by addition (dq, dkv)
    Free         buffers after their last use

A buffer holds the tensors of one kind. Tensors by row are [rows, heads, head dim], tensors by column [heads, rows].

    kind   by row               by column
    q      q
    kv     k, v
    do     the gradient of out  the gradient of lse, where there is one
    res    out                  lse             both final, for a backward launch
    out    out                  lse
    dq     dq
    dkv    dk, dv
    sink                        each head's sink logit [heads]

Rows are generic (R). On the host they are slices and keys of `cp_fast.compile.index_tables.Tables`. On the device they
are slices and index tensors. Heads of a view are counted from the buffer's first head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from cp_ref.schedules.table import Spans

__all__ = [
    "OWN",
    "Accumulate",
    "BufferSpec",
    "Copy",
    "Free",
    "Heads",
    "Instruction",
    "Launch",
    "Program",
    "Programs",
    "Recv",
    "Role",
    "Send",
    "View",
    "Wait",
    "lines_of",
    "reads",
    "with_views",
    "writes",
]

R = TypeVar("R")  # Rows.
Heads = tuple[int, int]
Role = Literal["own", "operand", "partial", "sum", "message", "result"]
OWN = {"q": 0, "kv": 1, "do": 2, "res": 3, "sink": 4}  # the numbers of the rank's own buffers, the same in both passes


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """The specification of a buffer.

    Attributes:
        name: its origin; equal in the plans of two batches for the same purpose.
        kind: see the module.
        heads: [first, last) of all heads.
        rows: the number of rows; None for that of the rank's own tensors.
        role: "own" for a given slice, "operand" for rows read by launches, "partial" for the result of one launch or
            message, "sum" for an accumulator of partial results, "message" for results to be sent, "result" for a
            result of the pass.
        dtype: the final dtype of the rows: the inputs' dtype or the wide one (float32, or float64 for float64).
        parts: of a stacked buffer [parts, rows, heads, head dim], one part for each peer of an all-to-all; else 0.
    """

    name: str
    kind: str
    heads: Heads
    rows: int | None
    role: Role
    dtype: Literal["input", "wide"] = "input"
    parts: int = 0

    @property
    def all_heads(self) -> Heads:
        """All heads, counted from the first one."""
        return 0, self.heads[1] - self.heads[0]


@dataclass(frozen=True, slots=True)
class View(Generic[R]):
    """Rows and heads of a buffer. `rows` None means all of them."""

    buffer: int
    rows: R | None
    heads: Heads


@dataclass(frozen=True, slots=True)
class Send(Generic[R]):
    """Send a view to a peer: one tensor by row after another with the tags `tag`, `tag + 1`, then the tensors by
    column from `tag + 2` on. `part`: which part of a stacked buffer.
    """

    step: int
    peer: int
    tag: int
    source: View[R]
    part: int | None = None
    made_by: str = "lower"


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive into these rows of a buffer (None for all), or into one part of a stacked buffer. `size`: the rows of
    the message.
    """

    step: int
    peer: int
    tag: int
    buffer: int
    size: int
    rows: tuple[slice, ...] | None = None
    part: int | None = None
    made_by: str = "lower"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the messages that were posted last."""

    step: int
    made_by: str = "lower"


@dataclass(frozen=True, slots=True)
class Copy(Generic[R]):
    """Copy a view into another one.

    If one side is a stacked buffer, its part i has the heads from `first_heads[i]` on of the other side's rows. A copy
    of a whole buffer to its whole target moves no rows and only converts to the target's dtype.
    """

    step: int
    source: View[R]
    target: View[R]
    first_heads: tuple[int, ...] = ()
    made_by: str = "lower"


@dataclass(frozen=True, slots=True)
class Launch(Generic[R]):
    """Launch a kernel on one varlen batch.

    Attributes:
        operands: q, kv; in the backward pass do and res too.
        batch: the segments' lengths and window (`VarlenBatch`; on the host their keys).
        results: its partial results: out, or dq and dkv.
        into: where its out is written, in a buffer that other launches write to as well: `results` names the buffer.
        first_head: the first query head, of all.
        q_rows, kv_rows: the global rows of its queries and keys, in their order; they determine the positions. Between
            segments that lie apart, any rows.
    """

    step: int
    operands: tuple[View[R], ...]
    batch: Any
    results: tuple[int, ...]
    first_head: int
    q_rows: Spans = field(compare=False)
    kv_rows: Spans = field(compare=False)
    made_by: str = "lower"
    into: View[R] | None = None


@dataclass(frozen=True, slots=True)
class Accumulate(Generic[R]):
    """Accumulate a view of a partial result into a view of a sum. `of_sink`: it accumulates the sink."""

    step: int
    source: View[R]
    target: View[R]
    made_by: str = "lower"
    of_sink: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """Free these buffers: they have no later use."""

    step: int
    buffers: tuple[int, ...]
    made_by: str = "free_early"


Instruction = Send[R] | Recv | Wait | Copy[R] | Launch[R] | Accumulate[R] | Free


def reads(one: Instruction[Any]) -> tuple[int, ...]:
    """The buffers that an instruction reads."""
    if isinstance(one, Send | Copy | Accumulate):
        return (one.source.buffer,)
    return tuple(view.buffer for view in one.operands) if isinstance(one, Launch) else ()


def writes(one: Instruction[Any]) -> tuple[int, ...]:
    """The buffers that an instruction writes."""
    if isinstance(one, Copy | Accumulate):
        return (one.target.buffer,)
    if isinstance(one, Recv):
        return (one.buffer,)
    return one.results if isinstance(one, Launch) else ()


def with_views(one: Instruction[Any], change: Callable[[View[Any]], View[Any]]) -> Instruction[Any]:
    """The instruction with each of its views changed."""
    if isinstance(one, Send):
        return replace(one, source=change(one.source))
    if isinstance(one, Copy | Accumulate):
        return replace(one, source=change(one.source), target=change(one.target))
    if isinstance(one, Launch):
        into = None if one.into is None else change(one.into)
        return replace(one, operands=tuple(map(change, one.operands)), into=into)
    return one


# ---- Programs


class Accumulations(NamedTuple):
    """The accumulations of one sum, by the ids of the instructions.

    Attributes:
        rounded: those whose result may have the sum's final dtype: none of their rows gets a further partial result.
        written: those that only write, since all of their rows are new to the sum.
        filled: how many rows the latter have.
    """

    rounded: frozenset[int]
    written: frozenset[int]
    filled: int

    @staticmethod
    def of(spec: BufferSpec, some: Sequence[Accumulate[Any]]) -> Accumulations:
        """Those of a sum, in order. Rows by index may be any rows."""
        places = [one.target.rows for one in some]
        if any(one.target.heads != spec.all_heads for one in some):
            places = [None] * len(some)
        earlier = [sum(_meet(rows, other) for other in places[:n]) for n, rows in enumerate(places)]
        later = [any(_meet(rows, other) for other in places[n + 1 :]) for n, rows in enumerate(places)]
        once = all(n < 2 for n in earlier)  # No row is rounded, and then added to: the sum is never widened.
        return Accumulations(
            frozenset(id(one) for n, one in enumerate(some) if n + 1 == len(some) or (once and not later[n])),
            frozenset(id(one) for n, one in enumerate(some) if not earlier[n]),
            sum(x.stop - x.start for x, n in zip(places, earlier, strict=True) if isinstance(x, slice) and not n),
        )


def _meet(a: Any, b: Any) -> bool:
    """Whether rows of a sum may be the same.

    >>> _meet(slice(0, 4), slice(4, 6)), _meet(slice(0, 4), None)
    (False, True)
    """
    return not (isinstance(a, slice) and isinstance(b, slice)) or max(a.start, b.start) < min(a.stop, b.stop)


@dataclass(frozen=True)
class Program(Generic[R]):
    """The work of one rank in one direction: instructions on numbered buffers.

    Attributes:
        direction: "forward" or "backward"; of the exchange of a layer what it does, and with which rows.
        steps: how many steps the schedule has.
        buffers: by number.
        instructions: in the order in which they run.
        results: by kind, the buffer of the rank's own results.
    """

    direction: str
    steps: int
    buffers: tuple[BufferSpec, ...]
    instructions: tuple[Instruction[R], ...]
    results: dict[str, int]

    def of(self, kind: type[Any]) -> Iterator[Any]:
        """The instructions of one type, in order."""
        return (one for one in self.instructions if type(one) is kind)

    @cached_property
    def accumulations(self) -> dict[int, Accumulations]:
        """How each sum is accumulated, sinks aside; by buffer."""
        found: dict[int, list[Accumulate[R]]] = {}
        for one in self.of(Accumulate):
            if not one.of_sink:
                found.setdefault(one.target.buffer, []).append(one)
        return {total: Accumulations.of(self.buffers[total], some) for total, some in found.items()}

    def __str__(self) -> str:
        return "\n".join(lines_of(self))


@dataclass(frozen=True)
class Programs(Generic[R]):
    """Both programs of one rank.

    Attributes:
        forward, backward: the program of each direction.
        saved: (buffer of the forward program, buffer of the backward one) of every buffer kept between them, including
            the own q and kv if the backward one reads them.
        real_q_rows: the local rows that hold real query tokens; in a plan that is updated in place a mask of all rows.
        skipped: the compiler passes that did not run, and why.
        spare_rows: in a plan updated in place, the number of spare rows at the end of each buffer. Tables have a
            constant size there; their padding writes to the spare rows, which are never read.
        position_ids: int64 [t], in a plan that is updated in place.
    """

    forward: Program[R]
    backward: Program[R]
    saved: tuple[tuple[int, int], ...]
    real_q_rows: R
    skipped: Mapping[str, str] = field(default_factory=dict)
    spare_rows: int = 0
    position_ids: Any = None

    @property
    def needs_inputs(self) -> bool:
        """Whether the backward pass reads the rank's own q, k and v."""
        return any(number in (OWN["q"], OWN["kv"]) for number, _ in self.saved)

    @property
    def kept_buffers(self) -> tuple[tuple[int, int], ...]:
        """`saved` without the rank's own buffers."""
        return tuple(pair for pair in self.saved if pair[0] not in (OWN["q"], OWN["kv"]))

    @property
    def kept_kinds(self) -> str:
        """The tensors of `kept_buffers`: a letter for each one, "x" for rows of the input's dtype, "l" for an lse."""
        letters = {"kv": "xx", "out": "xl"}
        return "".join(letters.get(self.forward.buffers[number].kind, "x") for number, _ in self.kept_buffers)

    @property
    def sends_do(self) -> bool:
        """Whether rows of the output's gradient are sent; the same on every rank."""
        program = self.backward
        sent = [one.source.buffer for one in program.of(Send)] + [one.buffer for one in program.of(Recv)]
        return any(program.buffers[number].kind == "do" for number in sent)

    def __str__(self) -> str:
        skipped = [f"skipped {name}: {reason}\n" for name, reason in self.skipped.items()]
        return f"{''.join(skipped)}{self.forward}\n{self.backward}"


# ---- A program as text


def lines_of(program: Program[Any]) -> Iterator[str]:
    """The instructions of one program, a line each, by step. A line that a compiler pass made ends with its name."""
    yield program.direction
    step = -1
    for number, one in enumerate(program.instructions):
        if one.step != step:
            step = one.step
            yield f"  step {step}"
        line = f"  {number:3d} {_instruction(program.buffers, one)}"
        yield line if one.made_by == "lower" else f"{line:<74} ; {one.made_by}"


def _instruction(buffers: Sequence[BufferSpec], one: Instruction[Any]) -> str:
    if isinstance(one, Send):
        part = "" if one.part is None else f" part {one.part}"
        return f"send        {_view(buffers, one.source)}{part} -> rank {one.peer}, tag {one.tag}"
    if isinstance(one, Recv):
        rows = "" if one.rows is None else " " + " ".join(map(_rows, one.rows))
        part = "" if one.part is None else f" part {one.part}"
        return f"recv        {_buffer(buffers, one.buffer)}{rows}{part} <- rank {one.peer}, tag {one.tag}"
    if isinstance(one, Wait):
        return "wait"
    if isinstance(one, Copy):
        heads = f" heads from {', '.join(map(str, one.first_heads))}" if one.first_heads else ""
        return f"copy        {_view(buffers, one.source)} -> {_view(buffers, one.target)}{heads}"
    if isinstance(one, Launch):
        operands = ", ".join(_view(buffers, view) for view in one.operands)
        results = ", ".join(_buffer(buffers, number) for number in one.results)
        results = results if one.into is None else _view(buffers, one.into)
        window = f"window {_side(one.batch.left)}:{_side(one.batch.right)}"
        return f"launch      {operands} {window} -> {results}"
    if isinstance(one, Accumulate):
        return f"accumulate  {_view(buffers, one.source)} -> {_view(buffers, one.target)}"
    assert isinstance(one, Free)
    return "free        " + ", ".join(f"b{number}" for number in one.buffers)


def _side(side: int | None) -> str:
    return "*" if side is None else str(side)


def _buffer(buffers: Sequence[BufferSpec], number: int) -> str:
    spec = buffers[number]
    return f"b{number}:{spec.kind}" + ("" if spec.role == "operand" else f" {spec.role}")


def _view(buffers: Sequence[BufferSpec], view: View[Any]) -> str:
    spec, text = buffers[view.buffer], _buffer(buffers, view.buffer)
    if view.rows is not None:
        text += _rows(view.rows)
    return text if view.heads == spec.all_heads else f"{text} heads {view.heads[0]}:{view.heads[1]}"


def _rows(rows: Any) -> str:
    """Rows of a buffer: a slice, or how many an index table has; of a draft, the number of the table.

    >>> _rows(slice(2, 6)), _rows(range(5))
    ('[2:6]', '[5 rows by index]')
    """
    if isinstance(rows, slice):
        return f"[{rows.start}:{rows.stop}]"
    return f"[table {rows}]" if isinstance(rows, int) else f"[{len(rows)} rows by index]"
