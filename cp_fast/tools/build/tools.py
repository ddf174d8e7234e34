"""The programs of a build: their paths and their exact versions."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from cp_fast.tools.build.build_errors import Unavailable

__all__ = ["cpu_identity", "cxx", "host_compiler", "identity", "libc_identity", "ninja", "nvcc", "nvcc_release"]

_CXX = ("c++", "g++", "clang++")


def cxx() -> tuple[str, ...]:
    """The C++ compiler: $CXX, which may be several words ("ccache g++"), or the first of c++, g++ and clang++.

    Returns:
        The words of its command, programs by their paths.

    Raises:
        Unavailable: none is there. ValueError: $CXX names none.
    """
    if asked := os.environ.get("CXX"):
        return _asked("CXX", asked, "a C++ compiler")
    return (_found("a C++ compiler", _CXX, "$CXX is not set"),)


def host_compiler(command: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """(program, options) of a compiler's command, without a launcher such as ccache.

    >>> host_compiler(("/usr/bin/ccache", "/usr/bin/g++", "-m64"))
    ('/usr/bin/g++', ('-m64',))
    """
    programs = list(takewhile(_no_option, command))
    return programs[-1], command[len(programs) :]


def nvcc() -> str:
    """The CUDA compiler: $NVCC, bin/nvcc of $CUDA_HOME or $CUDA_PATH, nvcc, or /usr/local/cuda/bin/nvcc.

    Raises:
        Unavailable: none is there. ValueError: $NVCC names none.
    """
    if asked := os.environ.get("NVCC"):
        if (path := shutil.which(asked)) is None:
            raise ValueError(f"NVCC is {asked!r}; it must name CUDA's compiler, by its path or on PATH")
        return path
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
def identity(*command: str) -> str:
    """A program's identity: the real paths of its command, and the version that it prints.

    Raises:
        Unavailable: it does not run.
    """
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{shlex.join(command)} --version does not run: {error}") from error
    programs = [os.path.realpath(program) for program in takewhile(_no_option, command)]
    return "\n".join([*programs, *command[len(programs) :], said])


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
    """The CPU's model and instruction sets, which code for this CPU may depend on."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = [line for line in first.splitlines() if line.startswith(wanted)]
    return "\n".join([platform.machine(), *lines])


@lru_cache
def libc_identity() -> str:
    """The C library: a library linked to a newer one does not load with it."""
    return " ".join(platform.libc_ver())


def _asked(variable: str, text: str, what: str) -> tuple[str, ...]:
    """The words of a command in an environment variable; a path may contain blanks."""
    try:
        words = [text] if shutil.which(text) else shlex.split(text)
    except ValueError:
        words = []
    programs = [shutil.which(word) for word in takewhile(_no_option, words)]
    if not programs or None in programs:
        raise ValueError(f"{variable} is {text!r}; it must name {what}, by its path or on PATH")
    return (*map(str, programs), *words[len(programs) :])


def _no_option(word: str) -> bool:
    return not word.startswith("-")


def _found(what: str, names: Iterable[str], source: str) -> str:
    looked_for = list(names)
    for name in looked_for:
        if path := shutil.which(name):
            return path
    raise Unavailable(f"{what} was not found: looked for {', '.join(looked_for)} ({source})")
