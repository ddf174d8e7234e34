"""The native kernels: C++ on the CPU, CUDA on a GPU, built on first use (`cp_fast.tools.build`), called as operators.

The operators check their arguments in C++ (see `base`). An error there is a RuntimeError that begins with the name of
another exception, and becomes that exception here. Without memory for a result, PyTorch's own exception is raised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch

from cp_fast.movers.base import Kernels
from cp_fast.movers.base_thd import ThdKernels
from cp_fast.runtime.row_selection import Rows
from cp_fast.tools import build

__all__ = ["NativeKernels", "NativeThdKernels", "load", "load_thd"]

_ACTIONS = {"none": 0, "add": 1, "copy": 2}
_ALLOCATION = re.compile(r"AllocationError: (?P<sizes>\[.*?\]) of (?P<item>\d+) bytes")
_KINDS: dict[str, type[Exception]] = {"ValueError: ": ValueError, "TypeError: ": TypeError}


@lru_cache
def load(device: str) -> NativeKernels:
    """The native kernels for a device, built if necessary.

    Args:
        device: "cpu" or "cuda".

    Raises:
        cp_fast.tools.build.Unavailable: why they cannot be used here. cp_fast.tools.build.BuildError: the compiler
        failed, or its library cannot be loaded.
    """
    return NativeKernels(_namespace(device))


@lru_cache
def load_thd(device: str) -> ThdKernels:
    """The same for the helpers of packed sequences; they are in the same library."""
    return cast(ThdKernels, NativeThdKernels(_namespace(device)))


def _namespace(device: str) -> Any:
    """`torch.ops.cp_attention_native_cpu` or `_cuda`, loaded."""
    path = build.library(device)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise build.BuildError(f"the native kernels in {path} cannot be loaded: {error}") from error
    return getattr(torch.ops, f"cp_attention_native_{device}")


class NativeKernels(Kernels):
    """`Kernels` by native operators."""

    name = "native"

    def __init__(self, ops: Any) -> None:
        """`ops`: the namespace of one device's operators."""
        self._ops = _operators(ops, Kernels)

    def take_rows(self, xs: Sequence[torch.Tensor], rows: Rows) -> list[torch.Tensor]:
        if isinstance(rows, slice):
            return [x[rows] for x in xs]
        return self._ops["take_rows"](xs, rows, 0, 0) if xs else []

    def put_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        if outs:
            self._ops["put_rows_"](outs, xs, *_rows(rows, outs[0]))

    def heads_to_front(self, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], heads: int) -> torch.Tensor:
        return self._ops["heads_to_front"](x, *_rows(rows, x), first_heads, heads)

    def heads_to_back_(
        self, out: torch.Tensor, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], add: bool
    ) -> None:
        self._ops["heads_to_back_"](out, x, *_rows(rows, out), first_heads, add)

    def merge_(
        self, out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor, rows: Rows
    ) -> None:
        self._ops["merge_"](out, lse, out_step, lse_step, *_rows(rows, out))

    def add_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        if outs:
            self._ops["add_rows_"](outs, xs, *_rows(rows, outs[0]))


class NativeThdKernels:
    """`ThdKernels` by native operators: every method not defined here is the operator of its name."""

    name = "native"

    def __init__(self, ops: Any) -> None:
        """`ops`: the namespace of one device's operators."""
        self._ops = _operators(ops, ThdKernels)
        vars(self).update({name: call for name, call in self._ops.items() if name not in vars(NativeThdKernels)})

    def grad_correction_(
        self, grad: torch.Tensor, grad_step: torch.Tensor, lengths: torch.Tensor, first_half: str, second_half: str
    ) -> None:
        self._ops["grad_correction_"](grad, grad_step, lengths, _action(first_half), _action(second_half))


def _operators(ops: Any, protocol: type) -> dict[str, Callable[..., Any]]:
    """The operators with the names of the protocol's methods."""
    names = [name for name, method in vars(protocol).items() if callable(method) and not name.startswith("_")]
    return {name: _named(getattr(ops, name).default) for name in names}


def _named(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator; raises the exceptions that its messages name."""

    def call(*arguments: Any) -> Any:
        try:
            return operator(*arguments)
        except RuntimeError as error:
            text = str(error)
            if found := _ALLOCATION.match(text):
                _allocate(found["sizes"], int(found["item"]), arguments)
            for prefix, kind in _KINDS.items():
                if text.startswith(prefix):
                    raise kind(text.removeprefix(prefix)) from None
            raise

    return call


def _allocate(sizes: str, item: int, arguments: Sequence[Any]) -> None:
    """Allocate in PyTorch the memory that an operator did not get for a result: PyTorch raises its own exception."""
    first = arguments[0]
    device = (first if isinstance(first, torch.Tensor) else first[0]).device
    torch.empty([*json.loads(sizes), item], dtype=torch.uint8, device=device)


def _rows(rows: Rows, x: torch.Tensor) -> tuple[torch.Tensor | None, int, int]:
    """`(index, first, count)` of rows of x: the index is None for a slice."""
    if not isinstance(rows, slice):
        return rows, 0, 0
    first, stop, step = rows.indices(x.shape[0])
    if step != 1:
        raise ValueError(f"rows are {rows}; a slice must have step 1")
    return None, first, max(stop - first, 0)


def _action(name: str) -> int:
    if name not in _ACTIONS:
        raise ValueError(f"action is {name!r}; it must be 'add', 'copy' or 'none'")
    return _ACTIONS[name]
