"""The tiers: each one module with `check(impl, case, device) -> list[str]`, the findings in sentences, empty when all
is well.

plan      integers: the schedule computes the problem; sharding follows the layout
logic     float64 and float32 against the oracle, closely
probes    counting inputs: which query saw which key, exactly
budget    low precision, in units of plain PyTorch's error
errors    malformed calls: every rank raises, none hangs (its "cases" are the names in a table)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conformance.case import Case
from conformance.implementation import Implementation
from conformance.tiers import budget, logic, plan, probes

__all__ = ["CASE_TIERS", "TIER_NAMES", "Tier"]


@dataclass(frozen=True)
class Tier:
    """A tier that runs on drawn cases, and the dtypes that it means anything in."""

    name: str
    check: Callable[[Implementation, Case, str], list[str]]
    dtypes: tuple[str, ...]


CASE_TIERS = {
    tier.name: tier
    for tier in (
        Tier("plan", plan.check, ("float64", "float32", "bfloat16", "float16")),
        Tier("logic", logic.check, ("float64", "float32")),
        Tier("probes", probes.check, ("float64", "float32", "bfloat16", "float16")),
        Tier("budget", budget.check, ("bfloat16", "float16", "float32")),
    )
}

TIER_NAMES = (*CASE_TIERS, "errors")
