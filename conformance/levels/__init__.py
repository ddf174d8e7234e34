"""The levels other than whole attention: THD helpers, merging, one diagonal band tile, linear layers.

Each tier here plays one kind of problem, which has a text: Helper(...), Merge(...), Tile(...), LinearAttention(...).
The problems of helpers, merges and tiles run without a group except for `get_batch_on_this_cp_rank`; their definitions
are in this package. Those of the level linear run on every rank of a group; they are in `conformance.levels.linear`.

helpers             every function of `thd`, well-formed calls
helpers-malformed   calls that have no right answer: they must raise
merge               partial results, put together
kernel              one tile, forward
kernel-backward     one tile's gradients
linear              linear attention, and its gradients
linear-convolution  a causal convolution, and its gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from conformance.implementation import Implementation
from conformance.judge.run_record import Level
from conformance.levels import kernel, merge
from conformance.levels.helpers.check_helper import check, check_malformed
from conformance.levels.helpers.helper_case import HELPERS, Helper, Malformed, malformed, strategy
from conformance.levels.level_calls import Raised
from conformance.levels.linear import play_linear
from conformance.levels.linear.draw_linear import SIZES, convolutions, linear_attentions
from conformance.levels.linear.linear_case import CausalConv1d, LinearAttention
from conformance.levels.problem_text import LevelCase

__all__ = ["HELPER_NAMES", "LEVEL_TIERS", "LevelTier", "Raised"]


@dataclass(frozen=True)
class LevelTier:
    """A tier of one kind of problem. `parts` has a strategy for each of its functions, played one after the other;
    `sized` makes the strategy of a function that runs on a group, from the group sizes.

    `most_on_gpu`: how many problems of each function, where one that goes well may cost its process.
    """

    name: str
    level: Level
    problem: type[LevelCase]
    parts: dict[str, SearchStrategy[Any]]
    check: Callable[[Implementation, Any, str], list[str]]
    most_on_gpu: int | None = None
    sized: Callable[[Sequence[int]], SearchStrategy[Any]] | None = None

    @property
    def word(self) -> str:
        """How its texts begin."""
        return self.problem.__name__

    def strategy(self, part: str, cp_sizes: Sequence[int]) -> SearchStrategy[Any]:
        """The problems of a function."""
        return self.parts[part] if self.sized is None else self.sized(cp_sizes)

    def parse(self, text: str) -> Any:
        """The problem that a text says. Raises ValueError where it says none."""
        return self.problem.parse(text)


HELPER_NAMES = tuple(HELPERS)
_HELPERS = {name: strategy(name) for name in HELPERS}
_MALFORMED = {name: malformed(name) for name, helper in HELPERS.items() if helper.rule}


def _linear(name: str, problem: type[LevelCase], sized: Callable[..., SearchStrategy[Any]]) -> LevelTier:
    function = "linear_attention" if problem is LinearAttention else "causal_conv1d"
    return LevelTier(name, "linear", problem, {function: sized(SIZES)}, play_linear.check, sized=sized)


LEVEL_TIERS = {
    tier.name: tier
    for tier in (
        LevelTier("helpers", "helpers", Helper, _HELPERS, check),
        LevelTier("helpers-malformed", "helpers", Malformed, _MALFORMED, check_malformed, 4),
        LevelTier("merge", "merge", merge.Merge, {"merge": merge.strategy}, merge.check),
        LevelTier("kernel", "kernel", kernel.Tile, {"tile": kernel.strategy}, kernel.check),
        LevelTier("kernel-backward", "kernel", kernel.TileGradients, {"tile": kernel.gradients_strategy}, kernel.check),
        _linear("linear", LinearAttention, linear_attentions),
        _linear("linear-convolution", CausalConv1d, convolutions),
    )
}
