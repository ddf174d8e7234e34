"""Looking for a mutant with a tier of the quick profile: until the first problem that fails, without shrinking."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from conformance.checks.reference import UnsupportedCase
from conformance.implementation import Implementation
from conformance.problems.capabilities import Capabilities, probe
from conformance.runner.tiers import TIERS
from cp_fast.movers.select_movers import use
from tests.meta.mutants.model import Mutant, Package, loaded

__all__ = ["QUICK", "Hunt", "drawn_problems", "hunt", "implementation", "tier_names"]

QUICK = 60  # problems, as in the profile quick


@cache
def implementation(package: Package) -> tuple[Implementation, Capabilities]:
    """A package's implementation, and what it has."""
    impl = loaded(package)
    with use("torch"):
        return impl, probe(impl)


@dataclass(frozen=True)
class Hunt:
    """What a tier made of a mutant: the first failing problem's text and findings, or empty ones, after `played`."""

    mutant: str
    tier: str
    played: int
    seconds: float
    text: str = ""
    findings: tuple[str, ...] = ()

    @property
    def killed(self) -> bool:
        """Whether a problem failed."""
        return bool(self.findings)


def tier_names(mutant: Mutant) -> tuple[str, ...]:
    """The tiers of the mutant's level."""
    return tuple(tier.name for tier in TIERS.values() if tier.level == mutant.level)


def hunt(name: str, mutant: Mutant, tier: str, most: int = QUICK) -> Hunt:
    """Plant the mutant and play one tier."""
    impl, capabilities = implementation(mutant.package)
    began, played = time.monotonic(), 0
    with mutant.planted():
        for text, attempt in _problems(impl, mutant, tier, capabilities, most):
            played += 1
            try:
                findings = attempt()
            except UnsupportedCase:
                continue
            except Exception as error:  # the mutant broke what the tier itself relies on: seen
                findings = [f"{type(error).__name__}: {error}"]
            if findings:
                return Hunt(name, tier, played, time.monotonic() - began, text, tuple(findings))
    return Hunt(name, tier, played, time.monotonic() - began)


Problems = list[tuple[str, Callable[[], list[str]]]]
_DRAWN: dict[Any, list[Any]] = {}


def _problems(impl: Implementation, mutant: Mutant, tier: str, capabilities: Capabilities, most: int) -> Problems:
    each = TIERS[tier]
    items = each.items(capabilities)
    named = mutant.edits and mutant.function in items
    found: list[Any] = []
    for item in [mutant.function] if named else items:
        problems = each.problems(item, capabilities)
        drawn = isinstance(problems, SearchStrategy)
        found += drawn_problems((tier, item, capabilities.device), problems, most) if drawn else problems
    return [(str(problem), partial(each.check, impl, problem, capabilities.device)) for problem in found]


def drawn_problems(key: Any, strategy: Any, most: int) -> list[Any]:
    """The first problems of a strategy, the same ones every time; drawn once for all mutants."""
    if len(_DRAWN.get(key, ())) < most:
        found: list[Any] = []

        @settings(
            max_examples=most,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        )
        @given(strategy)
        def collect(problem: Any) -> None:
            found.append(problem)

        collect()
        _DRAWN[key] = found
    return _DRAWN[key][:most]
