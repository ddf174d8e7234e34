"""Select the implementation of the movers: never a guess, and never another one than requested.

    native   C++ and CUDA, built on first use         needs a C++ compiler; for a GPU nvcc too
    numba    Numba CUDA, compiled on first use        needs a GPU and the package numba-cuda
    torch    PyTorch's operators                      needs nothing

Without a choice, a device takes the first of them whose needs are met. If that is not the first of all, its first use
reports it, once. Choose by `use("torch")`, or by the environment variable CP_FAST_KERNELS; a chosen implementation that
is unavailable raises. So does a failed native build: an installed compiler is always used.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from cp_fast.log import log_once
from cp_fast.movers.mover_protocol import Movers
from cp_ref.schedules.values import check_choice

__all__ = [
    "NAMES",
    "VARIABLE",
    "asked",
    "chosen",
    "movers_for",
    "use",
    "why_not",
]

NAMES = ("native", "numba", "torch")
VARIABLE = "CP_FAST_KERNELS"

_MODULES = {  # With the function `load`.
    "native": "cp_fast.movers.native_movers",
    "numba": "cp_fast.movers.numba_cuda",
    "torch": "cp_fast.movers.torch_movers",
}
_REASONS = {"native": "cp_fast.build.builder", "numba": "cp_fast.movers.numba_cuda"}  # With the function `why_not`.
_used: list[str] = []  # Of `use`, the innermost last; for all threads, since autograd has its own.


def why_not(name: str, device_type: str) -> str | None:
    """Why an implementation cannot be used on a device ("cpu", "cuda"); None if its needs are met. A ValueError if the
    environment names a missing compiler.

    >>> why_not("torch", "cpu") is None, why_not("numba", "cpu")
    (True, "numba is for 'cuda', not 'cpu'")
    """
    check_choice("name", name, NAMES)
    return _reason(name, device_type) if name in _REASONS else None


def chosen(device_type: str) -> tuple[str, str]:
    """(name, why) of the implementation that tensors on a device get; `doctor` prints it.

    Raises:
        ValueError: the requested name does not exist. RuntimeError: its needs are not met.

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


def movers_for(device_type: str, name: str | None = None) -> Movers:
    """The movers for tensors on a device: the named implementation, or else the `chosen` one.

    Raises:
        ValueError: a name that does not exist. RuntimeError: one whose needs are not met, or whose build fails.

    >>> movers_for("cpu", "torch").name
    'torch'
    """
    if name is None:
        name = _choice(device_type, *asked())
    elif (reason := why_not(name, device_type)) is not None:
        raise RuntimeError(f"the kernels {name!r} cannot be had: {reason}")
    return _loaded(name, device_type)


@contextmanager
def use(name: str) -> Iterator[None]:
    """Use one implementation, by name, in every thread until the block ends.

    >>> with use("torch"):
    ...     movers_for("cpu").name
    'torch'
    """
    check_choice("name", name, NAMES)
    _used.append(name)
    try:
        yield
    finally:
        _used.pop()


def asked() -> tuple[str | None, str]:
    """The requested name, or None without a choice, and the way of the request."""
    if _used:
        return _used[-1], f"use({_used[-1]!r})"
    if name := os.environ.get(VARIABLE):
        check_choice(VARIABLE, name, NAMES)
        return name, f"{VARIABLE}={name}"
    return None, ""


@lru_cache
def _choice(device_type: str, asked_name: str | None, by: str) -> str:
    """The name of the `chosen` one, looked up once for every request."""
    taken, why = chosen(device_type)
    if asked_name is None and taken != NAMES[0]:
        log_once(
            f"on {device_type!r} the kernels {taken!r} move and merge, slower than {NAMES[0]!r} ones ({why}); "
            f"{VARIABLE}={taken} takes them without a word"
        )
    return taken


@lru_cache
def _loaded(name: str, device_type: str) -> Movers:
    return importlib.import_module(_MODULES[name]).load(device_type)


@lru_cache
def _reason(name: str, device_type: str) -> str | None:
    return importlib.import_module(_REASONS[name]).why_not(device_type)
