"""Tier `pairs`: every possible pair of features in one problem, and every schedule with every format and mask.

The cases are not drawn but made (`conformance.draw.covering`); each is judged by logic, or by the budget in low
precision.
"""

from __future__ import annotations

from conformance.case import Case
from conformance.implementation import Implementation
from conformance.tiers import budget, logic

__all__ = ["check"]


def check(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Findings of the tier that sees most in the case's dtype.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    tier = logic if case.problem.dtype in ("float64", "float32") else budget
    return tier.check(impl, case, device)
