"""Backend "cudnn": cuDNN's fused attention, through nvidia-cudnn-frontend's graphs.

Facts about cuDNN 9.19 with front end 1.32 on Hopper that this file rests on:

- A packed batch is "ragged": a tensor is declared as [segments, heads, longest, d] and finds a segment by its offset in
  elements. Offsets are int64, so that rows * heads * d may pass 2**31.
- A graph is a shape class, and building one takes far longer than running it. So the number of segments, the longest
  segment and the rows of a launch are rounded up before they enter it: surplus segments have no rows, and lengths are
  read on the device.
- The left bound counts the diagonal: bound = left + 1, j > i - bound. The right bound is j <= i + right. With bottom-
  right alignment and a padding mask both count from each segment's own corner. None means unbounded. No bound may be
  negative: tiles must be cropped.
- With bottom-right alignment the backward computes every block of the rectangle, hidden or not (a causal square takes
  twice the time). So a diagonal band is expressed from the top-left corner if that is equivalent in all segments. The
  host's lengths decide this.
- The lse ("stats") is natural and float32, written and read here as [n, h_q]; as [h_q, n] its strides, and so the
  graph, would contain the number of rows.
- The backward forms delta from dout and out itself, and has no gradient through lse: a second launch adds it
  (`lse_gradient`). Its accumulators are sized by the rows of the launch only for head dims that are multiples of 16.
- In GQA the backward rounds each query head's share of dk and dv before they are summed, in a buffer of h_q heads.
- Its deterministic mode on Hopper keeps all of dP, quadratic in the lengths: it is not used, and not declared.
- It has no softcap together with a mask, so that is not declared.
- The front end also ranks its own kernels, which are not cuDNN's, so they are excluded by name.
- A handle belongs to one thread and one device, and carries the stream.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from cp_fast.backends.backend_protocol import (
    FUSED_KERNELS,
    Backend,
    BackwardOperands,
    Gradients,
    LaunchOptions,
    NotInstalled,
    Partial,
    VarlenBatch,
    check_scores,
)
from cp_fast.backends.cudnn.cudnn_graphs import Id, backward_graph, forward_graph, library, run
from cp_fast.backends.cudnn.cudnn_shapes import shape_class_of
from cp_fast.backends.lse_gradient import with_lse_gradient
from cp_fast.backends.padded_head_dims import copied_if_unaligned, round_up, trim, widen
from cp_ref.spec import Feature

__all__ = ["CudnnBackend"]

_STEP = 16  # of head dims


class CudnnBackend(Backend):
    """cuDNN on Hopper; float16 and bfloat16, head dims up to 256, not deterministic."""

    name: str = "cudnn"
    features: frozenset[Feature] = FUSED_KERNELS

    def why_not(self) -> str | None:
        """None where the library is installed and the GPU is a Hopper, else the reason."""
        return _why_not()

    @torch.no_grad()
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenBatch, options: LaunchOptions
    ) -> Partial:
        """See `Backend.forward`; out has q's dtype."""
        check_scores(self, options)
        d_v = v.shape[2]
        q, k, v = (_operand(x) for x in (q, k, v))
        out = q.new_empty(*q.shape[:2], v.shape[2])
        stats = q.new_empty(q.shape[:2], dtype=torch.float32)
        with torch.cuda.device(q.device):
            shape = shape_class_of(q, k, v, segments, options.scores.scale)._replace(
                rows_q=0, rows_kv=0
            )  # of no concern here
            tensors = {Id.Q: q, Id.K: k, Id.V: v, Id.OUT: out, Id.STATS: stats}
            run(forward_graph, shape, tensors, segments)
        return Partial(trim(out, d_v), stats.T.contiguous(), None)

    @torch.no_grad()
    def backward(self, operands: BackwardOperands, segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """See `Backend.backward`; the gradients have q's dtype, float32 where dlse is given."""
        check_scores(self, options)
        if options.deterministic:
            raise ValueError("backend 'cudnn' has no deterministic backward: choose by Feature.DETERMINISTIC")
        d_qk, d_v = operands.q.shape[2], operands.v.shape[2]
        dout, q, k, v, out = map(_operand, operands[:5])
        given = BackwardOperands(dout, q, k, v, out, operands.lse, None)
        stats = operands.lse.T.contiguous()
        with torch.cuda.device(q.device):
            launch = partial(_gradients, stats=stats, segments=segments, scale=options.scores.scale)
            dq, dk, dv = with_lse_gradient(launch, given, operands.dlse, _STEP)
        return Gradients(trim(dq, d_qk), trim(dk, d_qk), trim(dv, d_v))


def _gradients(operands: BackwardOperands, stats: torch.Tensor, segments: VarlenBatch, scale: float) -> Gradients:
    """One backward launch on operands already in the library's form; stats [n, h_q] is their lse."""
    dout, q, k, v, out, *_ = operands
    made = Gradients(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    tensors = {Id.Q: q, Id.K: k, Id.V: v, Id.OUT: out, Id.STATS: stats, Id.DOUT: dout}
    tensors |= {Id.DQ: made.dq, Id.DK: made.dk, Id.DV: made.dv}
    run(backward_graph, shape_class_of(q, k, v, segments, scale), tensors, segments)
    return made


@cache
def _why_not() -> str | None:
    """The reason why the library does not run here, found once."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"it is checked on Hopper (compute capability 9.0) only, and this GPU has {major}.{minor}"
    try:
        version = library().backend_version()
    except Exception as error:  # a broken installation fails in many ways, and all of them mean "not here"
        return NotInstalled(
            f"importing cudnn (pip install nvidia-cudnn-frontend) failed: {type(error).__name__}: {error}"
        )
    if version < 91900:
        return f"it is checked with cuDNN 9.19 and later, and this is {version // 10000}.{version // 100 % 100}"
    return None


def _operand(x: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, d] contiguous and aligned, with zero columns up to a multiple of 16."""
    return copied_if_unaligned(widen(x, round_up(x.shape[2], _STEP)).contiguous())
