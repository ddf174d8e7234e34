"""Tensors with guard diagonal bands: views with gaps into larger buffers, so that a write to any other place is
seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes as integers, on the CPU."""
    return x.detach().view(INTEGERS[x.element_size()]).cpu()


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(bits(got), bits(want))


@dataclass
class Boxed:
    """A tensor inside a buffer of ones; `gaps`: spare elements behind each row of an axis, `offset` in front of all."""

    buffer: torch.Tensor
    view: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, device: str, gaps: tuple[int, ...] = (), offset: int = 0) -> Boxed:
        gaps = (*gaps, 0, 0, 0, 0)[: max(x.ndim - 1, 0)]
        strides = [1]
        for size, gap in zip(reversed(x.shape[1:]), reversed(gaps), strict=True):
            strides.insert(0, strides[0] * size + gap)
        spread = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) if x.numel() else 0
        whole = torch.ones(offset + spread + 17, dtype=INTEGERS[x.element_size()], device=device).view(x.dtype)
        view = whole.as_strided(x.shape, strides, offset)
        view.copy_(x)
        return Boxed(whole, view)

    def assert_holds(self, want: torch.Tensor, near: dict[str, Any] | None = None) -> None:
        """The view holds `want`, bit by bit or with tolerances, and nothing around it has changed."""
        if near is None:
            assert_same_bits(self.view, want)
        else:
            torch.testing.assert_close(self.view.cpu(), want, equal_nan=True, **near)
        outside = self.buffer.clone().view(INTEGERS[self.buffer.element_size()])
        outside.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(1)
        assert bool(outside.eq(1).all()), "written outside of the tensor"
