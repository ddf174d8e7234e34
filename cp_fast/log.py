"""Lines on standard error that nobody asked for."""

from __future__ import annotations

import os
import sys
from functools import cache

from torch import distributed as dist

__all__ = ["log", "log_once"]


def log(line: str) -> None:
    """Print a line that begins with the project's name."""
    print(f"cp-attention: {line}", file=sys.stderr, flush=True)


@cache
def log_once(line: str) -> None:
    """`log`, in this process once, and by rank 0 alone of those that torchrun or `init_process_group` started."""
    started = dist.is_available() and dist.is_initialized()
    rank = str(dist.get_rank()) if started else os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    if rank == "0":
        log(line)
