"""The executable plan: one flat list of instructions for one rank and one pass, on numbered buffers.

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

Rows are generic (R). On the host they are slices and keys of `cp_fast.compile.tables.Tables`; on the device they are
slices and index tensors. Heads of a view are counted from the buffer's first head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from cp_fast.compile.row_maps import Spans

__all__ = [
    "OWN",
    "Accumulate",
    "BufferSpec",
    "Copy",
    "ExecutablePlan",
    "Free",
    "Heads",
    "Instruction",
    "Launch",
    "PassPlan",
    "Recv",
    "Role",
    "Send",
    "View",
    "Wait",
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
    """Receive into these rows of a buffer (None for all), or into one part of a stacked buffer."""

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
        first_head: the first query head, of all.
        q_rows, kv_rows: the global rows of its queries and keys, segment after segment; they determine the positions.
        state: the slot of the kernel library's opaque state. The forward launch fills it, if the library keeps any, and
            the backward launch of the same rows, heads and window reads it. None if there is no such forward launch.
    """

    step: int
    operands: tuple[View[R], ...]
    batch: Any
    results: tuple[int, ...]
    first_head: int
    q_rows: Spans = field(compare=False)
    kv_rows: Spans = field(compare=False)
    state: int | None = None
    made_by: str = "lower"


@dataclass(frozen=True, slots=True)
class Accumulate(Generic[R]):
    """Accumulate a view of a partial result into a view of a sum."""

    step: int
    source: View[R]
    target: View[R]
    made_by: str = "lower"


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


def with_views(one: Instruction[Any], change: Callable[[View[Any]], View[Any]]) -> Instruction[Any]:
    """The instruction with each of its views changed."""
    if isinstance(one, Send):
        return replace(one, source=change(one.source))
    if isinstance(one, Copy | Accumulate):
        return replace(one, source=change(one.source), target=change(one.target))
    return replace(one, operands=tuple(map(change, one.operands))) if isinstance(one, Launch) else one


def writes(one: Instruction[Any]) -> tuple[int, ...]:
    """The buffers that an instruction writes."""
    if isinstance(one, Copy | Accumulate):
        return (one.target.buffer,)
    if isinstance(one, Recv):
        return (one.buffer,)
    return one.results if isinstance(one, Launch) else ()


@dataclass(frozen=True)
class PassPlan(Generic[R]):
    """The executable plan of one pass.

    Attributes:
        direction: "forward" or "backward".
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
    def last_accumulations(self) -> dict[int, Accumulate[R]]:
        """The last accumulation into each sum, sinks aside."""
        return {one.target.buffer: one for one in self.of(Accumulate) if one.source.buffer != OWN["sink"]}

    def __str__(self) -> str:
        from cp_fast.compile.instruction_text import lines_of

        return "\n".join(lines_of(self))


@dataclass(frozen=True)
class ExecutablePlan(Generic[R]):
    """Both passes of one rank.

    Attributes:
        forward, backward: the lists of instructions.
        saved: (buffer of the forward pass, buffer of the backward pass) of every buffer kept between the passes,
            including the own q and kv if the backward pass reads them.
        real_q_rows: the local rows that hold real query tokens; in a plan that is updated in place a mask of all rows.
        skipped: the compiler passes that did not run, and why.
        spare_rows: in a plan updated in place, the number of spare rows at the end of each buffer. Tables have a
            constant size there; their padding writes to the spare rows, which are never read.
        position_ids: int64 [t], in a plan that is updated in place.
    """

    forward: PassPlan[R]
    backward: PassPlan[R]
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
    def kept(self) -> tuple[tuple[int, int], ...]:
        """`saved` without the rank's own buffers."""
        return tuple(pair for pair in self.saved if pair[0] not in (OWN["q"], OWN["kv"]))

    @property
    def kept_tensors(self) -> str:
        """The tensors of `kept`: a letter for each one, "x" for rows of the input's dtype, "l" for an lse."""
        letters = {"kv": "xx", "out": "xl"}
        return "".join(letters.get(self.forward.buffers[number].kind, "x") for number, _ in self.kept)

    @property
    def states(self) -> int:
        """The number of slots of launches' opaque states."""
        return sum(1 for _ in self.forward.of(Launch))

    @property
    def sends_do(self) -> bool:
        """Whether rows of the output's gradient are sent; the same on every rank."""
        plan = self.backward
        sent = [one.source.buffer for one in plan.of(Send)] + [one.buffer for one in plan.of(Recv)]
        return any(plan.buffers[number].kind == "do" for number in sent)

    def __str__(self) -> str:
        skipped = [f"skipped {name}: {reason}\n" for name, reason in self.skipped.items()]
        return f"{''.join(skipped)}{self.forward}\n{self.backward}"
