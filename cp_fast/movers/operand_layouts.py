"""Bringing operands into the shape that kernels take: data with at most one axis between tokens and the last, which
has stride 1; lengths on the data's device.
"""

from __future__ import annotations

import math

import torch

__all__ = ["lengths_on", "plain", "plain_out", "rows", "rows_out", "touched"]


def plain(x: torch.Tensor) -> torch.Tensor:
    """An operand that is read: itself, or a copy where its last axis is not dense.

    >>> plain(torch.zeros(4, 6).t()).stride()
    (4, 1)
    """
    return x if _last_axis_is_dense(x) else x.contiguous()


def rows(x: torch.Tensor) -> torch.Tensor:
    """[t, ...] with more axes than three as [t, h, d]: a view where its strides allow one, else a copy.

    >>> rows(torch.zeros(6, 2, 3, 4)).shape
    torch.Size([6, 6, 4])
    """
    return plain(x.flatten(1, -2) if x.ndim > 3 else x)


def plain_out(name: str, x: torch.Tensor) -> torch.Tensor:
    """An operand that is written.

    Raises:
        ValueError: its last axis is not dense.
    """
    if not _last_axis_is_dense(x):
        raise ValueError(
            f"{name} has shape {list(x.shape)} and strides {list(x.stride())}; to be changed in place its last axis "
            "must have stride 1"
        )
    return x


def rows_out(name: str, x: torch.Tensor) -> torch.Tensor:
    """`rows` of an operand that is written.

    Raises:
        ValueError: its strides allow no view.
    """
    if x.ndim > 3:
        try:
            x = x.view(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
        except RuntimeError:
            raise ValueError(
                f"{name} has shape {list(x.shape)} and strides {list(x.stride())}; to be changed in place all axes "
                "between tokens and the last must be dense"
            ) from None
    return plain_out(name, x)


def _last_axis_is_dense(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] <= 1 or not x.numel()


def lengths_on(name: str, lengths: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Lengths on the device of the data. From the CPU to a GPU they go through pinned memory, so that nobody waits.

    Raises:
        ValueError: while a CUDA graph is captured, which would read that memory again in every replay.
    """
    if lengths.device == device:
        return lengths.contiguous()
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{name} is on {lengths.device}; in the capture of a CUDA graph it must be on {device}")
        lengths = lengths.pin_memory()
    return lengths.to(device, non_blocking=True)


def touched(x: torch.Tensor) -> None:
    """Tell autograd that x has changed, for kernels that PyTorch does not see."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)
