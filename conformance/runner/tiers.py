"""The tiers: each is one kind of problem, how it is drawn, and one way to judge it.

cases of attention, which Hypothesis draws, or `covering` makes

    plan          integers: the schedule computes the problem; sharding follows the layout
    logic         float64 and float32 against the oracle, closely
    probes        counting inputs: which query saw which key, exactly
    budget        low precision, in units of plain PyTorch's error
    metamorphic   problems that must have the same answer: fewer ranks, other orders, other company
    spellings     the same call in other words: lengths in int64, defaults by name
    hygiene       reads and writes out of place: NaN in fresh memory, guarded margins, strides, aliases
    determinism   the same bits from run to run
    pairs         every possible pair of features, and every schedule with every format and mask

tables of named problems

    errors        malformed calls: every rank raises, none hangs; their texts begin with "error"
    special       every edge of what attention means, under every schedule
    known         bugs that were reported of other systems
    torch         gradcheck, autocast, checkpointing, compiled graphs, operators

the levels other than whole attention, whose texts are Helper(...), Malformed(...), Merge(...), Tile(...),
TileGradients(...), LinearAttention(...), CausalConv1d(...), SparseAttention(...), SelectKeys(...) and IndexLoss(...)

    helpers             every function of `thd`, well-formed calls
    helpers-malformed   calls that have no right answer: they must raise
    merge               partial results, put together
    kernel              one tile, forward
    kernel-backward     one tile's gradients
    linear              linear attention, and its gradients
    linear-convolution  a causal convolution, and its gradients
    sparse              attention to chosen keys, and its gradients
    sparse-probes       the same with counting inputs: which row saw which key, exactly
    sparse-selection    the keys that an indexer chooses
    sparse-loss         the loss that trains it, and its gradients
    compressed-keys     keys that are made of windows of tokens, and their gradients
    compressed          attention to tokens and to these, and its gradients; which row saw how many
    compressed-selection, compressed-loss       the choice among them, and the loss that trains it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from conformance.case import PRECISE_FIRST, Case
from conformance.checks.calls import check_determinism, check_plan, check_spellings
from conformance.checks.hygiene import check_hygiene
from conformance.checks.metamorphic import check_metamorphic
from conformance.checks.probes import check_probes
from conformance.checks.values import check_budget, check_logic, check_pairs
from conformance.implementation import LEVEL_MEMBER, Implementation
from conformance.problems.capabilities import Capabilities, narrowed
from conformance.problems.compressed import (
    CompressedAttention,
    CompressKeys,
    compressed_attentions,
    compressed_losses,
    compressed_selections,
    compressions,
)
from conformance.problems.covering import covering
from conformance.problems.helpers import HELPERS, Helper, Malformed, helper_calls, malformed_calls
from conformance.problems.known_bugs import KnownBug
from conformance.problems.linear import (
    CausalConv1d,
    LinearAttention,
    convolutions,
    linear_attentions,
)
from conformance.problems.malformed import MalformedCall
from conformance.problems.problem import CaseProblem, LevelProblem, NamedProblem, SuiteProblem
from conformance.problems.sparse import (
    IndexLoss,
    SelectKeys,
    SparseAttention,
    check_sparse_probes,
    index_losses,
    selections,
    sparse_attentions,
)
from conformance.problems.special import SpecialCase
from conformance.problems.strategies import CP_SIZES, FEW_SIZES, cases
from conformance.problems.tiles import Merge, Tile, TileGradients, merges, tile_gradients, tiles
from conformance.problems.torch_uses import TorchUse
from conformance.record import Level

__all__ = ["TIERS", "Drawn", "Tier", "group_sizes", "tiers_of"]

Drawn = SearchStrategy[Any] | Iterable[SuiteProblem]


@dataclass(frozen=True)
class Tier:
    """One kind of problem, and one way to judge it.

    Attributes:
        kind: of problem.
        draw: (tier, item, capabilities, group sizes) -> a strategy of problems, or all of them.
        items: those of an implementation, each drawn by itself: functions of a level, entries of a table, or one
            without a name.
        judged: (implementation, problem, device) -> findings; None for the problem's own `check`.
        dtypes: those that the tier is meant for; any if there are none.
        coarser: the dtypes for implementations with none of these: in those it sees less.
        needs: any of these members is enough.
        sizes: the group sizes that are drawn where none are asked for.
        most_on_gpu: how many problems of each item, where one that goes well may cost its process.
    """

    name: str
    level: Level
    kind: type[SuiteProblem]
    draw: Callable[[Tier, str, Capabilities, Sequence[int]], Drawn]
    items: Callable[[Capabilities], Sequence[str]]
    judged: Callable[[Implementation, Any, str], list[str]] | None = None
    dtypes: tuple[str, ...] = ()
    coarser: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    sizes: tuple[int, ...] = CP_SIZES
    most_on_gpu: int | None = None

    def problems(self, item: str, capabilities: Capabilities, cp_sizes: Sequence[int] = ()) -> Drawn:
        """The problems of an item: a strategy, or all of them."""
        return self.draw(self, item, capabilities, cp_sizes or self.sizes)

    def check(self, impl: Implementation, problem: Any, device: str = "cpu") -> list[str]:
        """Play a problem, and say what is wrong; nothing when all is well.

        Raises:
            UnsupportedCase: the implementation does not have what is asked, and says so on every rank.
        """
        return problem.check(impl, device) if self.judged is None else self.judged(impl, problem, device)

    def absent(self, impl: Implementation) -> str:
        """The members that it needs and the implementation does not offer; empty when there is enough."""
        needs = self.needs or (LEVEL_MEMBER[self.level],)
        return "" if any(map(impl.offers, needs)) else ", ".join(needs)

    def dtypes_of(self, capabilities: Capabilities) -> tuple[str, ...]:
        """The dtypes to draw for an implementation; none if it has none."""
        for dtypes in (self.dtypes, self.coarser):
            if found := tuple(d for d in dtypes if capabilities.has("dtype", d)):
                return found
        return ()


def _drawn_cases(tier: Tier, item: str, capabilities: Capabilities, cp_sizes: Sequence[int]) -> Drawn:
    drawn = cases(capabilities, cp_sizes=cp_sizes, dtypes=tier.dtypes_of(capabilities))
    return drawn.map(lambda case: narrowed(case, capabilities))


def _of_cases(
    name: str,
    judged: Callable[[Implementation, Case, str], list[str]],
    dtypes: tuple[str, ...] = PRECISE_FIRST,
    draw: Callable[[Tier, str, Capabilities, Sequence[int]], Drawn] = _drawn_cases,
    **more: Any,
) -> Tier:
    return Tier(name, "schedule", Case, draw, lambda _: [""], judged, dtypes, **more)


def _of_level(
    name: str,
    level: Level,
    kind: type[LevelProblem],
    functions: Iterable[str],
    draw: Callable[[str, Sequence[int]], Drawn],
    **more: Any,
) -> Tier:
    listed = list(functions)
    return Tier(name, level, kind, lambda _, item, __, cp_sizes: draw(item, cp_sizes), lambda _: listed, **more)


def _of_ranks(
    name: str,
    level: Level,
    kind: type[LevelProblem],
    function: str,
    draw: Callable[[Sequence[int]], Drawn],
    **more: Any,
) -> Tier:
    """A level of one function that ranks call together."""
    return _of_level(name, level, kind, [function], lambda _, cp_sizes: draw(cp_sizes), sizes=FEW_SIZES, **more)


def _of_table(name: str, kind: type[NamedProblem]) -> Tier:
    return Tier(name, "schedule", kind, lambda _, item, *__: [kind(item)], kind.items)


TIERS = {
    tier.name: tier
    for tier in (
        _of_level("helpers", "helpers", Helper, HELPERS, lambda name, _: helper_calls(name)),
        _of_level(
            "helpers-malformed",
            "helpers",
            Malformed,
            (name for name, helper in HELPERS.items() if helper.rule),
            lambda name, _: malformed_calls(name),
            most_on_gpu=4,
        ),
        _of_level("merge", "merge", Merge, ["merge"], lambda *_: merges),
        _of_level("kernel", "kernel", Tile, ["tile"], lambda *_: tiles),
        _of_level("kernel-backward", "kernel", TileGradients, ["tile"], lambda *_: tile_gradients),
        _of_ranks("linear", "linear", LinearAttention, "linear_attention", linear_attentions),
        _of_ranks("linear-convolution", "linear", CausalConv1d, "causal_conv1d", convolutions),
        _of_ranks("sparse", "sparse", SparseAttention, "sparse_attention", sparse_attentions),
        _of_ranks(
            "sparse-probes",
            "sparse",
            SparseAttention,
            "sparse_attention",
            sparse_attentions,
            judged=check_sparse_probes,
        ),
        _of_ranks("sparse-selection", "sparse", SelectKeys, "select_keys", selections),
        _of_ranks("sparse-loss", "sparse", IndexLoss, "index_loss", index_losses),
        _of_ranks("compressed-keys", "sparse", CompressKeys, "compress_keys", compressions, needs=("compress_keys",)),
        _of_ranks(
            "compressed",
            "sparse",
            CompressedAttention,
            "compressed_attention",
            compressed_attentions,
            needs=("compressed_attention",),
        ),
        _of_ranks(
            "compressed-selection",
            "sparse",
            SelectKeys,
            "select_keys",
            compressed_selections,
            needs=("compress_keys",),
        ),
        _of_ranks("compressed-loss", "sparse", IndexLoss, "index_loss", compressed_losses, needs=("compress_keys",)),
        _of_cases("plan", check_plan, needs=("make_plan", "shard", "unshard", "position_ids")),
        _of_cases("logic", check_logic, ("float64", "float32")),
        _of_cases("probes", check_probes),
        _of_cases("budget", check_budget, ("bfloat16", "float16", "float32")),
        _of_cases("metamorphic", check_metamorphic, ("float64", "float32", "bfloat16")),
        _of_cases("spellings", check_spellings, ("float64", "float32")),
        _of_cases("hygiene", check_hygiene, ("float64", "float32"), coarser=("bfloat16", "float16")),
        _of_cases("determinism", check_determinism),
        _of_cases("pairs", check_pairs, draw=lambda _, __, *asked: covering(*asked)),
        _of_table("errors", MalformedCall),
        _of_table("special", SpecialCase),
        _of_table("known", KnownBug),
        _of_table("torch", TorchUse),
    )
}


def tiers_of(text: str) -> list[tuple[Tier, SuiteProblem]]:
    """The tiers that play a text, and the problem that it says.

    >>> [(tier.name, problem.name) for tier, problem in tiers_of("error lengths-decrease")]
    [('errors', 'lengths-decrease')]

    Raises:
        ValueError: it says none.
    """
    text = text.strip()
    found = [tier for tier in TIERS.values() if f"{text} ".startswith(tier.kind.begins)]
    if not found:
        Case.parse(text)  # which says what is wrong
    problem = found[0].kind.parse(text)
    return [(tier, problem) for tier in found]


def group_sizes(problem: SuiteProblem) -> tuple[int, ...]:
    """The sizes of the groups that a problem needs.

    >>> group_sizes(SpecialCase("group-of-seven"))
    (7, 7, 7)
    """
    if isinstance(problem, CaseProblem):
        return (problem.cp_size,)
    return tuple(c.problem.cp_size for c in problem.cases)
