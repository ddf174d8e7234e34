"""What the package tells a user unasked: one line on standard error."""

from __future__ import annotations

import sys

__all__ = ["say"]


def say(line: str) -> None:
    """Print a line that begins with the project's name."""
    print(f"cp-attention: {line}", file=sys.stderr, flush=True)
