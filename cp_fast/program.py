"""A rank's lowered program: buffers, messages, copies and kernel launches on rows, made once per batch.

What is sent and computed, step by step, is what the schedule says (`plan.schedule`); `cp_fast.planning` works out which
row of which buffer each of its rows is. The program is generic in what rows are: on the host slices and keys of
`planning.tables.Tables`, on the device slices and index tensors (`cp_fast.rows.Rows`).

    buffer   operands in one piece of memory: the rank's own rows, what arrived during one step, or what was put
             together from others because one launch needs it
    sums     where partial results are added up: rows of messages that are to be sent, or the rank's own rows ("home")

Kinds of operands are those of the schedule (q, kv, do) and `res`, the forward pass's out and lse, which a backward
kernel wants beside do. Heads are counted inside a buffer, from its first head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cp_fast.backends import Segments

__all__ = [
    "Buffer",
    "Contribution",
    "Copy",
    "Launch",
    "LoweredProgram",
    "LoweredStep",
    "Operand",
    "Recv",
    "ResultRecv",
    "ResultSend",
    "Send",
]
__all__ += ["OWN", "Heads", "Sums"]

R = TypeVar("R")  # rows
Heads = tuple[int, int]

OWN = {kind: f"own {kind}" for kind in ("q", "kv", "do", "res")}  # the buffers with a rank's own rows


@dataclass(frozen=True, slots=True)
class Buffer:
    """Operands of one kind: `size` rows of heads [heads[0], heads[1])."""

    kind: str
    heads: Heads
    size: int


@dataclass(frozen=True, slots=True)
class Sums:
    """Results of one kind: `size` rows of heads [heads[0], heads[1]). `home`: the rank's own rows, as many as its
    tensors have. `complete`: nothing will be added by others, so they may be rounded before they are sent. `narrow`:
    one launch's results, sent as the launch rounded them (`planning.narrow`).
    """

    kind: str
    heads: Heads
    size: int
    home: bool
    complete: bool = False
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Operand(Generic[R]):
    """Rows and heads of a buffer."""

    buffer: str
    rows: R
    heads: Heads


@dataclass(frozen=True, slots=True)
class Copy(Generic[R]):
    """Rows of a buffer that are written to rows of another one."""

    source: Operand[R]
    target: Operand[R]


@dataclass(frozen=True, slots=True)
class Send(Generic[R]):
    """A send of the same rows of a buffer to one peer or several, to each of them `heads` heads from its first one on.
    `tags` are those of each peer's first tensor.
    """

    peers: tuple[int, ...]
    tags: tuple[int, ...]
    buffer: str
    rows: R
    first_heads: tuple[int, ...]
    heads: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Operands that arrive: `size` rows of a buffer, behind those of the receives before it into the same buffer."""

    peer: int
    tag: int
    buffer: str
    size: int


@dataclass(frozen=True, slots=True)
class Contribution(Generic[R]):
    """Rows and heads of a partial result that are added to rows of sums."""

    sums: str
    rows: R  # of the partial result
    heads: Heads  # of the partial result
    into: R  # rows of the sums
    into_heads: Heads


@dataclass(frozen=True, slots=True)
class ResultSend:
    """Results that are handed over: rows [start, start + size) of sums."""

    peer: int
    tag: int
    sums: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class ResultRecv(Generic[R]):
    """Partial results of `size` rows that arrive, and where they go. `narrow`: in the input's dtype."""

    peer: int
    tag: int
    kind: str
    heads: Heads
    size: int
    complete: bool
    into: tuple[Contribution[R], ...]
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Launch(Generic[R]):
    """One kernel launch: what it reads, how its rows are segmented, and where its results go.

    `results`: in the forward pass those of out, in the backward pass those of dq; `results_kv`: those of dk and dv.
    """

    q: Operand[R]
    kv: Operand[R]
    do: Operand[R] | None  # in the backward pass
    res: Operand[R] | None
    segments: Segments | Any  # on the host: `planning.groups.SegmentKeys`
    first_head: int  # of all query heads
    results: tuple[Contribution[R], ...]
    results_kv: tuple[Contribution[R], ...] = ()


@dataclass(frozen=True, slots=True)
class LoweredStep(Generic[R]):
    """One step: `packed` are copies that its sends need, `copies` those that its launches need. `last_use` are buffers
    that nothing needs after it.
    """

    packed: tuple[Copy[R], ...]
    sends: tuple[Send[R], ...]
    recvs: tuple[Recv, ...]
    result_sends: tuple[ResultSend, ...]
    result_recvs: tuple[ResultRecv[R], ...]
    copies: tuple[Copy[R], ...]
    launches: tuple[Launch[R], ...]
    last_use: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoweredProgram(Generic[R]):
    """Both passes of one rank.

    Attributes:
        forward, backward: the steps.
        buffers: every operand buffer by name; those of `OWN` are the rank's own.
        sums: everything that results are added up in, by name.
        saved: buffers that the backward pass needs of those that the forward pass had, the own q and kv included.
        saved_sums: complete results that were sent and are `res` buffers of the backward pass, by the names of both.
        real_q_rows: the local rows that hold real query tokens; in a plan that is updated in place a mask of all rows.
        spare_rows: how many rows lie behind those of every buffer that results are added to, to be written and never
            read: in a plan that is updated in place tables have a constant size, and what pads them is written there.
    """

    forward: tuple[LoweredStep[R], ...]
    backward: tuple[LoweredStep[R], ...]
    buffers: dict[str, Buffer]
    sums: dict[str, Sums]
    saved: tuple[str, ...]
    saved_sums: dict[str, str]
    real_q_rows: R
    spare_rows: int = 0
    position_ids: Any = None  # int64 [t], in a plan that is updated in place

    @property
    def needs_inputs(self) -> bool:
        """Whether the backward pass needs the rank's own q, k and v."""
        return any(number in self.saved for number in (OWN["q"], OWN["kv"]))

    @property
    def kept(self) -> str:
        """The tensors that the forward pass keeps for the backward pass beside its arguments and results: a letter for
        each tensor, "x" for rows of the input's dtype, "l" for an lse.
        """
        letters = {"kv": "xx", "res": "xl"}
        numbers = [number for number in self.saved if number not in OWN.values()]
        kinds = [self.buffers[number].kind for number in numbers]
        return "".join(letters.get(kind, "x") for kind in kinds) + "xl" * len(self.saved_sums)

    @property
    def sends_do(self) -> bool:
        """Whether rows of the output's gradient travel; so on every rank of a schedule in which they do."""
        return any(self.buffers[send.buffer].kind == "do" for step in self.backward for send in step.sends) or any(
            self.buffers[recv.buffer].kind == "do" for step in self.backward for recv in step.recvs
        )
