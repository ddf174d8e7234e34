"""The checks of the THD helpers, with their errors.

Shapes and dtypes are always checked, before anything runs; the values of lengths are checked where they can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch

from cp_ref.schedules.values import check_flag, refuse_dtensor, shown

__all__ = [
    "FLOATS",
    "MOST_ROWS",
    "Tensors",
    "as_list",
    "check_both",
    "check_chunk_lengths",
    "check_columns",
    "check_count",
    "check_counted",
    "check_device",
    "check_divisible",
    "check_fits",
    "check_given",
    "check_leaf",
    "check_lengths",
    "check_lse",
    "check_room",
    "check_tail",
    "check_tensor",
    "check_written",
    "chunks_of",
    "device_of",
    "half_of",
    "like",
    "pad_v",
    "tensors_of",
    "token_axis",
    "trim_out",
]

MOST = 2**31 - 1
MOST_ROWS = 2**48 - 1  # More than any memory has.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def device_of(x: Any) -> torch.device:
    """The device of a tensor; the CPU for anything else, which a later check refuses."""
    return getattr(x, "device", torch.device("cpu"))


def check_tensor(name: str, x: Any, *, floats_only: bool = False) -> None:
    """Raise unless x is a tensor; of an ordinary floating-point dtype, where it takes part in arithmetic."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name} is a nested or sparse tensor; it must be a strided one")
    refuse_dtensor(name, x)
    if floats_only and x.dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be float16, bfloat16, float32 or float64")


def check_count(name: str, value: Any, at_least: int, below: int | None = None, at_most: int = MOST) -> None:
    """Raise unless `value` is an integer, at_least <= value < below (or <= at_most)."""
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    if value < at_least or (below is not None and value >= below):
        rule = f"at least {at_least}" if below is None else f"from {at_least} to {below - 1}"
        raise ValueError(f"{name} is {shown(value)}; it must be {rule}")
    if value > at_most:
        raise ValueError(f"{name} is {shown(value)}; it must be at most {at_most}")


def check_columns(name: str, lse: torch.Tensor, needed: int, lse_packed: bool) -> None:
    """Raise where an LSE has fewer columns than the tokens need: all of them, or (padded) the longest sequence."""
    if lse.shape[-1] < needed:
        axes = "[h, t], t" if lse_packed else "[b, h, s], s"
        raise ValueError(
            f"{name} has shape {list(lse.shape)}; with lse_packed={lse_packed} it must be {axes} at least {needed}"
        )


def check_written(name: str, x: torch.Tensor) -> None:
    """Raise where elements of a tensor to change in place share memory."""
    if x.numel() and any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(
            f"{name} has shape {list(x.shape)} and strides {list(x.stride())}; it is written, so no stride may be 0"
        )


def check_leaf(name: str, x: torch.Tensor) -> None:
    """Raise where autograd does not let x be changed in place."""
    if torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
        raise ValueError(f"{name} requires grad and is a leaf; it is changed in place, so do it under torch.no_grad()")


def check_device(**tensors: torch.Tensor) -> None:
    """Raise unless all operands lie on one device."""
    (first, x), *others = tensors.items()
    for name, y in others:
        if y.device != x.device:
            raise ValueError(f"{first} is on {x.device} and {name} on {y.device}; all operands lie on one device")


def token_axis(name: str, x: Any) -> int:
    """The token axis: 0 of [t, ...], and 1 of [2, t, h, d], K and V (or their gradients) in one tensor.

    >>> token_axis("x", torch.empty(8, 4, 16)), token_axis("x", torch.empty(2, 8, 4, 16))
    (0, 1)
    """
    check_tensor(name, x)
    if x.ndim in (1, 2, 3):
        return 0
    if x.ndim == 4 and x.shape[0] == 2:
        return 1
    raise ValueError(f"{name} has shape {list(x.shape)}; it must be [t], [t, d], [t, h, d] or [2, t, h, d]")


