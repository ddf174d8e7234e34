"""Tensors as both packages treat them: autocast, derivatives, dtypes and the values that they hold, devices by name,
DTensors and formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from numbers import Integral, Real
from typing import Any, NoReturn, cast

import torch

from cp_ref.problems.call_checks import AXES
from cp_ref.schedules.values import is_dtensor, shown

__all__ = [
    "as_integers",
    "autocast",
    "bytes_of",
    "check_usable",
    "differentiable_once",
    "filled",
    "like_slice",
    "lse_from_packed",
    "lse_shape",
    "lse_to_packed",
    "needs_grad",
    "no_autocast",
    "placed_like",
    "raise_for_batched",
    "read_device",
    "read_fill",
    "recording",
    "refuse_batched",
    "refuse_transforms",
    "taken",
    "to_format",
    "to_packed",
    "wide_dtype",
]


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


_NOTHING = nullcontext()  # made once: every pass asks for it


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Turn autocast off, so that the passes keep their dtypes."""
    on = torch.is_autocast_enabled(device.type)  # turning it off when it is off costs the host as much as a launch
    return torch.autocast(device.type, enabled=False) if on else _NOTHING


def recording() -> AbstractContextManager[None]:
    """Autograd also inside an operator of torch.library, whose body PyTorch runs without it."""
    core = cast(Any, torch)._C
    return core._SetExcludeDispatchKeyGuard(core.DispatchKey.AutogradFunctionality, False)


