"""What torch.autocast means for attention: inputs are cast as PyTorch casts those of its own; inside nothing is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["autocast", "no_autocast"]


def autocast(x: Any) -> Any:
    """x as an operator in autocast's lower-precision list gets it: all floating-point dtypes but float64 are cast.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     autocast(torch.ones(1)).dtype, autocast(torch.ones(1, dtype=torch.float64)).dtype
    (torch.bfloat16, torch.float64)
    """
    if not isinstance(x, torch.Tensor) or x.device.type not in ("cpu", "cuda"):
        return x
    if not torch.is_autocast_enabled(x.device.type):
        return x
    castable = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if castable else x


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Inside the passes every dtype is as it is meant to be."""
    on = torch.is_autocast_enabled(device.type)  # to turn off what is off takes the host as long as a launch
    return torch.autocast(device.type, enabled=False) if on else nullcontext()
