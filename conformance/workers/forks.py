"""Copies of a worker: a call that forks, and lets the child come back from it, leaves two where there was one."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from conformance.record import Played

__all__ = ["copies", "without_copies"]


def copies(pid: int) -> list[int]:
    """The children of a process that are this very process once more, running or ended; none without /proc."""
    listed = Path("/proc", str(pid), "task").glob("*/children")
    return [int(child) for file in listed for child in _words(file) if _same_program(str(pid), child)]


def without_copies(played: Played) -> Played:
    """The verdict on what was played, "wrong" if this process has copies now; they are ended."""
    found = copies(os.getpid())
    for pid in found:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if not found:
        return played
    words = f"a call forked the process, and left {len(found)} copies of it behind"
    return replace(played, verdict="wrong", findings=(words, *played.findings))


def _same_program(pid: str, child: str) -> bool:
    """By their command lines; of a child that has ended only its name is left."""
    its = _words(Path("/proc", child, "cmdline"))
    name = "cmdline" if its else "comm"
    return _words(Path("/proc", pid, name)) == (its or _words(Path("/proc", child, name)))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().replace("\0", " ").split()
    except OSError:  # it is gone
        return []
