"""The kernels in Numba CUDA, for machines with a GPU and no compiler."""

from __future__ import annotations

__all__ = ["load", "why_not"]


def why_not() -> str | None:
    """Why these kernels cannot be had; None if they can."""
    return "not written yet"


def load(device: str) -> object:
    """The implementation."""
    raise NotImplementedError
