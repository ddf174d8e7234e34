"""The instructions of an executable plan (`cp_fast.compile.executable_plan`), and the buffers that they work on.

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

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from cp_fast.compile.row_maps import Spans

__all__ = [
    "OWN",
    "Accumulate",
    "BufferSpec",
    "Copy",
    "Free",
    "Heads",
    "Instruction",
    "Launch",
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
    """

    step: int
    operands: tuple[View[R], ...]
    batch: Any
    results: tuple[int, ...]
    first_head: int
    q_rows: Spans = field(compare=False)
    kv_rows: Spans = field(compare=False)
    made_by: str = "lower"


@dataclass(frozen=True, slots=True)
class Accumulate(Generic[R]):
    """Accumulate a view of a partial result, or the sink, into a view of a sum."""

    step: int
    source: View[R]
    target: View[R]
    made_by: str = "lower"

    @property
    def of_sink(self) -> bool:
        """Whether it accumulates the sink."""
        return self.source.buffer == OWN["sink"]


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
