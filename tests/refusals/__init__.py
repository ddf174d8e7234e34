"""What calls refuse: tables of (call, what is wrong in a good one, what the error says), and how they are played."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import cp_fast
import cp_ref
from cp_ref import SimGroup

__all__ = ["PACKAGES", "refused", "says"]

PACKAGES = pytest.mark.parametrize("package", [cp_ref, cp_fast], ids=["cp_ref", "cp_fast"])


def says(error: Exception | None, words: str) -> bool:
    """Whether an error's message begins with words (a regular expression); with "TypeError: " and the like in front,
    whether it is of that type too.
    """
    pattern = words if re.match(r"(ValueError|TypeError|Unsupported): ", words) else rf"\w+: {words}"
    return re.match(pattern, f"{type(error).__name__}: {error}", re.DOTALL) is not None


def refused(package: Any, call: Callable[..., None], odd: dict[str, Any], words: str) -> None:
    """Play a call that is wrong on rank 1 alone, then a good one."""

    def one(member: Any) -> Exception:
        cp = package.ContextParallel(member)
        with pytest.raises((ValueError, TypeError, cp_ref.Unsupported)) as caught:
            call(package, cp, **(odd if member.rank else {}))
        call(package, cp)
        return caught.value

    other, own = SimGroup(2).run(one)
    assert says(own, words), own
    assert str(other).startswith("rank 1 refused its arguments, so rank 0 does not start: ")
    assert str(other).endswith(str(own))
