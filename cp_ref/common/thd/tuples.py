"""One tensor, or a tuple of them (K and V), which a helper moves alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch

from cp_ref.common.thd.checks import check_tensor

__all__ = ["Tensors", "as_list", "like", "tensors_of"]

Tensors = TypeVar("Tensors", torch.Tensor, tuple[torch.Tensor, ...])


def as_list(x: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The tensors, of one or of a tuple."""
    if not isinstance(x, tuple):
        check_tensor("x", x)
        return [x]
    for number, one in enumerate(x):
        check_tensor(f"x[{number}]", one)
    return list(x)


def tensors_of(x: torch.Tensor | tuple[torch.Tensor, ...], kv_axis: bool = False) -> list[torch.Tensor]:
    """The same, which have the same tokens on the same device. kv_axis: [2, t, h, d] has them on axis 1."""
    xs = as_list(x)
    if isinstance(x, tuple):
        if not xs or any(one.ndim == 0 or _tokens(one, kv_axis) != _tokens(xs[0], kv_axis) for one in xs):
            shapes = [list(one.shape) for one in xs]
            raise ValueError(
                f"x has shapes {shapes}; the tensors of a tuple must have the same axis of the same tokens"
            )
        if len({one.device for one in xs}) != 1:
            devices = ", ".join(str(one.device) for one in xs)
            raise ValueError(f"x has tensors on {devices}; the tensors of a tuple must lie on one device")
    return xs


def like(x: Tensors, results: Sequence[torch.Tensor]) -> Tensors:
    """The results as x was given.

    >>> like((torch.tensor(1), torch.tensor(2)), [torch.tensor(3), torch.tensor(4)])
    (tensor(3), tensor(4))
    """
    return cast("Tensors", tuple(results) if isinstance(x, tuple) else results[0])


def _tokens(x: torch.Tensor, kv_axis: bool) -> tuple[int, int]:
    axis = 1 if kv_axis and x.ndim == 4 else 0
    return axis, x.shape[axis]
