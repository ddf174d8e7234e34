"""What no operator ever sees: arguments that are no tensors, integers or flags at all, and what autograd would lack.

All else is refused by the operators (`cp_fast.kernels.checks`).
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_flag", "check_integer", "check_lengths", "check_no_grad", "check_tensor"]

MOST = 2**63 - 1


def check_tensor(name: str, x: Any) -> None:
    """Raise unless x is a strided tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name} is a nested or sparse tensor; it must be a strided one")


def check_lengths(name: str, lengths: Any) -> None:
    """Raise unless these lengths are a strided tensor.

    >>> check_lengths("cu_seqlens", [0, 8])
    Traceback (most recent call last):
        ...
    TypeError: cu_seqlens is a list; it must be an int32 or int64 tensor [b + 1]
    """
    if lengths is None:
        raise ValueError(f"{name} is None; it must be an int32 or int64 tensor [b + 1]")
    if not isinstance(lengths, torch.Tensor):
        raise TypeError(f"{name} is a {type(lengths).__name__}; it must be an int32 or int64 tensor [b + 1]")
    check_tensor(name, lengths)


def check_integer(name: str, value: Any) -> None:
    """Raise unless `value` is an integer that an operator can be given."""
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    if isinstance(value, int) and not -MOST <= value <= MOST:
        raise ValueError(f"{name} is {value}; it must fit into 64 bits")


def check_flag(name: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be True or False")


def check_no_grad(**tensors: torch.Tensor) -> None:
    """Raise where autograd would have to know the gradient of a helper that has none."""
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x.requires_grad:
                raise ValueError(
                    f"{name} requires grad, and this helper is not differentiable; call it inside an "
                    "autograd.Function or under torch.no_grad()"
                )
