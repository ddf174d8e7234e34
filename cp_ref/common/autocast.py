"""torch.autocast and attention: inputs are cast as for PyTorch's attention; nothing is cast inside."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["autocast", "no_autocast"]


def autocast(x: Any) -> Any:
    """Cast x as for an operator in autocast's lower-precision list: all floating-point dtypes except float64.

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
    """Turn autocast off, so that the passes keep their dtypes."""
    on = torch.is_autocast_enabled(device.type)  # turning it off when it is off costs the host as much as a launch
    return torch.autocast(device.type, enabled=False) if on else nullcontext()
