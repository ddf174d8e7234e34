"""Memory by address, in Numba's simulator: the functions of `memory_gpu` on this process's own memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

__all__ = [
    "SIMULATED",
    "copies",
    "divide",
    "fault",
    "load_int",
    "load_values",
    "store_int",
    "store_values",
]

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


INTEGERS = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}
WIDE = {"f32": np.float32, "f64": np.float64}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
Number = Any


def divide(a: int, b: int) -> int:
    return (int(a) % 2**64) // int(b)  # without signs, as on the GPU


@lru_cache
def load_int(size: int) -> Callable[[int], int]:
    return lambda where: INTEGERS[size].from_address(int(where)).value


@lru_cache
def store_int(size: int) -> Callable[[int, int], None]:
    def store(where: int, value: int) -> None:
        INTEGERS[size].from_address(int(where)).value = int(value)

    return store


@lru_cache
def copies(size: int) -> tuple[Callable[..., None], Callable[..., None]]:
    def copy(*ends: int) -> None:
        assert all(end % size == 0 for end in ends)
        words = [ctypes.string_at(int(source), size) for source in ends[1::2]]
        for to, word in zip(ends[::2], words, strict=True):
            ctypes.memmove(int(to), word, size)

    return copy, copy


def _tensor(where: int, dtype: str, count: int) -> torch.Tensor:
    size = DTYPES[dtype].itemsize * count
    return torch.frombuffer((ctypes.c_char * size).from_address(int(where)), dtype=DTYPES[dtype])


@lru_cache
def load_values(dtype: str, wide: str, width: int) -> Callable[[int], tuple[Number, ...]]:
    def load(where: int) -> tuple[Number, ...]:
        assert where % min(16, DTYPES[dtype].itemsize * width) == 0
        values = _tensor(where, dtype, width).double().tolist()
        return tuple(WIDE[wide](value) for value in values + [0.0] * (4 - width))

    return load


@lru_cache
def store_values(dtype: str, wide: str, width: int) -> Callable[..., None]:
    def store(where: int, *values: Number) -> None:
        assert where % min(16, DTYPES[dtype].itemsize * width) == 0
        numbers = torch.tensor([float(value) for value in values[:width]], dtype=torch.float64)
        _tensor(where, dtype, width).copy_(numbers)

    return store


@lru_cache
def fault(text: str) -> Callable[[], None]:
    def fail() -> None:
        raise AssertionError(text)

    return fail
