"""The native kernels: C++ on the CPU, CUDA on a GPU, built on first use (`cp_fast.build`), called as operators.

The operators check their arguments in C++ (see `base`). An error there is a RuntimeError that begins with the name of
another exception, and becomes that exception here. Without memory for a result, PyTorch's own exception is raised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from cp_fast.build import builder
from cp_fast.build.recipe import BuildError
from cp_fast.movers.mover_protocol import HELPERS, KINDS, Movers, RowRule, Rows

__all__ = [
    "NativeMovers",
    "load",
]

_KINDS, _HELPERS = ({name: number for number, name in enumerate(names)} for names in (KINDS, HELPERS))
_SPAN, _INDEX = _KINDS["span"], _KINDS["index"]
_ALLOCATION = re.compile(r"AllocationError: (?P<sizes>\[.*?\]) of (?P<item>\d+) bytes")
_ERRORS: dict[str, type[Exception]] = {"ValueError: ": ValueError, "TypeError: ": TypeError}


@lru_cache
def load(device: str) -> NativeMovers:
    """The native kernels for a device, built if necessary.

    Args:
        device: "cpu" or "cuda".

    Raises:
        cp_fast.build.recipe.Unavailable: why they cannot be used here. BuildError of the same file: the compiler
        failed, or its library cannot be loaded.
    """
    return NativeMovers(_namespace(device))


def _namespace(device: str) -> Any:
    """`torch.ops.cp_attention_native_cpu` or `_cuda`, loaded."""
    path = builder.library(device)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise BuildError(f"the native kernels in {path} cannot be loaded: {error}") from error
    return getattr(torch.ops, f"cp_attention_native_{device}")


class NativeMovers(Movers):
    """`Movers` by native operators."""

    name = "native"

    def __init__(self, ops: Any) -> None:
        """`ops`: the namespace of one device's operators."""
        self._row_indices, self._gather, self._scatter = map(_named, (ops.row_indices, ops.gather, ops.scatter_))
        self._gather_heads, self._scatter_heads = map(_named, (ops.gather_heads, ops.scatter_heads_))
        self._merge = _named(ops.merge_)

    def row_indices(self, rows: RowRule, tokens: int) -> torch.Tensor:
        return self._row_indices(tokens, *_map(rows, tokens))

    def gather(self, xs: Sequence[torch.Tensor], rows: Rows | RowRule) -> list[torch.Tensor]:
        if isinstance(rows, slice):
            return [x[rows] for x in xs]
        return self._gather(xs, *_map(rows, 0)) if xs else []

    def scatter_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows | RowRule, add: bool = False
    ) -> None:
        if outs:
            self._scatter(outs, xs, add, *_map(rows, outs[0].shape[0]))

    def gather_heads(
        self, xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int], heads: Sequence[int]
    ) -> list[torch.Tensor]:
        return self._gather_heads(xs, first_heads, heads, *_map(rows, xs[0].shape[0]))

    def scatter_heads_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int]
    ) -> None:
        self._scatter_heads(outs, xs, first_heads, *_map(rows, outs[0].shape[0]))

    def merge_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        out_step: torch.Tensor,
        lse_step: torch.Tensor,
        rows: Rows | RowRule,
        final: bool = False,
    ) -> None:
        self._merge(out, lse, out_step, lse_step, final, *_map(rows, out.shape[0]))


def _map(rows: Rows | RowRule, tokens: int) -> tuple[int, torch.Tensor | None, torch.Tensor | None, int, int]:
    """(kind + 16 * helper, table, real lengths, a, b): a row map as native operators take it."""
    if isinstance(rows, torch.Tensor):
        return _INDEX, rows, None, 0, 0
    if isinstance(rows, RowRule):
        helper, kind, lengths, real, a, b = rows
        return _KINDS[kind] + 16 * _HELPERS[helper], lengths, real, a, b
    first, stop, step = rows.indices(tokens)
    if step != 1:
        raise ValueError(f"rows are {rows}; a slice must have step 1")
    return _SPAN, None, None, first, max(stop - first, 0)


def _named(packet: Any) -> Callable[..., Any]:
    """The operator; raises the exceptions that its messages name."""
    operator = packet.default._op  # what the overload calls, without a function of Python between

    def call(*arguments: Any) -> Any:
        try:
            return operator(*arguments)
        except RuntimeError as error:
            text = str(error)
            if found := _ALLOCATION.match(text):
                _allocate(found["sizes"], int(found["item"]), arguments)
            for prefix, kind in _ERRORS.items():
                if text.startswith(prefix):
                    raise kind(text.removeprefix(prefix)) from None
            raise

    return call


def _allocate(sizes: str, item: int, arguments: Sequence[Any]) -> None:
    """Allocate in PyTorch the memory that an operator did not get for a result: PyTorch raises its own exception."""
    first = arguments[0]
    table = next(x for x in arguments if isinstance(x, torch.Tensor)) if isinstance(first, int) else first
    device = (table if isinstance(table, torch.Tensor) else table[0]).device
    torch.empty([*json.loads(sizes), item], dtype=torch.uint8, device=device)