def half_of(name: str, x: torch.Tensor, axis: int) -> int:
    """Half the number of tokens, which is even."""
    if x.shape[axis] % 2:
        raise ValueError(f"{name} has shape {list(x.shape)}: its {x.shape[axis]} tokens must be an even number")
    return x.shape[axis] // 2


def check_given(name: str, lengths: Any) -> None:
    """Raise unless these lengths are a strided tensor.

    >>> check_given("cu_seqlens", [0, 8])
    Traceback (most recent call last):
        ...
    TypeError: cu_seqlens is a list; it must be an int32 or int64 tensor [b + 1]
    """
    if lengths is None:
        raise ValueError(f"{name} is None; it must be an int32 or int64 tensor [b + 1]")
    if not isinstance(lengths, torch.Tensor):
        raise TypeError(f"{name} is a {type(lengths).__name__}; it must be an int32 or int64 tensor [b + 1]")
    check_tensor(name, lengths)


def check_lengths(name: str, lengths: Any, device: torch.device) -> None:
    """Raise unless these are cumulative lengths by type, on the device of the data or on the CPU."""
    check_given(name, lengths)
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {lengths.dtype}; it must be int32 or int64")
    if lengths.ndim != 1 or lengths.shape[0] < 1:
        raise ValueError(f"{name} has shape {list(lengths.shape)}; it must be [b + 1]")
    if lengths.device != device and lengths.device.type != "cpu":
        raise ValueError(f"{name} is on {lengths.device} and the data on {device}; lengths lie with the data or on cpu")


def check_lse(name: str, lse: Any, sequences: int, tokens: int | None, heads: int | None, lse_packed: bool) -> None:
    """Raise unless `lse` is [h, t] (lse_packed) or [b, h, s]. None: any number of heads, of tokens."""
    check_flag("lse_packed", lse_packed)
    check_tensor(name, lse)
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


def check_divisible(sizes: Any, divisor: int, why: str) -> None:
    """Raise unless every sequence's length divides. sizes: int64 [b], an array or a tensor; None: not checked.

    >>> check_divisible(torch.tensor([4, 3]), 2, "a half")
    Traceback (most recent call last):
        ...
    ValueError: cu_seqlens_padded gives sequence 1 the length 3, padding included, but a half needs a multiple of 2
    """
    if sizes is not None and (sizes % divisor).any():
        number = (sizes % divisor != 0).tolist().index(True)
        raise ValueError(
            f"cu_seqlens_padded gives sequence {number} the length {sizes[number]}, padding included, but {why} needs "
            f"a multiple of {divisor}"
        )


def chunks_of(cp_size: int) -> int:
    """The number that every length is a multiple of, in layout dual_chunk. One rank holds sequences of any length.

    >>> chunks_of(2), chunks_of(1)
    (4, 1)
    """
    return 1 if cp_size == 1 else 2 * cp_size


def check_chunk_lengths(sizes: Any, cp_size: int) -> None:
    """Raise unless every sequence divides into the equal chunks of layout dual_chunk; sizes as in `check_divisible`."""
    check_divisible(sizes, chunks_of(cp_size), f"layout 'dual_chunk' at cp_size {cp_size}")


def check_counted(sizes: Any, cp_size: int, first_half: bool, second_half: bool) -> int:
    """The same for the chunks that are counted: a half of a sequence on one rank needs an even length. The divisor."""
    if cp_size == 1 and first_half != second_half:
        check_divisible(sizes, 2, "a half")
        return 2
    check_chunk_lengths(sizes, cp_size)
    return chunks_of(cp_size)


def check_fits(real: Any, slots: Any) -> None:
    """Raise unless every sequence has room for its real tokens. Both int64 [b], arrays or tensors; None: unchecked."""
    if real is not None and slots is not None and (real > slots).any():
        number = (real > slots).tolist().index(True)
        raise ValueError(
            f"cu_seqlens_padded gives sequence {number} {slots[number]} slots, but it has {real[number]} tokens by "
            "cu_seqlens; padding must not be negative"
        )


