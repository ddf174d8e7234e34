"""The registered operators, `torch.ops.cp_attention.*`: what `cp_fast.thd` calls, and `torch.compile` sees.

An operator checks all of its arguments, whoever calls it: first what can be said of a fake tensor too, then the values
of lengths that lie on the CPU. It brings these to the data, and hands over to the implementation in use (see `select`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cp_ref.thd_helpers.thd_checks import check_chunk_lengths, check_divisible, check_tail

__all__ = [
    "LIBRARY",
    "check_chunks",
    "check_halves",
    "end_of",
    "lengths_on",
    "nothing",
    "operator",
    "plain",
    "plain_out",
    "rows",
    "rows_out",
    "sizes_of",
    "touched",
]

# ---- the values of lengths
#
# The values of lengths, as far as anybody may look at them; all other checks of the operators of the THD helpers are
# those of `cp_ref.thd_helpers`.
#
# Where lengths lie on the CPU, looking at them costs nothing: arrays. Where they lie on a GPU nobody looks at them,
# since that would wait for it: None. The kernels assert the same rules there.


Values = np.ndarray[Any, np.dtype[np.int64]]


def sizes_of(name: str, lengths: torch.Tensor, from_zero: bool = True) -> Values | None:
    """Every sequence's length; raises where cumulative lengths do not begin at 0 or decrease."""
    if lengths.device.type != "cpu":
        return None
    values = lengths.numpy().astype(np.int64)
    if from_zero and values[0] != 0:
        raise ValueError(f"{name}[0] is {values[0]}; it must be 0")
    decreases = values[1:] < values[:-1]  # a difference of any two may not fit into 64 bits: first compared
    if values[0] < 0 or decreases.any():
        if not from_zero:
            raise ValueError(f"{name} is {values.tolist()}; it must be at least 0 and must not decrease")
        n = int(np.argmax(decreases))
        raise ValueError(
            f"{name}[{n + 1}] is {values[n + 1]}, less than {name}[{n}] = {values[n]}; cumulative lengths must not "
            "decrease"
        )
    return np.diff(values)


def end_of(lengths: torch.Tensor) -> int | None:
    """Where the tail begins."""
    return int(lengths[-1]) if lengths.device.type == "cpu" else None


# ---- layouts
#
# Bringing operands into the shape that kernels take: data with at most one axis between tokens and the last, which
# has stride 1; lengths on the data's device.


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


def rows_out(x: torch.Tensor) -> torch.Tensor:
    """`rows` of `out`, which is written.

    Raises:
        ValueError: its strides allow no view.
    """
    if x.ndim > 3:
        try:
            x = x.view(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
        except RuntimeError:
            raise ValueError(
                f"out has shape {list(x.shape)} and strides {list(x.stride())}; to be changed in place all axes "
                "between tokens and the last must be dense"
            ) from None
    return plain_out("out", x)


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


# ---- registration


Tensor = torch.Tensor
LIBRARY = torch.library.Library("cp_attention", "FRAGMENT")


def operator(
    schema: str, check: Callable[..., object], fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the operator `schema`, for every device. `check` comes first, for fake tensors too."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            check(*arguments)
            return function(*arguments)

        def run_fake(*arguments: Any) -> Any:
            check(*arguments)
            return fake(*arguments)

        name = schema.split("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cp_attention::{name}", run_fake, lib=LIBRARY)
        return function

    return register


def nothing(*args: Any) -> None:
    """The fake of an operator that returns nothing."""


def check_chunks(cu_seqlens_padded: Tensor, name: str, tokens: int, cp_size: int) -> None:
    """The values of GLOBAL lengths, for layout dual_chunk."""
    sizes = sizes_of("cu_seqlens_padded", cu_seqlens_padded)
    check_tail(name, tokens, end_of(cu_seqlens_padded), cp_size)
    check_chunk_lengths(sizes, cp_size)


def check_halves(cu_seqlens_padded: Tensor) -> None:
    """The values of LOCAL lengths, each of which has two halves."""
    check_divisible(sizes_of("cu_seqlens_padded", cu_seqlens_padded), 2, "a half")
