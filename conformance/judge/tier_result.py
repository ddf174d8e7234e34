"""The result of a tier: its problems and its smallest failures."""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.judge.run_record import FAILING, Played

__all__ = ["TierResult"]


@dataclass
class TierResult:
    """The problems that a tier played: every one that was drawn or is in its table, and the smallest failing ones."""

    tier: str
    played: list[Played] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""

    @property
    def drawn(self) -> list[Played]:
        """Without those that shrinking found."""
        return [p for p in self.played if not p.shrunk]

    @property
    def run(self) -> int:
        """How many problems were played, shrinking left out."""
        return len(self.drawn)

    def count(self, *verdicts: str) -> int:
        """How many of them got one of these verdicts."""
        return sum(p.verdict in verdicts for p in self.drawn)

    @property
    def passed(self) -> int:
        """How many are right."""
        return self.count("right")

    @property
    def unsupported(self) -> int:
        """How many are refused as they should be."""
        return self.count("unsupported")

    @property
    def judged(self) -> int:
        """How many were computed, rightly or not."""
        return self.run - self.count("unsupported", "missing")

    @property
    def smallest(self) -> list[Played]:
        """The failing problems: of a drawn tier the smallest of each kind, of a table all of them."""
        shrunk = [p for p in self.played if p.shrunk]
        return shrunk or [p for p in self.played if p.verdict in FAILING]
