"""Recording a trace: `trace()` for the user, and tensors of a rank that record what the executor does with them.

The executor knows nothing of traces: it is given the tensors that it fills.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from cp_ref.groups.group import Parcel
from cp_ref.reference.executor.rank_tensors import RankTensors, by_kv_head
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Message, Schedule, side_of
from cp_ref.tracing.recorded_trace import PER_HEAD, Item, Piece, Trace

__all__ = ["SILENT", "Recorder", "recording", "trace"]

_NAMES = {  # The tensors of a message, as in `cp_ref.reference.executor.rank_tensors`.
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
    """One rank's record of one call. This one records nothing."""

    def held(self, direction: str, device: torch.device) -> RankTensors | None:
        """Tensors for a pass that begins, "forward" or "backward"; None for plain ones."""

    def own(self, kind: str, **tensors: torch.Tensor | None) -> None:
        """The rank's own packed rows [t, h, ...] (or values per head, [h]): given, merged or final."""


SILENT = Recorder()


def recording(problem: Problem, schedule: Schedule, rank: int) -> Recorder:
    """The recorder of a call that begins: silent, unless a trace waits for it."""
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
    """Records into a trace for as long as its block lasts."""

    def __init__(self, trace: Trace, problem: Problem, schedule: Schedule, rank: int) -> None:
        self.problem, self.schedule, self.rank = problem, schedule, rank
        self._trace, self._direction = trace, "forward"

    def held(self, direction: str, device: torch.device) -> RankTensors:
        self._direction = direction
        return _RecordedTensors(self, direction, device)

    def own(self, kind: str, **tensors: torch.Tensor | None) -> None:
        passes = {"forward": self.schedule.forward, "backward": self.schedule.backward}
        step = 0 if kind == "given" else len(passes[self._direction][self.rank])  # the number of steps: all are over
        for name, x in tensors.items():
            if x is None:
                continue
            if name in PER_HEAD:
                self.add(step, kind, "", name, None, x)
                continue
            own = self.problem.workload.ownership.side(side_of(name)).of(self.rank)
            for _, start, stop, row in own.rows():
                self.add(step, kind, "", name, Piece(start, stop, 0, x.shape[1]), x[row : row + stop - start])

    def add(self, step: int, kind: str, source: str, name: str, piece: Piece | None, x: torch.Tensor) -> None:
        """One item of the trace."""
        if self._trace is _now:
            clone = x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            self._trace.add(Item(self._direction, step, self.rank, kind, source, name, piece, clone))


class _RecordedTensors(RankTensors):
    """A rank's tensors, with a record of all values: put in, added by tiles, received, and copied out."""

    def __init__(self, recording: _Recording, direction: str, device: torch.device) -> None:
        super().__init__(recording.problem.workload, recording.rank, device)
        self._recording, self._direction = recording, direction

    def put_own(self, kind: str, *local: torch.Tensor) -> None:
        super().put_own(kind, *local)
        if self._direction == "forward" or kind == "do":  # the backward pass is given q, k and v again
            self._recording.own("given", **dict(zip(_NAMES[kind], local, strict=True)))

    def add_tile(self, tile: Sequence[int], kind: str, *values: torch.Tensor) -> None:
        super().add_tile(tile, kind, *values)
        _, q_start, q_stop, k_start, k_stop, first, stop = tile
        if kind == "dkv":
            kv_heads, q_start, q_stop = self.kv_heads(tile), k_start, k_stop
            first, stop = int(kv_heads[0]), int(kv_heads[-1]) + 1
            values = tuple(by_kv_head(x, kv_heads, self.work.heads_kv)[:, first:stop] for x in values)
        text = self._recording.schedule.tile_text(tile)
        for name, x in zip(_NAMES[kind], values, strict=True):
            self._recording.add(self.step, "tile", text, name, Piece(q_start, q_stop, first, stop), x)

    def unpack(self, message: Message, parcels: Sequence[Parcel]) -> None:
        super().unpack(message, parcels)
        text = self._recording.schedule.message_text(message, "recv")
        for name, parcel, x in zip(_NAMES[message.kind], parcels, self.tensors[message.kind], strict=True):
            offset = 0
            for piece in (Piece(*row) for row in message.pieces.rows()):
                shape = (piece.stop - piece.start, piece.head_stop - piece.head_start, *x.shape[2:])
                flat = parcel.tensor[offset : offset + torch.Size(shape).numel()]
                self._recording.add(self.step, "received", text, name, piece, flat.view(shape))
                offset += flat.numel()

    def copy_out(self, kind: str, *local: torch.Tensor) -> None:
        super().copy_out(kind, *local)
        self._recording.own("merged", **dict(zip(_NAMES[kind], local, strict=True)))
