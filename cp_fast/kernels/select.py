"""Which implementation of the kernels is in use: never a guess, and never another one than was asked for.

    native   C++ and CUDA, built on first use         needs a C++ compiler; for a GPU nvcc too
    numba    Numba CUDA, compiled on first use        needs a GPU and the package numba-cuda
    torch    PyTorch's operators                      needs nothing

Without a choice, a device takes the first of them whose needs are met, and where that is not the first of all its first
use says so, once. A choice is made by `use("torch")`, or by the
environment variable CP_FAST_KERNELS; what was chosen and cannot be had raises. So does a native build that fails: a
compiler that is there is used.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from cp_fast.kernels.base import Kernels
from cp_fast.kernels.base_thd import ThdKernels
from cp_fast.remarks import say_once
from cp_ref.spec import check_choice

__all__ = ["NAMES", "VARIABLE", "asked", "chosen", "kernels", "thd_kernels", "use", "why_not"]

NAMES = ("native", "numba", "torch")
VARIABLE = "CP_FAST_KERNELS"

_MODULES = {  # with the functions `load` and `load_thd`
    "native": "cp_fast.kernels.native",
    "numba": "cp_fast.kernels.numba_cuda",
    "torch": "cp_fast.kernels.torch_thd",
}
_REASONS = {"native": "cp_fast.build", "numba": "cp_fast.kernels.numba_cuda"}  # with the function `why_not`
_used: list[str] = []  # of `use`, the innermost last; for all threads, as autograd runs backward passes in its own


def why_not(name: str, device_type: str) -> str | None:
    """Why an implementation cannot be had on a device ("cpu", "cuda"); None if its needs are met. A ValueError where
    the environment names a compiler that is not there.

    >>> why_not("torch", "cpu") is None, why_not("numba", "cpu")
    (True, "numba is for 'cuda', not 'cpu'")
    """
    check_choice("name", name, NAMES)
    return _reason(name, device_type) if name in _REASONS else None


def chosen(device_type: str) -> tuple[str, str]:
    """(name, why) of the implementation that tensors on a device get; `doctor` prints it.

    Raises:
        ValueError: a name was asked for that does not exist. RuntimeError: one whose needs are not met.

    >>> with use("torch"):
    ...     chosen("cpu")
    ('torch', "use('torch')")
    """
    name, by = asked()
    if name is not None:
        if (reason := why_not(name, device_type)) is not None:
            raise RuntimeError(f"{by} asks for the kernels {name!r}, which cannot be had: {reason}")
        return name, by
    missing = []
    for name in NAMES:
        if (reason := why_not(name, device_type)) is None:
            return name, "; ".join([f"first choice on {device_type!r}" if not missing else "", *missing]).strip("; ")
        missing.append(f"not {name}: {reason}")
    raise AssertionError("torch is always there")


def kernels(device_type: str, name: str | None = None) -> Kernels:
    """What attention moves and merges with, on a device: the implementation named, or else the `chosen` one.

    Raises:
        ValueError: a name that does not exist. RuntimeError: one whose needs are not met, or whose build fails.

    >>> kernels("cpu", "torch").name
    'torch'
    """
    return _loaded("load", _name(device_type, name), device_type)


def thd_kernels(device_type: str, name: str | None = None) -> ThdKernels:
    """What the helpers of `cp_fast.thd` are made of, by the same choice.

    Raises:
        ValueError, RuntimeError: as `kernels`.

    >>> thd_kernels("cpu", "torch").name
    'torch'
    """
    return _loaded("load_thd", _name(device_type, name), device_type)


@contextmanager
def use(name: str) -> Iterator[None]:
    """Use one implementation, by name, in every thread until the block ends.

    >>> with use("torch"):
    ...     kernels("cpu").name
    'torch'
    """
    check_choice("name", name, NAMES)
    _used.append(name)
    try:
        yield
    finally:
        _used.pop()


def asked() -> tuple[str | None, str]:
    """The name that was asked for, None where the choice is free, and how it was."""
    if _used:
        return _used[-1], f"use({_used[-1]!r})"
    if name := os.environ.get(VARIABLE):
        check_choice(VARIABLE, name, NAMES)
        return name, f"{VARIABLE}={name}"
    return None, ""


@lru_cache
def _choice(device_type: str, asked_name: str | None, by: str) -> str:
    """The name of the `chosen` one, looked up once for every way of asking."""
    taken, why = chosen(device_type)
    if asked_name is None and taken != NAMES[0]:
        say_once(
            f"on {device_type!r} the kernels {taken!r} move and merge, slower than {NAMES[0]!r} ones ({why}); "
            f"{VARIABLE}={taken} takes them without a word"
        )
    return taken


def _name(device_type: str, name: str | None) -> str:
    """The name of an implementation that can be had: this one, or else the `chosen` one."""
    if name is None:
        return _choice(device_type, *asked())
    if (reason := why_not(name, device_type)) is not None:
        raise RuntimeError(f"the kernels {name!r} cannot be had: {reason}")
    return name


@lru_cache
def _loaded(load: str, name: str, device_type: str) -> Any:
    return getattr(importlib.import_module(_MODULES[name]), load)(device_type)


@lru_cache
def _reason(name: str, device_type: str) -> str | None:
    return importlib.import_module(_REASONS[name]).why_not(device_type)
