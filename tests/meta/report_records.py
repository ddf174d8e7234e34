"""Records for the tests of report, ledger and coverage: real drawn cases with made-up verdicts."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import HealthCheck, Phase, given, settings

from conformance.case import Case
from conformance.strategies import cases

__all__ = ["drawn_cases"]


@lru_cache(maxsize=4)
def drawn_cases(count: int) -> tuple[Case, ...]:
    """The same cases every time."""
    found: list[Case] = []

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=tuple(HealthCheck),
    )
    @given(cases(dtypes=("float64", "float32", "bfloat16", "float16")))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return tuple(found)
