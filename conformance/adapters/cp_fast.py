"""`cp_fast` on all levels: `auto`, and one object for each of its backends, `fa4`, `fa2`, `cudnn`, `cpu`, `torch`.

    python -m conformance --impl cp_fast                              # conformance.adapters.cp_fast:auto
    python -m conformance --impl conformance.adapters.cp_fast:cpu
    python -m conformance --impl conformance.adapters.cp_fast:processes --cp-size 2,4       # over gloo, or NCCL

`merge` calls the kernels in use: those of CP_FAST_KERNELS, or the first available. `tile` calls one segment of the
backend, cut to the rows and columns that see anything, as in the program.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch as pytorch

import cp_fast as package
from conformance.adapters.cp_fast_operators import operator_calls
from conformance.adapters.shared.band_tiles import crop, empty_tile, out_of_nothing
from cp_fast.backends import Backend, BackwardOperands, LaunchOptions, VarlenBatch, choose
from cp_fast.movers import kernels
from cp_ref.schedules.planners.ring_members import RingMembers
from cp_ref.schedules.problem import Problem, ScoreOptions
from cp_ref.schedules.words import Feature

__all__ = ["OneBackend", "auto", "cpu", "cudnn", "fa2", "fa4", "processes", "torch"]

Tensor = pytorch.Tensor
for _device in ("cpu", "cuda") if pytorch.cuda.is_available() else ("cpu",):
    kernels(_device)  # built now: a compiler's half a minute is not the first problem's, whose clock runs


class OneBackend:
    """`cp_fast` with one backend by name: features that the backend lacks are unsupported, without a fallback. The name
    "auto" means the package's default: the first backend with all features of a problem.
    """

    ops = staticmethod(lambda device: list(operator_calls(device).values()))
    supports_compile = True
    Unsupported = package.Unsupported
    thd = package.thd
    attention = staticmethod(package.attention)
    linear_attention = staticmethod(package.linear_attention)
    causal_conv1d = staticmethod(package.causal_conv1d)
    make_plan = staticmethod(package.make_plan)
    supports = staticmethod(package.supports)
    shard = staticmethod(package.shard)
    unshard = staticmethod(package.unshard)
    position_ids = staticmethod(package.position_ids)

    def __init__(self, name: str) -> None:
        self.name = name
        self.ContextParallel = partial(package.ContextParallel, backend=name)

    def __repr__(self) -> str:
        return f"cp_fast with backend {self.name!r}"

    @staticmethod
    def batch_invariant(one: Problem, other: Problem) -> bool:
        """Whether a ring of three or more adds its gradients in the same order for both: all on the way, or none."""
        members, others = (RingMembers(problem.workload) for problem in (one, other))
        ring = one.cp_comm_type in ("p2p", "a2a+p2p") and members.count > 2
        return not ring or members.sends_directly == others.sends_directly

    @staticmethod
    def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """By `cp_fast.movers`' `merge_`, one part after the other."""
        first_out, first_lse = parts[0]
        out, lse = first_out.to(first_lse.dtype, copy=True), first_lse.clone()
        for part_out, part_lse in parts[1:]:
            kernels(out.device.type).merge_(out, lse, part_out, part_lse, slice(0, len(out)))
        return out, lse

    def tile(
        self, q: Tensor, k: Tensor, v: Tensor, *, left: int | None, right: int | None, **scores: Any
    ) -> tuple[Tensor, Tensor]:
        """By the backend's `forward`, of one segment."""
        options = LaunchOptions(ScoreOptions(**scores))
        backend = self._backend(q, k, v, options.scores)
        out, lse = out_of_nothing(q, v)
        cut = None if empty_tile(q, k) else crop(len(q), len(k), left, right)
        if cut is not None:
            segments = _segment(cut.rows, cut.columns, cut.left, cut.right, q.device)
            operands = (q[cut.rows], k[cut.columns], v[cut.columns])
            part = backend.forward(*operands, segments, options)
            out[cut.rows], lse[:, cut.rows] = part.out.to(out.dtype), part.lse
        return out, lse

    def tile_backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *, left: int | None,
        right: int | None, **scores: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """By the backend's `backward`."""
        options = LaunchOptions(ScoreOptions(**scores))
        backend = self._backend(q, k, v, options.scores)
        dq, dk, dv = (pytorch.zeros_like(x) for x in (q, k, v))
        cut = None if empty_tile(q, k) else crop(len(q), len(k), left, right)
        if cut is not None:
            rows, columns = cut.rows, cut.columns
            segments = _segment(rows, columns, cut.left, cut.right, q.device)
            operands = BackwardOperands(
                dout[rows], q[rows], k[columns], v[columns], out[rows], lse[:, rows].contiguous(), None
            )
            grads = backend.backward(operands, segments, options)
            dq[rows], dk[columns], dv[columns] = (x.to(q.dtype) for x in grads)
        return dq, dk, dv

    def _backend(self, q: Tensor, k: Tensor, v: Tensor, scores: ScoreOptions) -> Backend:
        """The backend, if it has what the tile needs."""
        wanted = {
            Feature(f"device {q.device.type}"): True,
            Feature(str(q.dtype).removeprefix("torch.")): True,
            Feature.GQA: q.shape[1] != k.shape[1],
            Feature.ASYMMETRIC_DIMS: q.shape[2] != v.shape[2],
            Feature.GQA_ASYMMETRIC_DIMS: q.shape[1] != k.shape[1] and q.shape[2] != v.shape[2],
            Feature.HEAD_DIM_OVER_128: max(q.shape[2], v.shape[2]) > 128,
            Feature.HEAD_DIM_ODD: bool(q.shape[2] % 8 or v.shape[2] % 8),
        }
        return choose(scores.features | {feature for feature, needed in wanted.items() if needed}, self.name)


def _segment(rows: slice, columns: slice, left: int | None, right: int | None, device: pytorch.device) -> VarlenBatch:
    lengths = ([rows.stop - rows.start], [columns.stop - columns.start])
    return VarlenBatch.pack(*lengths, left, right, device)


class Processes(OneBackend):
    """`cp_fast` as it comes, with a process for every rank."""

    group_kind = "process"


processes = Processes("auto")
auto, fa4, fa2, cudnn, cpu, torch = (OneBackend(name) for name in ("auto", "fa4", "fa2", "cudnn", "cpu", "torch"))
