"""Backend "fa2": the common part of PyTorch's built-in FlashAttention 2 and the flash-attn package.

`varlen` has the facts about the kernels of both. They have these consequences:

- The deterministic backward's order of sums depends on the launch. So every segment gets a separate launch, and its
  gradients do not depend on its neighbours. A plan updated in place cannot be deterministic: a captured graph would
  keep the first batch's launches.
- A plan updated in place otherwise works unchanged. Its grids have room for every segment to be the longest. Surplus
  blocks return at once, which still takes time with room for many long segments.
- Head dims are equal and multiples of 8; others are padded with zero columns (`dims`).
- There is no gradient through lse; a second backward launch adds it (`lse_gradient`). That holds for all scores:
  the slope of a score multiplies each of its gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import torch

from cp_fast.backends.backend_protocol import (
    FUSED_KERNELS,
    Backend,
    BackwardOperands,
    Gradients,
    LaunchOptions,
    Partial,
    VarlenBatch,
    check_scores,
)
from cp_fast.backends.fa2.fa2_varlen import Varlen, varlen_arguments
from cp_fast.backends.lse_gradient import with_lse_gradient
from cp_fast.backends.padded_head_dims import copied_if_unaligned, round_up, trim, widen
from cp_ref.spec import Feature, Unsupported

__all__ = ["Fa2Backend"]


class Fa2Backend(Backend):
    """FlashAttention 2; float16 and bfloat16 on CUDA, head dims up to 256. A subclass provides the kernels.

    With `in_place`, for plans updated in place, it is not deterministic.
    """

    name: str = "fa2"
    origin: str  # The name of the kernels' package.
    own_features: frozenset[Feature] = frozenset()  # Features of this origin only.

    def __init__(self, *, in_place: bool = False) -> None:
        """The features follow."""
        plan = Feature.IN_PLACE if in_place else Feature.DETERMINISTIC
        self.features: frozenset[Feature] = FUSED_KERNELS | self.own_features | {plan}

    @abstractmethod
    def version(self) -> str:
        """The version of the package that contains the kernels, if installed."""

    @abstractmethod
    def launch_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: Varlen
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [n, h_q, d], lse [h_q, n]) of aligned q [n, h_q, d], k, v [m, h_kv, d]; d a multiple of 8 up to 256."""

    @abstractmethod
    def launch_backward(self, operands: BackwardOperands, varlen: Varlen, *, deterministic: bool) -> Gradients:
        """The gradients of one launch, of aligned operands of one head dim, a contiguous lse and no dlse."""

    @torch.no_grad()
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenBatch, options: LaunchOptions
    ) -> Partial:
        """See `Backend.forward`; out has q's dtype."""
        check_scores(self, options)
        d, d_v = _dim(q, v), v.shape[2]
        q, k, v = (copied_if_unaligned(widen(x, d)) for x in (q, k, v))
        out, lse = self.launch_forward(q, k, v, varlen_arguments(segments, options))
        return Partial(trim(out, d_v), lse, None)

    @torch.no_grad()
    def backward(self, operands: BackwardOperands, segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """See `Backend.backward`; the gradients have q's dtype, float32 where dlse is given."""
        check_scores(self, options)
        d_qk, d_v = operands.q.shape[2], operands.v.shape[2]
        d = _dim(operands.q, operands.v)
        dout, q, k, v, out = (copied_if_unaligned(widen(x, d)) for x in operands[:5])
        given = BackwardOperands(dout, q, k, v, out, operands.lse.contiguous(), None)
        gradients = self._each_segment if options.deterministic else self._all_segments
        launch = partial(gradients, segments=segments, options=options)
        dq, dk, dv = with_lse_gradient(launch, given, operands.dlse, d)
        return Gradients(trim(dq, d_qk), trim(dk, d_qk), trim(dv, d_v))

    def _all_segments(self, operands: BackwardOperands, segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """One launch."""
        return self.launch_backward(operands, varlen_arguments(segments, options), deterministic=False)

    def _each_segment(self, operands: BackwardOperands, segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """One launch per segment, so that its bits do not depend on the others."""
        if segments.updated_in_place:
            raise Unsupported(
                "a plan with max_sequences", {"backend 'fa2'": {Feature.DETERMINISTIC}}, "make a plan for each batch"
            )
        dout, q, k, v, out, lse, *_ = operands
        parts: list[Gradients] = []
        for s in range(len(segments.cu_q) - 1):
            rows, columns = slice(*segments.cu_q[s : s + 2]), slice(*segments.cu_kv[s : s + 2])
            lse_rows = lse[:, rows].contiguous()
            own = BackwardOperands(dout[rows], q[rows], k[columns], v[columns], out[rows], lse_rows, None)
            parts.append(self.launch_backward(own, varlen_arguments(segments.alone(s), options), deterministic=True))
        return Gradients(*(torch.cat(x) for x in zip(*parts, strict=True)))


def _dim(q: torch.Tensor, v: torch.Tensor) -> int:
    """The head dim to run with. Refuses what the features already exclude, rather than compute something else."""
    if max(q.shape[2], v.shape[2]) > 256:
        raise ValueError(f"backend 'fa2' needs head dims up to 256, got d_qk={q.shape[2]} and d_v={v.shape[2]}")
    return round_up(max(q.shape[2], v.shape[2]), 8)
