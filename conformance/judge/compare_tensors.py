"""Tensors against exact ones, and against their own copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["same_bytes", "worst"]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes, dtypes and bits; NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(one, other)


def worst(
    name: str,
    got: torch.Tensor,
    exact: torch.Tensor,
    bound: torch.Tensor | float,
    place: Callable[[Sequence[int]], str] = str,
) -> list[str]:
    """A finding about the value that exceeds its bound by most. NaN is no value; infinities have to be equal.

    >>> worst("out", torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]).double(), 0.1)
    ['out is 2.5 at [1], but should be 2 (error 0.5, allowed 0.1; 1 of 2 values are wrong)']
    """
    got = got.detach().double()
    error = torch.where(got == exact, 0.0, (got - exact).abs()).nan_to_num(nan=torch.inf)
    over = error - bound
    if not over.numel() or over.max() <= 0:
        return []
    at = tuple(int(n) for n in torch.unravel_index(over.argmax(), over.shape))
    allowed = bound[at].item() if isinstance(bound, torch.Tensor) else bound
    return [
        f"{name} is {got[at].item():.12g} at {place(list(at))}, but should be {exact[at].item():.12g} "
        f"(error {error[at].item():.2g}, allowed {allowed:.2g}; {int((over > 0).sum())} of {over.numel()} values are "
        "wrong)"
    ]
