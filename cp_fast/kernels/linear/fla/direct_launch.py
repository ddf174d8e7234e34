"""Launches of Triton kernels without what Triton and flash-linear-attention do on the host around each of them.

A kernel of theirs goes through a choice of back ends, heuristics, a tuner, a binder of arguments and a cache of
compiled kernels. That takes the host longer than many of these kernels take a GPU. Here the first call with a key goes
that way, and its compiled kernel is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from inspect import unwrap
from types import FunctionType
from typing import Any, TypeVar

import torch
import triton  # pyright: ignore[reportMissingImports]
from triton.compiler import CompiledKernel  # pyright: ignore[reportMissingImports]
from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]
from triton.runtime.jit import JITFunction, KernelInterface  # pyright: ignore[reportMissingImports]

from cp_ref.calls.score_mod import names_in_code

__all__ = ["DirectLaunch", "direct", "launch_of"]

_FROM, _BELOW = (3, 6), (3, 10)  # the releases whose launch of a compiled kernel was read; others go the long way
_KNOWN = _FROM <= tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) < _BELOW
Function = TypeVar("Function", bound=Callable[..., Any])


class DirectLaunch:
    """A kernel, launched by `kernel[grid](...)` as before. A callable grid may read constants and tuned numbers.

    The key of a compiled kernel has all that may choose it: the device, constants, dtypes, what is None, and what
    Triton specializes on (whether 16 divides a pointer or a number, and whether a number is 1 or needs 64 bits).
    """

    def __init__(self, kernel: Any) -> None:
        *around, function = _layers(kernel)
        self._kernel, self._direct = kernel, _KNOWN and isinstance(function, JITFunction)
        self._tuner = next((layer for layer in around if isinstance(layer, Autotuner)), None)
        constant = set(() if self._tuner is None else self._tuner.keys)
        if self._direct:  # the interpreter's functions have no such list
            constant.update(param.name for param in function.params if param.is_constexpr)
        self._names = function.arg_names
        self._constant = [name for name in self._names if name in constant]
        self._other = [name for name in self._names if name not in constant]
        self._compiled: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self._launch, grid) if self._direct else self._kernel[grid]

    def _launch(self, grid: Any, /, *given: Any, **named: Any) -> None:
        if given:
            named |= zip(self._names, given, strict=False)
        get = named.get
        key = torch.cuda.current_device(), *map(get, self._constant), *map(_kind, map(get, self._other))
        if (found := self._compiled.get(key)) is None:
            self._first_launch(grid, key, named)
            return
        compiled, constants = found
        size = grid(constants) if callable(grid) else grid
        compiled[*size, 1, 1](*map(get, self._names))  # constants are compiled in: it reads no argument of theirs

    def _first_launch(self, grid: Any, key: tuple[Any, ...], named: dict[str, Any]) -> None:
        if unknown := named.keys() - set(self._names):
            raise TypeError(f"{self._kernel} is launched with {sorted(unknown)}, which its key does not have")
        compiled = self._kernel[grid](**named)
        config = None if self._tuner is None else self._tuner.best_config
        if isinstance(compiled, CompiledKernel) and (config is None or config.pre_hook is None):
            constants = {name: named[name] for name in self._constant if name in named}
            self._compiled[key] = compiled, constants | ({} if config is None else config.kwargs)


def _kind(x: Any) -> Any:
    """The part of the key for an argument that is not a constant."""
    kind = type(x)
    if kind is torch.Tensor:
        return x.dtype, x.data_ptr() % 16 == 0
    if kind is int:
        return x == 1, x % 16 == 0, x.bit_length() > 31
    if x is None or kind is float:
        return kind
    raise TypeError(f"a kernel is launched with {kind.__name__}; a tensor, a number or None is known here")


def _layers(kernel: Any) -> Iterator[Any]:
    """The kernel's heuristics and tuner, and at last the function that Triton compiles."""
    while isinstance(kernel, KernelInterface):
        yield kernel
        kernel = getattr(kernel, "fn", None)


@cache
def launch_of(kernel: Any) -> DirectLaunch:
    """One for all functions that launch the kernel."""
    return DirectLaunch(kernel)


def direct(function: Function) -> Function:
    """A copy of a function of flash-linear-attention that launches its kernels directly. Inputs are contiguous, and on
    the current device.

    Raises:
        TypeError: neither it nor a function that it calls launches a kernel.
    """
    if (found := _copy(function)) is None:
        raise TypeError(f"{function.__module__}.{function.__name__} launches no Triton kernel")
    return found


def _copy(function: Any) -> Any:
    """None where there is nothing to replace."""
    inner = unwrap(function)
    replaced: dict[str, Any] = {}
    for name in sorted(names_in_code(inner.__code__)):
        other = inner.__globals__.get(name)
        if isinstance(other, KernelInterface):
            replaced[name] = launch_of(other)
        elif isinstance(other, FunctionType) and other.__module__.startswith("fla.ops") and (own := _copy(other)):
            replaced[name] = own
    if not replaced:
        return None
    made = FunctionType(
        inner.__code__, inner.__globals__ | replaced, inner.__name__, inner.__defaults__, inner.__closure__
    )
    made.__kwdefaults__ = inner.__kwdefaults__
    return made
