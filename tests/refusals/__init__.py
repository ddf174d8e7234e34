"""What calls refuse: tables of (call, what is wrong in a good one, what the error says), and how they are played."""

from __future__ import annotations

import re

__all__ = ["says"]


def says(error: Exception | None, words: str) -> bool:
    """Whether an error's message begins with words (a regular expression); with "TypeError: " and the like in front,
    whether it is of that type too.
    """
    pattern = words if re.match(r"(ValueError|TypeError|Unsupported): ", words) else rf"\w+: {words}"
    return re.match(pattern, f"{type(error).__name__}: {error}", re.DOTALL) is not None
