"""The library's modules, imported on first use: the import takes seconds, and most machines have no such library."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["library"]


@cache
def library(name: str) -> Any:
    """A module of FlashAttention 4, or of what it is written with (`cutlass`, `quack`).

    >>> library("math").sqrt(4.0)
    2.0
    """
    return import_module(name)