def needs_grad(*tensors: Any) -> bool:
    """Whether a call of these will have a backward pass; those that are no tensors count for nothing."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors if isinstance(x, torch.Tensor))


def refuse_transforms() -> None:
    """Raise NotImplementedError inside a transform of torch.func: these cannot follow messages between ranks."""
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportPrivateUsage]  # there is no other way
        raise NotImplementedError(
            "attention and linear layers inside torch.func (vmap, grad, vjp, jvp, ...) are not supported; use backward"
        )


def refuse_batched(*grads: torch.Tensor | None) -> None:
    """Raise NotImplementedError for the gradients of `torch.autograd.grad(..., is_grads_batched=True)`, or of a vmap
    around a backward pass: many gradients at once, in tensors that hide their batch axis.
    """
    functorch = cast(Any, torch)._C._functorch  # there is no other way
    if any(x is not None and (functorch.is_legacy_batchedtensor(x) or functorch.is_batchedtensor(x)) for x in grads):
        raise_for_batched()


def raise_for_batched(*_: Any, **__: Any) -> NoReturn:
    """Raise the error of `refuse_batched`."""
    raise NotImplementedError(
        "torch.autograd.grad(..., is_grads_batched=True) is not supported by attention, linear layers, unshard, roll "
        "and the helpers in thd; call torch.autograd.grad once for each gradient, with retain_graph=True"
    )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd function: its results are constants, or raise when differentiated, by `backward`
    and by `torch.autograd.grad`. Batched gradients are refused.

    PyTorch's `once_differentiable` lets results through as constants where only the saved tensors require grad, so that
    a penalty on a gradient has no gradient, without a word.
    """

    @wraps(backward)
    def guarded(ctx: Any, *grads: torch.Tensor | None) -> Any:
        refuse_batched(*grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # it is with create_graph=True alone
            return results
        tensors = [x.detach().requires_grad_() for x in results if isinstance(x, torch.Tensor)]
        behind = [x for x in grads if x is not None and x.requires_grad]
        marked = iter(cast(Any, _Last).apply(len(tensors), *tensors, *behind, *_leaves(ctx)))  # torch leaves it untyped
        return tuple(next(marked) if isinstance(x, torch.Tensor) else x for x in results)

    return guarded


def _leaves(node: Any) -> list[torch.Tensor]:
    """The tensors that a node of the autograd graph was made of.

    `torch.autograd.grad` runs only the nodes on a way to its inputs. So a node that must raise has to lie on a way to
    these tensors.
    """
    seen, found, waiting = {node}, list[torch.Tensor](), [node]
    while waiting:
        for other, _ in waiting.pop().next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
                found += [other.variable] if hasattr(other, "variable") else []
    return found


class _Last(torch.autograd.Function):
    """The first tensors, with the same values; their backward pass raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError(
            "a gradient of a gradient (create_graph=True) is not supported: attention, linear and sparse layers, "
            "unshard and roll are differentiable once. For a penalty on gradients, or a product with second "
            "derivatives, take the difference of the gradients at two near points, or compute this part of the model "
            "with PyTorch's own attention, on one rank"
        )


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of these dtypes are added up: float64 if one of them is, else float32.

    >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float32, torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if torch.float64 in dtypes else torch.float32


def as_integers(x: torch.Tensor) -> torch.Tensor:
    """The same memory. 8-bit floats and large unsigned integers become integers of the same size, which every operator
    that moves rows supports; others are unchanged.

    >>> as_integers(torch.tensor([1, 65535], dtype=torch.uint16))
    tensor([ 1, -1], dtype=torch.int16)
    """
    if x.dtype.is_floating_point and x.element_size() == 1:
        return x.detach().view(torch.uint8)
    return x.view(_SIGNED[x.dtype]) if x.dtype in _SIGNED else x


def bytes_of(x: torch.Tensor) -> bytes:
    """The values of a tensor of any strides, in the order of its elements.

    >>> bytes_of(torch.arange(8, dtype=torch.uint8)[::3])
    b'\\x00\\x03\\x06'
    """
    if not x.numel():
        return b""
    # an axis of one element behind all others has the stride that PyTorch wants
    return x.detach().cpu().flatten()[:, None].contiguous().view(torch.uint8).numpy().tobytes()


def taken(x: torch.Tensor, axis: int, rows: torch.Tensor) -> torch.Tensor:
    """`x.index_select(axis, rows)`, for any dtype. Differentiable."""
    found = (x if x.requires_grad else as_integers(x)).index_select(axis, rows)
    return found if found.dtype == x.dtype else found.view(x.dtype)


_FINITE = {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}  # dtypes without infinity


def read_fill(name: str, value: Any, dtype: torch.dtype, of: str = "x") -> float:
    """A value that is written into a tensor `of` this dtype, in rows without a token: an int for integers and bools.

    0 is held by every dtype. A float may be rounded, but not to 0 or to infinity; an integer may not.

    Raises:
        TypeError, ValueError: it is no number, or none that the dtype holds.

    >>> read_fill("fill_value", -100, torch.int64), read_fill("fill_value", 0.1, torch.bfloat16)
    (-100, 0.1)
    >>> read_fill("fill_value", -1, torch.uint8)
    Traceback (most recent call last):
        ...
    ValueError: fill_value is -1; of dtype torch.uint8 it must be from 0 to 255
    """
    if (isinstance(value, bool) and dtype != torch.bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if value == 0:
        return 0
    if dtype.is_floating_point or dtype.is_complex:
        return _read_float(name, value, dtype.to_real(), of)
    number: Any = value  # of any kind
    whole = int(number) if number == number // 1 else None  # neither NaN nor infinity is
    if whole is None:
        raise ValueError(f"{name} is {value}, but {of} has dtype {dtype}; it must be an integer")
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not least <= whole <= most:
        raise ValueError(f"{name} is {shown(whole)}; of dtype {dtype} it must be from {least} to {most}")
    return whole


def _read_float(name: str, value: Any, dtype: torch.dtype, of: str) -> float:
    try:
        limits, number = torch.finfo(dtype), float(value)
    except OverflowError:
        limits, number = torch.finfo(dtype), math.inf * (1 if value > 0 else -1)
    except TypeError:  # two values in a byte
        raise ValueError(f"{name} is {value}; of dtype {dtype} it must be 0") from None
    endless = math.isinf(number) and number == value and str(dtype).removeprefix("torch.") not in _FINITE
    if not (math.isnan(number) or endless or limits.min <= number <= limits.max):
        raise ValueError(f"{name} is {shown(value)}; of dtype {dtype} it must be from {limits.min} to {limits.max}")
    if 2 * abs(number) <= limits.smallest_normal * limits.eps:
        raise ValueError(f"{name} is {value}, which would be 0 in {of} of dtype {dtype}")
    if isinstance(value, Integral):
        digits = int(value).bit_length() - (int(value) & -int(value)).bit_length() + 1
        if digits > 1 - math.log2(limits.eps):
            raise ValueError(f"{name} is {value}, which {of} of dtype {dtype} does not hold; give a float to round it")
    return number


def filled(x: torch.Tensor, shape: Sequence[int], value: float) -> torch.Tensor:
    """A tensor of x's dtype with one value, by `read_fill`, everywhere."""
    return x.new_full(tuple(shape), value) if value else x.new_zeros(tuple(shape))


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
        raise TypeError(f"device is {shown(device)}; it must be a torch.device, or the name of one")
    try:
        return torch.device(device)
    except (RuntimeError, ValueError):
        raise ValueError(f"device is {shown(device)}; it must be a torch.device, or the name of one") from None


def check_usable(device: torch.device) -> None:
    """Raise ValueError where PyTorch cannot make a tensor on the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device is {str(device)!r}; PyTorch must be able to use it, and says: {reason}") from None


_LSE = {"bshd": ("batch", "heads", "sequence"), "sbhd": ("batch", "heads", "sequence"), "thd": ("heads", "sequence")}


def placed_like(q: Any, qkv_format: str, results: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """This rank's (out, lse, max_logit) as DTensors on the mesh of q, where q is one; else unchanged.

    Args:
        q: the argument of `attention`, with its placement checked.
        results: max_logit may be None. Where a mesh dimension shards the batch it is Partial("max").
    """
    if not is_dtensor(q):
        return results
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    axes = AXES[qkv_format]
    sizes = dict(zip(axes, q.shape, strict=False))
    placements: list[Any] = list(q.placements)
    sharded: list[str] = [axes[p.dim] if p.is_shard() else "" for p in placements]  # the axis, by mesh dimension

    def placed(x: torch.Tensor | None, names: Sequence[str], *more: int) -> Any:
        if x is None:
            return None
        elsewhere = {name: Replicate() for name in ("", "sequence")} | {"batch": Partial("max")}
        its = [Shard(names.index(a)) if a in names else elsewhere[a] for a in sharded]
        shape = torch.Size([*(sizes[name] for name in names), *more])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, q.device_mesh, its, run_check=False, shape=shape, stride=stride)

    out, lse, max_logit = results
    return placed(out, axes, out.shape[-1]), placed(lse, _LSE[qkv_format]), placed(max_logit, ("heads",))


def like_slice(x: Any, result: torch.Tensor) -> torch.Tensor:
    """A slice of x's shape as a DTensor placed like x, where x is one; else unchanged."""
    if not is_dtensor(x):
        return result
    from torch.distributed.tensor import DTensor

    where: dict[str, Any] = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    return DTensor.from_local(result, x.device_mesh, x.placements, **where)


# ---- formats: packed tensors [t, h, d] are what both passes compute with


def to_packed(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """x in `qkv_format` -> [t, h, d]."""
    if qkv_format == "thd":
        return x
    if qkv_format == "sbhd":
        x = x.transpose(0, 1)
    return x.reshape(-1, *x.shape[2:])


def to_format(x: torch.Tensor, qkv_format: str, batch_size: int) -> torch.Tensor:
    """[t, h, d] -> `qkv_format`: the inverse of `to_packed`."""
    if qkv_format == "thd":
        return x
    x = x.reshape(batch_size, -1, *x.shape[1:])
    return x.transpose(0, 1).contiguous() if qkv_format == "sbhd" else x


def lse_from_packed(lse: torch.Tensor, qkv_format: str, batch_size: int) -> torch.Tensor:
    """[t, h] -> [h, t] for thd, [b, h, s] for bshd and sbhd."""
    if qkv_format == "thd":
        return lse.t().contiguous()
    return lse.reshape(batch_size, -1, lse.shape[1]).transpose(1, 2).contiguous()


def lse_shape(rows_of_heads: Sequence[int], qkv_format: str) -> tuple[int, ...]:
    """The shape of an lse, given that of q without its last axis.

    >>> lse_shape((2, 8, 4), "bshd"), lse_shape((8, 2, 4), "sbhd"), lse_shape((16, 4), "thd")
    ((2, 4, 8), (2, 4, 8), (4, 16))
    """
    *tokens, heads = rows_of_heads
    if qkv_format == "thd":
        return (heads, *tokens)
    batch, rows = tokens if qkv_format == "bshd" else tokens[::-1]
    return batch, heads, rows


def lse_to_packed(lse: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """The inverse of `lse_from_packed`."""
    if qkv_format == "thd":
        return lse.t()
    return lse.transpose(1, 2).reshape(-1, lse.shape[1])
