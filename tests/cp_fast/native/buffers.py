"""What tests of the native CPU kernels share: the kernels, the helpers by them, lengths, and comparing bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

import cp_fast.thd  # noqa: F401  (registers the operators)
from cp_fast.movers import use
from cp_fast.movers.native_movers import NativeMovers, load


def native() -> NativeMovers:
    return load("cpu")


class _Helpers:
    """The operators of the THD helpers, by the native kernels."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with use("native"):
                return getattr(torch.ops.cp_attention, name)(*arguments)

        return call


def helpers() -> _Helpers:
    return _Helpers()


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of every row, [t, bytes]: two NaN with the same bits are equal here."""
    return x.contiguous().view(torch.uint8).reshape(len(x), -1) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
