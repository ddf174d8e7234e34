"""Marks and numbers that several folders share."""

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

from cp_fast.build import builder

__all__ = ["HANGS_S", "examples", "needs_cxx", "seeds"]

HANGS_S = 1800.0  # seconds after which something hangs: no test may fail because a machine is busy

needs_cxx = pytest.mark.skipif(builder.why_not("cpu") is not None, reason="needs a C++ compiler")


def examples(count: int, fast: int | None = None) -> int:
    """How many examples a test of Hypothesis draws: all, or in the fast tests 15 of 100 (see `tests/conftest.py`), or
    `fast` of them where one takes long.
    """
    share = settings().max_examples
    return fast if fast is not None and share < 100 else max(1, count * share // 100)


def seeds(count: int) -> list[ParameterSet]:
    """Seeds from 0, one in four without the mark `thorough`."""
    return [pytest.param(n, marks=pytest.mark.thorough if n % 4 else ()) for n in range(count)]
