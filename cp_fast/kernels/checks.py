"""What the operators of the THD helpers refuse, and in which words.

Shapes, dtypes, devices and numbers are checked always, before anything runs, and for fake tensors too. The values of
lengths are checked where they lie on the CPU, which costs nothing. Where they lie on a GPU nobody looks at them, since
that would wait for it: the kernels assert the same rules there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

__all__ = [
    "FLOATS",
    "MOST_ROWS",
    "check_both_lengths",
    "check_count",
    "check_device",
    "check_divisible",
    "check_fits",
    "check_floats",
    "check_lengths",
    "check_lse",
    "check_room",
    "check_tail",
    "check_together",
    "check_written",
    "end_of",
    "half_of",
    "sizes_of",
    "token_axis",
]

MOST = 2**31 - 1
MOST_ROWS = 2**48 - 1  # more than any memory has
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Values = np.ndarray[Any, np.dtype[np.int64]]


def check_floats(name: str, x: torch.Tensor) -> None:
    """Raise unless x is of a dtype that takes part in arithmetic."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be float16, bfloat16, float32 or float64")


def check_count(name: str, value: int, at_least: int, below: int | None = None, at_most: int = MOST) -> None:
    """Raise unless at_least <= value < below (or <= at_most)."""
    if value < at_least or (below is not None and value >= below):
        rule = f"at least {at_least}" if below is None else f"from {at_least} to {below - 1}"
        raise ValueError(f"{name} is {value}; it must be {rule}")
    if value > at_most:
        raise ValueError(f"{name} is {value}; it must be at most {at_most}")


def token_axis(name: str, x: torch.Tensor) -> int:
    """The token axis: 0 of [t, ...], and 1 of [2, t, h, d], K and V (or their gradients) in one tensor.

    >>> token_axis("x", torch.empty(8, 4, 16)), token_axis("x", torch.empty(2, 8, 4, 16))
    (0, 1)
    """
    if x.ndim in (1, 2, 3):
        return 0
    if x.ndim == 4 and x.shape[0] == 2:
        return 1
    raise ValueError(f"{name} has shape {list(x.shape)}; it must be [t], [t, d], [t, h, d] or [2, t, h, d]")


def check_together(xs: Sequence[torch.Tensor], kv_axis: bool = False) -> None:
    """Raise unless the tensors of one launch have the same tokens on the same device. kv_axis: [2, t, h, d] has them on
    axis 1.
    """
    axes = [int(kv_axis and x.ndim == 4) for x in xs]
    if (
        not xs
        or any(x.ndim == 0 for x in xs)
        or any(a != axes[0] or x.shape[a] != xs[0].shape[a] for a, x in zip(axes, xs, strict=True))
    ):
        if len(xs) == 1:
            raise ValueError("x has shape []; it must be [t, ...]")
        shapes = [list(x.shape) for x in xs]
        raise ValueError(f"x has shapes {shapes}; the tensors of a tuple must have the same axis of the same tokens")
    if len({x.device for x in xs}) != 1:
        devices = ", ".join(str(x.device) for x in xs)
        raise ValueError(f"x has tensors on {devices}; the tensors of a tuple must lie on one device")


def check_lengths(name: str, lengths: torch.Tensor, device: torch.device) -> None:
    """Raise unless these are cumulative lengths by dtype and shape, on the device of the data or on the CPU.

    >>> check_lengths("cu_seqlens", torch.tensor([0.0, 8.0]), torch.device("cpu"))
    Traceback (most recent call last):
        ...
    TypeError: cu_seqlens has dtype torch.float32; it must be int32 or int64
    """
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {lengths.dtype}; it must be int32 or int64")
    if lengths.ndim != 1 or lengths.shape[0] < 1:
        raise ValueError(f"{name} has shape {list(lengths.shape)}; it must be [b + 1]")
    if lengths.device != device and lengths.device.type != "cpu":
        raise ValueError(f"{name} is on {lengths.device} and the data on {device}; lengths lie with the data or on cpu")


