"""The programs that a build needs: where they are, and exactly which ones."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from cp_fast.build.errors import Unavailable

__all__ = ["cpu_identity", "cxx", "identity", "ninja", "nvcc", "nvcc_release"]

_CXX = ("c++", "g++", "clang++")


def cxx() -> str:
    """The C++ compiler: $CXX, or the first of c++, g++ and clang++.

    Raises:
        Unavailable: none is there.
    """
    if asked := os.environ.get("CXX"):
        return _found("a C++ compiler", [asked], "$CXX")
    return _found("a C++ compiler", _CXX, "$CXX is not set")


def nvcc() -> str:
    """The CUDA compiler: $NVCC, bin/nvcc of $CUDA_HOME or $CUDA_PATH, nvcc, or /usr/local/cuda/bin/nvcc.

    Raises:
        Unavailable: none is there.
    """
    if asked := os.environ.get("NVCC"):
        return _found("CUDA's compiler", [asked], "$NVCC")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            return _found("CUDA's compiler", [str(Path(home) / "bin" / "nvcc")], f"${variable}")
    return _found("CUDA's compiler", ["nvcc", "/usr/local/cuda/bin/nvcc"], "$NVCC and $CUDA_HOME are not set")


def ninja() -> str:
    """ninja, of its Python package or of the system.

    Raises:
        Unavailable: neither is there.
    """
    if importlib.util.find_spec("ninja") is not None:
        from ninja import BIN_DIR

        if (program := Path(BIN_DIR) / "ninja").exists():
            return str(program)
    return _found("ninja", ["ninja"], "the Python package ninja is not installed")


@lru_cache
def identity(program: str) -> str:
    """Which program this is: its real path and what it says of its version.

    Raises:
        Unavailable: it does not run.
    """
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{program} --version does not run: {error}") from error
    return f"{os.path.realpath(program)}\n{said}"


def nvcc_release(program: str) -> tuple[int, int]:
    """Its CUDA release, (13, 0).

    Raises:
        Unavailable: it does not say.
    """
    match = re.search(r"release (\d+)\.(\d+)", identity(program))
    if match is None:
        raise Unavailable(f"{program} --version names no CUDA release")
    return int(match[1]), int(match[2])


@lru_cache
def cpu_identity() -> str:
    """What code for this very CPU may depend on: its model and its instruction sets."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = [line for line in first.splitlines() if line.startswith(wanted)]
    return "\n".join([platform.machine(), *lines])


def _found(what: str, names: Iterable[str], source: str) -> str:
    looked_for = list(names)
    for name in looked_for:
        if path := shutil.which(name):
            return path
    raise Unavailable(f"{what} was not found: looked for {', '.join(looked_for)} ({source})")
