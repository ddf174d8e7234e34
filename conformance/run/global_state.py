"""The state of a process that a call of attention must not change: PyTorch's settings, random numbers, its copies; and
whether its GPU still answers.

Grad mode and default device belong to a thread, so what looks at them has to be in the thread that made the call.

A device-side assertion, or a launch that reads where nothing is, ends a process's context on its GPU: every later call
fails with the same error, whoever makes it. So a problem that did that is judged, and its process is not used again.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["ASSERTED", "changed", "context_error", "forked", "forks_of", "kept", "state"]

ASSERTED = "device-side assert"  # in the error of what a kernel asserted

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # getter, setter


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


SETTINGS: dict[str, Setting] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (lambda: str(torch.get_default_device()), torch.set_default_device),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the deterministic algorithms": (
        _deterministic,
        lambda was: torch.use_deterministic_algorithms(was[0], warn_only=was[1]),
    ),
    "cuDNN's deterministic flag": (
        lambda: torch.backends.cudnn.deterministic,
        lambda was: setattr(torch.backends.cudnn, "deterministic", was),
    ),
    "the precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "PyTorch's random state": (
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda was: torch.set_rng_state(torch.frombuffer(bytearray(was), dtype=torch.uint8)),
    ),
    "Python's random state": (random.getstate, random.setstate),
    "numpy's random state": (
        lambda: pickle.dumps(np.random.get_state()),
        lambda was: np.random.set_state(pickle.loads(was)),
    ),
}


def state() -> dict[str, Any]:
    """The value of every setting, in this thread."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


def changed(before: dict[str, Any]) -> list[str]:
    """One sentence for every setting that changed; each is restored.

    >>> before = state()
    >>> _ = torch.set_grad_enabled(False)
    >>> changed(before), torch.is_grad_enabled()
    (['a call left grad mode as False; it was True'], True)
    """
    found = []
    for name, (read, write) in SETTINGS.items():
        now, was = read(), before[name]
        if now != was:
            values = "" if "random" in name else f" as {now}; it was {was}"
            found.append(f"a call left {name}{values}" if values else f"a call changed {name}")
            write(was)
    return found


@contextmanager
def kept() -> Iterator[None]:
    """Restore the settings changed inside, so that one problem does not affect the next."""
    before = state()
    try:
        yield
    finally:
        changed(before)


def forked(copies: set[int]) -> str:
    """The finding about copies that a call left."""
    return f"a call forked the process, and left {len(copies)} copies of it behind"


def forks_of(pid: int) -> set[int]:
    """The children of a process that are copies of it, running or ended; none without /proc.

    A running child is a copy if it has its parent's command line. Of an ended child only the name is left to compare.
    """

    def words(of: int | str, file: str) -> str:
        try:
            return Path("/proc", str(of), file).read_text().strip("\0\n ")
        except OSError:  # it is gone
            return ""

    listed = Path("/proc", str(pid), "task").glob("*/children")
    children = {int(child) for file in listed for child in words(pid, str(file.relative_to(f"/proc/{pid}"))).split()}
    return {c for c in children if words(pid, f := "cmdline" if words(c, "cmdline") else "comm") == words(c, f)}


def context_error(device: str) -> str:
    """The error that ended this process's context on the GPU; empty while it works, and on a CPU. Waits for the GPU.

    >>> context_error("cpu")
    ''
    """
    if not device.startswith("cuda"):
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as error:  # torch.AcceleratorError, RuntimeError: by release
        return str(error).partition("\n")[0] or type(error).__name__
    return ""
