"""What the package tells a user unasked: lines on standard error, each once."""

from __future__ import annotations

import os
import sys
from functools import cache

__all__ = ["say", "say_once"]


def say(line: str) -> None:
    """Print a line that begins with the project's name."""
    print(f"cp-attention: {line}", file=sys.stderr, flush=True)


@cache
def say_once(line: str) -> None:
    """`say`, in this process once, and by one process of a node (torchrun's LOCAL_RANK 0)."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(line)
