"""Shape classes of cuDNN's graphs: the numbers built into a graph, rounded up so that few graphs are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from cp_fast.backends.backend_protocol import VarlenBatch
from cp_fast.backends.host_lengths import Cumulative
from cp_fast.backends.padded_head_dims import round_up

__all__ = ["CornerBand", "ShapeClass", "shape_class_of"]


class CornerBand(NamedTuple):
    """Which columns a row sees, from one corner of every segment: i - left <= j <= i + right."""

    top_left: bool
    left: int | None
    right: int | None


class ShapeClass(NamedTuple):
    """A shape class: every number that is built into a graph."""

    dtype: torch.dtype
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    segments: int
    max_q: int
    max_kv: int
    rows_q: int
    rows_kv: int
    band: CornerBand
    scale: float


def _class_of(n: int, least: int) -> int:
    """n rounded up by at most a quarter, so that few different numbers come out.

    >>> [_class_of(n, 128) for n in (1, 129, 1000, 1025, 65536, 65537)]
    [128, 256, 1024, 1280, 65536, 81920]
    """
    return round_up(n, max(least, 1 << max(n.bit_length() - 3, 0)))


def shape_class_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenBatch, scale: float
) -> ShapeClass:
    """The shape class of a launch."""
    if max(q.shape[2], v.shape[2]) > 256:
        raise ValueError(f"backend 'cudnn' needs head dims up to 256, got d_qk={q.shape[2]} and d_v={v.shape[2]}")
    return ShapeClass(
        q.dtype,
        q.shape[1],
        k.shape[1],
        q.shape[2],
        v.shape[2],
        _class_of(len(segments.cu_q) - 1, 1),
        _class_of(segments.max_q, 128),
        _class_of(segments.max_kv, 128),
        _class_of(q.shape[0], 128),
        _class_of(k.shape[0], 128),
        _band(segments),
        scale,
    )


def _band(segments: VarlenBatch) -> CornerBand:
    """The segments' diagonal band from the top-left corner, if that is one diagonal band with no negative side, else
    unchanged.

    >>> _band(VarlenBatch.pack([4, 6], [9, 11], 7, 0)), _band(VarlenBatch.pack([4, 6], [4, 9], None, 0))
    (CornerBand(top_left=True, left=2, right=5), CornerBand(top_left=False, left=None, right=0))
    """
    left, right = segments.left, segments.right
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(f"backend 'cudnn' takes window sides of None or >= 0, got ({left}, {right}): crop the tile")
    if left is None and right is None:
        return CornerBand(True, None, None)
    shifts = np.diff(_array(segments.cu_kv)) - np.diff(_array(segments.cu_q))
    shift = int(shifts[0])
    if (shifts != shift).any():
        return CornerBand(False, left, right)
    from_top = CornerBand(True, None if left is None else left - shift, None if right is None else right + shift)
    fits = all(side is None or side >= 0 for side in from_top[1:])
    return from_top if fits else CornerBand(False, left, right)


def _array(cu: Sequence[int]) -> np.ndarray:
    """Cumulative lengths as the array that some are."""
    return cu.values if isinstance(cu, Cumulative) else np.array(cu)
