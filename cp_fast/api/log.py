"""Remarks that the package makes unasked: lines on standard error, each once."""

from __future__ import annotations

import os
import sys
from functools import cache

from torch import distributed as dist

__all__ = ["say", "say_once"]


def say(line: str) -> None:
    """Print a line that begins with the project's name."""
    print(f"cp-attention: {line}", file=sys.stderr, flush=True)


@cache
def say_once(line: str) -> None:
    """`say`, in this process once, and by rank 0 alone of those that torchrun or `init_process_group` started."""
    started = dist.is_available() and dist.is_initialized()
    rank = str(dist.get_rank()) if started else os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    if rank == "0":
        say(line)