def check_room(name: str, tokens: int, lengths_name: str, end: int | None) -> None:
    """Raise unless the buffer has a row for every token."""
    if end is not None and tokens < end:
        raise ValueError(f"{name} has {tokens} tokens, fewer than {lengths_name}[-1] = {end}")


def check_tail(name: str, tokens: int, end: int | None, cp_size: int) -> None:
    """Raise unless the tail after the last sequence divides among the ranks."""
    if end is None:
        if tokens % cp_size:
            _bad_tail(name, tokens, "", tokens, cp_size)
    elif tokens < end or (tokens - end) % cp_size:
        _bad_tail(name, tokens, f" and cu_seqlens_padded ends at {end}", tokens - end, cp_size)


def _bad_tail(name: str, tokens: int, ends: str, tail: int, cp_size: int) -> NoReturn:
    raise ValueError(
        f"{name} is {tokens}{ends}: the tail of {tail} must be a non-negative multiple of cp_size = {cp_size}"
    )


def check_both(cu_seqlens: Any, cu_seqlens_padded: Any, device: torch.device) -> None:
    """Raise unless both are cumulative lengths of equally many sequences."""
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, device)
    check_lengths("cu_seqlens", cu_seqlens, device)
    if len(cu_seqlens) != len(cu_seqlens_padded):
        raise ValueError(
            f"cu_seqlens has {len(cu_seqlens)} entries and cu_seqlens_padded has {len(cu_seqlens_padded)}; they must "
            "be equal"
        )


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


def pad_v(v: torch.Tensor, d_qk: int) -> torch.Tensor:
    """Append zeros to V on its last axis, until it is as wide as Q and K.

    Args:
        v: [..., d_v], any dtype and format.
        d_qk: the head dim of Q and K, at least d_v. (Where d_v is larger, it is Q and K that need padding.)

    Returns:
        [..., d_qk]; v itself where nothing is missing. Differentiable.

    Raises:
        ValueError, TypeError: d_qk is less than d_v, or no integer.

    TransformerEngine: what `DotProductAttention` does for FlashAttention 2 with d_qk != d_v.

    >>> pad_v(torch.tensor([[1, 2], [3, 4]]), d_qk=3).tolist()
    [[1, 2, 0], [3, 4, 0]]
    """
    d_v = _last_size("v", v)
    check_count("d_qk", d_qk, 1)
    if d_qk < d_v:
        raise ValueError(f"d_qk is {d_qk} and v has head dim {d_v}; d_qk must not be less")
    return v if d_qk == d_v else torch.cat([v, v.new_zeros(*v.shape[:-1], d_qk - d_v)], dim=-1)


def trim_out(out: torch.Tensor, d_v: int) -> torch.Tensor:
    """Return the output without the columns that `pad_v` added.

    Args:
        out: [..., d_qk], any dtype and format.
        d_v: V's own head dim, at most d_qk.

    Returns:
        [..., d_v], a view. Differentiable.

    Raises:
        ValueError, TypeError: d_v is more than out has, or no integer.

    TransformerEngine: what `DotProductAttention` does for FlashAttention 2 with d_qk != d_v.

    >>> trim_out(torch.tensor([[1, 2, 0], [3, 4, 0]]), d_v=2).tolist()
    [[1, 2], [3, 4]]
    """
    size = _last_size("out", out)
    check_count("d_v", d_v, 1)
    if d_v > size:
        raise ValueError(f"d_v is {d_v} and out has head dim {size}; d_v must not be more")
    return out[..., :d_v]


def _last_size(name: str, x: torch.Tensor) -> int:
    check_tensor(name, x)
    if x.ndim == 0:
        raise ValueError(f"{name} has shape []; it must be [..., d]")
    return x.shape[-1]
