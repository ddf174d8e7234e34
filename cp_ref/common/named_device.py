"""The device that a caller names, checked."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_usable", "read_device"]


def read_device(device: Any) -> torch.device:
    """The device of a torch.device, its name or its number.

    Raises:
        TypeError, ValueError: it is none of these.

    >>> read_device("cpu")
    device(type='cpu')
    >>> read_device("gpu")
    Traceback (most recent call last):
        ...
    ValueError: device is 'gpu'; it must be a torch.device, or the name of one
    """
    if not isinstance(device, torch.device | str | int) or isinstance(device, bool):
        raise TypeError(f"device is {device!r}; it must be a torch.device, or the name of one")
    try:
        return torch.device(device)
    except (RuntimeError, ValueError):
        raise ValueError(f"device is {device!r}; it must be a torch.device, or the name of one") from None


def check_usable(device: torch.device) -> None:
    """Raise ValueError where PyTorch cannot make a tensor on the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device is {str(device)!r}; PyTorch must be able to use it, and says: {reason}") from None
