"""One tensor, or a tuple of them (K and V), which a helper moves alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch

from cp_ref.common.thd.checks import check_tensor

__all__ = ["Tensors", "like", "tensors_of"]

Tensors = TypeVar("Tensors", torch.Tensor, tuple[torch.Tensor, ...])


def tensors_of(x: torch.Tensor | tuple[torch.Tensor, ...], kv_axis: bool = False) -> list[torch.Tensor]:
    """The tensors, which have the same tokens on the same device. kv_axis: [2, t, h, d] has them on axis 1."""
    if not isinstance(x, tuple):
        check_tensor("x", x)
        return [x]
    for number, one in enumerate(x):
        check_tensor(f"x[{number}]", one)
    if any(one.ndim == 0 for one in x) or len({_tokens(one, kv_axis) for one in x}) != 1:
        shapes = [list(one.shape) for one in x]
        raise ValueError(f"x has shapes {shapes}; the tensors of a tuple must have the same axis of the same tokens")
    if len({one.device for one in x}) != 1:
        devices = ", ".join(str(one.device) for one in x)
        raise ValueError(f"x has tensors on {devices}; the tensors of a tuple must lie on one device")
    return list(x)


def like(x: Tensors, results: Sequence[torch.Tensor]) -> Tensors:
    """The results as x was given.

    >>> like((torch.tensor(1), torch.tensor(2)), [torch.tensor(3), torch.tensor(4)])
    (tensor(3), tensor(4))
    """
    return cast("Tensors", tuple(results) if isinstance(x, tuple) else results[0])


def _tokens(x: torch.Tensor, kv_axis: bool) -> tuple[int, int]:
    axis = 1 if kv_axis and x.ndim == 4 else 0
    return axis, x.shape[axis]
