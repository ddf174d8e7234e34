"""The arguments of FlashAttention 2's varlen kernels, wherever these come from.

Facts about these kernels that hold for PyTorch's own copy of them (2.11 and later) and for the flash-attn package
(2.8):

- A negative window side means unbounded, so a side of -1 cannot be expressed: tiles must be cropped until no side
  is negative. Causal is the window (unbounded, 0); the causal flag adds nothing and stays False.
- A side >= max_k counts as unbounded, and an unbounded right side with a bounded left one is replaced by max_k. Both
  are wrong if a segment has more rows than columns. `varlen_arguments` gives a max_k that keeps either from mattering:
  max_k only sizes the backward's grid.
- With max_q = 1 and GQA the forward takes a path that lays its results out differently; max_q = 2 avoids it.
- Lengths are read on the device; max_q and max_k are upper bounds, and blocks past a segment's end return at once. So a
  segment may have no rows and no columns. Rows and columns of no segment are not written.
- The lse is [h_q, n] float32, natural logarithm, and +inf for a row that sees nothing (`VarlenBatch` has no such row).
- The deterministic backward makes dq repeatable, but the order of its sums depends on how many segments and heads are
  in the launch, and it takes about SMs / (segments * heads) + 1 float32 copies of dq.
- Segments are a grid's second dimension: 65,535 at most.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from cp_fast.backends.backend_protocol import LaunchOptions, VarlenBatch
from cp_ref.spec import ScoreOptions

__all__ = ["Varlen", "checked_lse", "gpu_why_not", "varlen_arguments"]

_MOST_SEGMENTS = 65535


class Varlen(NamedTuple):
    """Segments as the kernels take it, and the options of scores."""

    cu_q: torch.Tensor  # int32 [segments + 1], on the device
    cu_k: torch.Tensor  # int32 [segments + 1]
    max_q: int  # at least 2
    max_k: int  # Larger than any side that hides a column.
    left: int  # -1 for unbounded
    right: int
    scores: ScoreOptions


def varlen_arguments(segments: VarlenBatch, options: LaunchOptions) -> Varlen:
    """Segments as the kernels take them.

    If the segments have bounds (`Plan.update`), the arguments depend on the bounds only, not on the current lengths.

    >>> varlen = varlen_arguments(VarlenBatch.pack([30], [10], None, 22), LaunchOptions(ScoreOptions(0.5)))
    >>> varlen.left, varlen.right, varlen.max_q, varlen.max_k
    (-1, 22, 30, 31)
    """
    left, right = segments.left, segments.right
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(f"backend 'fa2' takes window sides of None or >= 0, got ({left}, {right}): crop the tile")
    if len(segments.cu_q) - 1 > _MOST_SEGMENTS:
        raise ValueError(f"backend 'fa2' takes up to {_MOST_SEGMENTS} segments a launch, got {len(segments.cu_q) - 1}")
    longest = max(segments.max_q, segments.max_kv)  # a side this long hides nothing in any segment
    max_k = longest + 1
    if left is None and right in (None, 0):
        left, right, max_k = -1, -1 if right is None else 0, segments.max_kv
    else:
        left, right = (-1 if side is None else min(side, longest) for side in (left, right))
    cu_q, cu_k = segments.device_cu_q, segments.device_cu_kv
    return Varlen(cu_q, cu_k, max(2, segments.max_q), max_k, left, right, options.scores)


def checked_lse(lse: torch.Tensor, q: torch.Tensor, whose: str) -> torch.Tensor:
    """The lse; a RuntimeError if its layout is not [h_q, n]."""
    wanted = (q.shape[1], q.shape[0])
    if lse.shape != wanted or lse.dtype != torch.float32:
        raise RuntimeError(
            f"{whose} returned an lse {lse.dtype} {list(lse.shape)}, not float32 {list(wanted)}: backend 'fa2' does "
            "not know this layout"
        )
    return lse


@cache
def gpu_why_not() -> str | None:
    """The reason why no kernels of FlashAttention 2 run on this GPU, found once."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if torch.version.hip is not None:
        return "this is a ROCm build of PyTorch"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"it needs compute capability 8.0 or later, and this GPU has {major}.{minor}"