def check_both_lengths(cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor, device: torch.device) -> None:
    """Raise unless real lengths and lengths with padding are of as many sequences."""
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, device)
    check_lengths("cu_seqlens", cu_seqlens, device)
    if len(cu_seqlens) != len(cu_seqlens_padded):
        raise ValueError(
            f"cu_seqlens has {len(cu_seqlens)} entries and cu_seqlens_padded has {len(cu_seqlens_padded)}; they must "
            "be equal"
        )


def check_lse(
    name: str, lse: torch.Tensor, sequences: int, tokens: int | None, heads: int | None, lse_packed: bool
) -> None:
    """Raise unless `lse` is [h, t] (lse_packed) or [b, h, s]. None: any number of heads, of tokens."""
    if lse.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} has dtype {lse.dtype}; it must be float32 or float64")
    h, shape = "h" if heads is None else heads, list(lse.shape)
    if not lse_packed:
        rule, right = f"[b, h, s] = [{sequences}, {h}, s]", lse.ndim == 3 and shape[0] == sequences
    elif tokens is None:
        rule, right = f"[h, t] = [{h}, t]", lse.ndim == 2
    else:
        rule, right = f"[h, t] = [{h}, {tokens}]", lse.ndim == 2 and shape[1] == tokens
    if not right or (heads is not None and shape[-2] != heads):
        raise ValueError(f"{name} has shape {shape}; with lse_packed={lse_packed} it must be {rule}")


def check_written(name: str, x: torch.Tensor) -> None:
    """Raise where elements of what is changed in place share memory."""
    if x.numel() and any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(
            f"{name} has shape {list(x.shape)} and strides {list(x.stride())}; it is written, so no stride may be 0"
        )


def check_device(**tensors: torch.Tensor) -> None:
    """Raise unless all operands lie on one device."""
    (first, x), *others = tensors.items()
    for name, y in others:
        if y.device != x.device:
            raise ValueError(f"{first} is on {x.device} and {name} on {y.device}; all operands lie on one device")


def half_of(name: str, x: torch.Tensor, axis: int) -> int:
    """Half the number of tokens, which is even."""
    if x.shape[axis] % 2:
        raise ValueError(f"{name} has shape {list(x.shape)}: its {x.shape[axis]} tokens must be an even number")
    return x.shape[axis] // 2


# ---- values of lengths: arrays where they lie on the CPU, None where nobody looks


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


def check_divisible(name: str, sizes: Values | None, divisor: int, why: str) -> None:
    """Raise unless every sequence's length divides."""
    if sizes is not None and (sizes % divisor).any():
        number = int(np.argmax(sizes % divisor != 0))
        raise ValueError(
            f"{name} gives sequence {number} the length {sizes[number]}, padding included, but {why} needs a multiple "
            f"of {divisor}"
        )


def check_fits(real: Values | None, slots: Values | None) -> None:
    """Every sequence has room for its real tokens."""
    if real is not None and slots is not None and (real > slots).any():
        number = int(np.argmax(real > slots))
        raise ValueError(
            f"cu_seqlens_padded gives sequence {number} {slots[number]} slots, but it has {real[number]} tokens by "
            "cu_seqlens; padding must not be negative"
        )


def check_room(name: str, tokens: int, lengths_name: str, end: int | None) -> None:
    """The buffer has a row for every token."""
    if end is not None and tokens < end:
        raise ValueError(f"{name} has {tokens} tokens, fewer than {lengths_name}[-1] = {end}")


def check_tail(name: str, tokens: int, end: int | None, cp_size: int) -> None:
    """What is behind the last sequence divides among the ranks."""
    if end is None:
        if tokens % cp_size:
            _bad_tail(name, tokens, "", tokens, cp_size)
    elif tokens < end or (tokens - end) % cp_size:
        _bad_tail(name, tokens, f" and cu_seqlens_padded ends at {end}", tokens - end, cp_size)


def _bad_tail(name: str, tokens: int, ends: str, tail: int, cp_size: int) -> NoReturn:
    raise ValueError(
        f"{name} is {tokens}{ends}: the tail of {tail} must be a non-negative multiple of cp_size = {cp_size}"
    )
