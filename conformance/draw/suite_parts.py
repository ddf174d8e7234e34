"""The suite in parts that are one test each: a drawn tier, one function of a lower level, one entry of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conformance.draw.capabilities import EVERYTHING
from conformance.levels import LEVEL_TIERS
from conformance.run.run_tiers import TierResult
from conformance.run.suite_run import ALL_TIERS, SuiteRun, level_of
from conformance.tiers import TABLE_TIERS

__all__ = ["Part", "parts", "play_part"]

_REFUSALS = "everything that is refused"  # which choices these are, only the implementation knows


@dataclass(frozen=True)
class Part:
    """A tier, or an item of it."""

    tier: str
    item: str = ""

    def __str__(self) -> str:
        return f"{self.tier}-{self.item}" if self.item else self.tier


def parts(tiers: Sequence[str] | None = None) -> list[Part]:
    """All parts, or those of some tiers.

    Raises:
        ValueError: there is no such tier.
    """
    if unknown := [tier for tier in tiers or () if tier not in ALL_TIERS]:
        raise ValueError(f"there is no tier {', '.join(unknown)}; there are: {', '.join(ALL_TIERS)}")
    found: list[Part] = []
    for tier in tiers or ALL_TIERS:
        if tier in LEVEL_TIERS:
            found += [Part(tier, item) for item in LEVEL_TIERS[tier].parts]
        elif tier in TABLE_TIERS:
            found += [Part(tier, item) for item in TABLE_TIERS[tier].ids(EVERYTHING)]
            found += [Part(tier, _REFUSALS)] if tier == "errors" else []
        else:
            found.append(Part(tier))
    return found


def play_part(suite_run: SuiteRun, part: Part) -> TierResult:
    """Play a part.

    Raises:
        ValueError: the implementation supports no plain problem at all.
    """
    if part.item != _REFUSALS or level_of(part.tier) not in suite_run.runner.info.levels:
        return suite_run.play(part.tier, [part.item] if part.item else None)
    table = TABLE_TIERS[part.tier]
    known = set(table.ids(EVERYTHING))
    return suite_run.play(part.tier, [entry for entry in table.ids(suite_run.capabilities) if entry not in known])
