"""Matrices whose rows begin on a cache line, so that results have the same bits at any address.

A processor's matrix product rounds differently if a matrix begins in the middle of a vector register. The start of a
sequence in a packed tensor depends on the other sequences, and deterministic=True promises that its results do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

__all__ = ["aligned", "aligned_view"]

_LINE = 64  # bytes; PyTorch's allocations begin on one


def aligned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of this shape, whose last dimension is contiguous, and each of its rows on a cache line.

    >>> aligned((2, 3, 5), torch.float32, torch.device("cpu")).stride()
    (48, 16, 1)
    """
    return aligned_view(torch.empty(0, dtype=dtype, device=device), shape)


def aligned_view(buffer: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The same tensor in the memory of a flat buffer, which grows if it is too small."""
    per_line = _LINE // buffer.element_size()
    width = -(-shape[-1] // per_line) * per_line
    buffer.resize_(prod(shape[:-1]) * width)
    return buffer.view(*shape[:-1], width)[..., : shape[-1]]
