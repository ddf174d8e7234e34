"""One tensor, or a tuple of them (K and V), which go through memory in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch

from cp_fast.thd.kinds import check_tensor

__all__ = ["Tensors", "as_list", "like"]

Tensors = TypeVar("Tensors", torch.Tensor, tuple[torch.Tensor, ...])


def as_list(x: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The tensors, of one or of a tuple."""
    if not isinstance(x, tuple):
        check_tensor("x", x)
        return [x]
    for number, one in enumerate(x):
        check_tensor(f"x[{number}]", one)
    if not x:
        raise ValueError("x has shapes []; the tensors of a tuple must have the same axis of the same tokens")
    return list(x)


def like(x: Tensors, results: Sequence[torch.Tensor]) -> Tensors:
    """The results as x was given."""
    return cast("Tensors", tuple(results) if isinstance(x, tuple) else results[0])
