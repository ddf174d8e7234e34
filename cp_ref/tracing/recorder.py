"""Recording a trace: `trace()` for the user, and the hooks that the executor calls.

With no trace recording, the hooks are those of `Recorder`, which do nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from cp_ref.contract.group import Parcel
from cp_ref.executor.rank_tensors import World, own_fragments
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Message, Schedule, side_of
from cp_ref.tracing.recorded_trace import PER_HEAD, Item, Piece, Trace

__all__ = ["SILENT", "Recorder", "recording", "trace"]

_NAMES = {  # The tensors of a message, as in `cp_ref.executor.rank_tensors`.
    "q": ("q",),
    "kv": ("k", "v"),
    "do": ("dout", "lse", "delta"),
    "out": ("out", "lse"),
    "dq": ("dq",),
    "dkv": ("dk", "dv"),
}

_now: Trace | None = None  # One per process: the ranks of a SimGroup are its threads.


@contextmanager
def trace(call: int = 0) -> Generator[Trace]:
    """Record every intermediate of one `cp_ref.attention` call and of its backward pass.

    Args:
        call: which call of each rank inside the block, from 0: in a model, the number of the layer.

    Every rank of a SimGroup is recorded; in a torchrun job each process records its own rank: `t.save(f"{rank}.pt")`,
    and later `Trace.load("*.pt")`. Items are detached clones on the CPU, so results do not change; every item takes
    memory. Nothing after the block is recorded.

    Raises:
        RuntimeError: inside another trace.

    >>> from cp_ref import ContextParallel, SimGroup, attention
    >>> def fn(member):
    ...     x = torch.ones(1, 4, 1, 8)                                 # this rank's slice: b 1, s 8/2, h 1, d 8
    ...     return attention(x, x, x, cp=ContextParallel(member))
    >>> with trace() as t:
    ...     outs = SimGroup(2).run(fn)
    >>> for item in t.select(rank=0, name="lse"):
    ...     print(item)
    forward step 0 rank 0: tile lse [0:2]h0:1 of tile 0 q[0:2] k[0:2], float32 [2, 1]
    forward step 0 rank 0: tile lse [6:8]h0:1 of tile 0 q[6:8] k[0:2], float32 [2, 1]
    forward step 0 rank 0: tile lse [6:8]h0:1 of tile 0 q[6:8] k[6:8], float32 [2, 1]
    forward step 1 rank 0: tile lse [6:8]h0:1 of tile 0 q[6:8] k[2:4], float32 [2, 1]
    forward step 1 rank 0: tile lse [6:8]h0:1 of tile 0 q[6:8] k[4:6], float32 [2, 1]
    forward step 2 rank 0: merged lse [0:2]h0:1, float32 [2, 1]
    forward step 2 rank 0: merged lse [6:8]h0:1, float32 [2, 1]
    forward step 2 rank 0: final lse [0:2]h0:1, float32 [2, 1]
    forward step 2 rank 0: final lse [6:8]h0:1, float32 [2, 1]
    """
    global _now
    if _now is not None:
        raise RuntimeError("a trace is being recorded already; one trace at a time")
    _now = Trace(call)
    try:
        yield _now
    finally:
        _now = None


class Recorder:
    """The hooks of one rank during one call. This one does nothing."""

    def begin(self, direction: str) -> None:
        """A pass begins."""

    def step(self, number: int) -> None:
        """A step begins; the number of steps means that all are over."""

    def received(self, world: World, message: Message, buffers: Sequence[Parcel]) -> None:
        """A message has arrived: its flat tensors."""

    def tile(self, tile: Sequence[int], **results: torch.Tensor) -> None:
        """A tile, a row of `Tiles`, is computed. Results of query rows [n, h, ...] for the tile's heads, of key rows
        [m, h_kv, ...] for all kv heads.
        """

    def own(self, kind: str, **tensors: torch.Tensor | None) -> None:
        """The rank's own packed rows [t, h, ...] (or values per head, [h]): given, merged or final."""


SILENT = Recorder()


def recording(problem: Problem, schedule: Schedule, rank: int) -> Recorder:
    """The hooks for a call that begins: silent, unless a trace waits for it."""
    if _now is None:
        return SILENT
    number = _now.calls.get(rank, 0)
    _now.calls[rank] = number + 1
    if number != _now.call:
        return SILENT
    if _now.problem is None:
        _now.problem, _now.schedule = problem, schedule
    elif _now.problem != problem:
        raise ValueError(f"call {number} of rank {rank} is {problem}, but another rank's is {_now.problem}")
    return _Recording(_now, problem, schedule, rank)


class _Recording(Recorder):
    """Hooks that record into a trace for as long as its block lasts."""

    def __init__(self, trace: Trace, problem: Problem, schedule: Schedule, rank: int) -> None:
        self._trace, self._problem, self._schedule, self._rank = trace, problem, schedule, rank
        self._direction, self._step = "forward", 0

    def begin(self, direction: str) -> None:
        self._direction, self._step = direction, 0

    def step(self, number: int) -> None:
        self._step = number

    def received(self, world: World, message: Message, buffers: Sequence[Parcel]) -> None:
        text = self._schedule.message_text(message, "recv")
        for name, buffer, x in zip(_NAMES[message.kind], buffers, world.tensors[message.kind], strict=True):
            offset = 0
            for piece in (Piece(*row) for row in message.pieces.rows()):
                shape = (piece.stop - piece.start, piece.head_stop - piece.head_start, *x.shape[2:])
                flat = buffer.tensor[offset : offset + torch.Size(shape).numel()]
                self._add("received", text, name, piece, flat.view(shape))
                offset += flat.numel()

    def tile(self, tile: Sequence[int], **results: torch.Tensor) -> None:
        _, q_start, q_stop, k_start, k_stop, head_start, head_stop = tile
        text, group = self._schedule.tile_text(tile), self._problem.group_size
        first, last = head_start // group, -(-head_stop // group)  # the kv heads
        for name, x in results.items():
            if side_of(name) == "kv":
                self._add("tile", text, name, Piece(k_start, k_stop, first, last), x[:, first:last])
            else:
                self._add("tile", text, name, Piece(q_start, q_stop, head_start, head_stop), x)

    def own(self, kind: str, **tensors: torch.Tensor | None) -> None:
        for name, x in tensors.items():
            if x is None:
                continue
            if name in PER_HEAD:
                self._add(kind, "", name, None, x)
                continue
            own = own_fragments(self._problem.workload, self._rank, side_of(name))
            for _, start, stop, row in own.rows():
                self._add(kind, "", name, Piece(start, stop, 0, x.shape[1]), x[row : row + stop - start])

    def _add(self, kind: str, source: str, name: str, piece: Piece | None, x: torch.Tensor) -> None:
        if self._trace is _now:
            clone = x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            self._trace.add(Item(self._direction, self._step, self._rank, kind, source, name, piece, clone))
