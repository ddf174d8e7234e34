"""From a device to its library."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from cp_fast.build import cache
from cp_fast.build.recipe import BuildError, Recipe, Target, Unavailable, ninja, nvcc_release, recipe, target
from cp_fast.log import log

__all__ = ["Status", "build", "find", "library", "status", "why_not"]

_SAID_OF = {"cpu": "the CPU", "cuda": "GPUs"}


class Status(NamedTuple):
    """The state of a device's native kernels on this machine."""

    built: Path | None  # the library in the cache
    why_not: str | None  # why they cannot be used here


def library(device: str) -> Path:
    """The library of a device's native kernels, built if it has to be.

    Args:
        device: "cpu" or "cuda".

    Returns:
        The path of the shared library.

    Raises:
        Unavailable: why they cannot be used here. BuildError: the compiler failed, with its output.
    """
    if (reason := why_not(device)) is not None:
        raise Unavailable(f"the native kernels for {_SAID_OF[device]} cannot be had: {reason}")
    return build(device)


def build(device: str, archs: tuple[int, ...] | None = None, say: Callable[[str], None] | None = None) -> Path:
    """`library` for any GPU architectures, even if it cannot be loaded here: compiling takes no GPU.

    Args:
        device: "cpu" or "cuda".
        archs: GPU architectures such as (80, 90); None for those of this machine.
        say: gets a line before something is built; by default to standard error.

    Raises:
        Unavailable, BuildError: as `library`.
    """
    _check_platform()
    wanted = target(device, archs)
    try:
        made, program = recipe(wanted), ninja()
        key = made.key()
    except Unavailable:  # No compiler: use the library of another one.
        if (found := _by_any_compiler(wanted)) is not None:
            return found
        raise

    def build_in(folder: Path) -> None:
        (say or log)(f"building the native kernels for {_SAID_OF[device]}, once, into {cache.root()}")
        _run(program, made, folder)

    return cache.cached(key, wanted.file_name, build_in)


def find(device: str, archs: tuple[int, ...] | None = None) -> Path | None:
    """The library that `build` would give, if it has been built already."""
    try:
        _check_platform()
        wanted = target(device, archs)
    except Unavailable:
        return None
    try:
        return cache.find(recipe(wanted).key(), wanted.file_name)
    except Unavailable:
        return _by_any_compiler(wanted)


@lru_cache
def why_not(device: str) -> str | None:
    """Why the native kernels for a device cannot be used here, or None. Looks for the build's tools; builds nothing.

    Raises:
        ValueError: CXX, NVCC or CP_ATTENTION_CUDA_ARCHS has a bad value.

    >>> why_not("tpu")
    Traceback (most recent call last):
    ...
    ValueError: device is 'tpu'; it must be 'cpu' or 'cuda'
    """
    try:
        if device == "cuda":
            _check_gpu()
        _check_platform()
        wanted = target(device)
    except Unavailable as error:
        return str(error)
    try:
        made = recipe(wanted)
        made.key()
        ninja()
        if made.nvcc is not None:
            _check_nvcc(made.nvcc)
    except Unavailable as error:
        return None if _by_any_compiler(wanted) is not None else f"{error}; and the cache has none that fits"
    return None


def _by_any_compiler(wanted: Target) -> Path | None:
    """A cached library for this machine, sources and PyTorch from any compiler, for example of another image."""
    return cache.find_first(f"{wanted.key()}-", wanted.file_name)


def status(device: str) -> Status:
    """The state of a device's native kernels on this machine; builds nothing. Raises as `why_not`."""
    return Status(find(device), why_not(device))


def _check_platform() -> None:
    if sys.platform != "linux":
        raise Unavailable(f"native kernels are built on Linux only, and this is {sys.platform}")


def _check_gpu() -> None:
    if torch.version.cuda is None:
        raise Unavailable(f"PyTorch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise Unavailable("PyTorch sees no GPU")


def _check_nvcc(nvcc: str) -> None:
    """The library brings the CUDA runtime of nvcc's release, which the driver has to know."""
    release, of_torch = nvcc_release(nvcc), torch.version.cuda or ""
    if of_torch and release[0] > int(of_torch.split(".")[0]):
        raise Unavailable(
            f"{nvcc} is of CUDA {release[0]}.{release[1]}, newer than the {of_torch} that PyTorch was built for: "
            "its major release must not be"
        )


def _run(ninja: str, made: Recipe, folder: Path) -> None:
    """Build in an empty folder."""
    (folder / "build.ninja").write_text(made.ninja())
    began = time.perf_counter()
    command = [ninja, "-C", str(folder), "--quiet"]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode or not (folder / made.target.file_name).exists():
        if full := [text for text in map(os.strerror, cache.FULL) if text in done.stdout]:
            raise OSError(cache.FULL[0], f"{full[0]}, while compiling; compilers write to {tempfile.gettempdir()} too")
        seconds = f"{time.perf_counter() - began:.0f} s"
        raise BuildError(
            f"building the native kernels for {_SAID_OF[made.target.device]} failed after {seconds}. "
            "CP_FAST_KERNELS=torch does without them. The command and what the compiler said:\n"
            f"{done.stdout.strip()}"
        )
    for waste in folder.glob("*.o"):
        waste.unlink()
