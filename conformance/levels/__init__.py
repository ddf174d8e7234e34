"""The levels below the whole attention: THD helpers, merging, one diagonal band tile.

Each tier here plays one kind of problem, which has a text: Helper(...), Merge(...), Tile(...). The problems run in one
process, and without a group except for `get_batch_on_this_cp_rank`. The definitions are in this package too.

helpers             every function of `thd`, well-formed calls
helpers-malformed   calls that have no right answer: they must raise
merge               partial results, put together
kernel              one tile, forward
kernel-backward     one tile's gradients
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from conformance.implementation import Implementation
from conformance.judge.run_record import Level
from conformance.levels import helpers, kernel, merge
from conformance.levels.helpers import HELPER_NAMES
from conformance.levels.level_calls import Raised
from conformance.levels.problem_text import LevelCase

__all__ = ["HELPER_NAMES", "LEVEL_TIERS", "LevelTier", "Raised"]


@dataclass(frozen=True)
class LevelTier:
    """A tier of a lower level. `parts` has a strategy for each of its functions, played one after the other.

    `most_on_gpu`: how many problems of each function, where one that goes well may cost its process.
    """

    name: str
    level: Level
    problem: type[LevelCase]
    parts: dict[str, SearchStrategy[Any]]
    check: Callable[[Implementation, Any, str], list[str]]
    most_on_gpu: int | None = None

    @property
    def word(self) -> str:
        """How its texts begin."""
        return self.problem.__name__

    def parse(self, text: str) -> Any:
        """The problem that a text says. Raises ValueError where it says none."""
        return self.problem.parse(text)


_HELPERS = {name: helpers.strategy(name) for name in HELPER_NAMES}
_MALFORMED = {name: helpers.malformed(name) for name in helpers.MAY_BE_MALFORMED}

LEVEL_TIERS = {
    tier.name: tier
    for tier in (
        LevelTier("helpers", "helpers", helpers.Helper, _HELPERS, helpers.check),
        LevelTier("helpers-malformed", "helpers", helpers.Malformed, _MALFORMED, helpers.check_malformed, 4),
        LevelTier("merge", "merge", merge.Merge, {"merge": merge.strategy}, merge.check),
        LevelTier("kernel", "kernel", kernel.Tile, {"tile": kernel.strategy}, kernel.check),
        LevelTier("kernel-backward", "kernel", kernel.TileGradients, {"tile": kernel.gradients_strategy}, kernel.check),
    )
}
