"""The tiers. Two kinds: some judge cases that Hypothesis draws, some play a table of named entries.

drawn cases, `check(impl, case, device) -> findings` (sentences; empty when all is well)

    plan          integers: the schedule computes the problem; sharding follows the layout
    logic         float64 and float32 against the oracle, closely
    probes        counting inputs: which query saw which key, exactly
    budget        low precision, in units of plain PyTorch's error
    metamorphic   problems that must have the same answer: fewer ranks, other orders, other company
    spellings     the same call in other words: lengths in int64, defaults by name
    hygiene       reads and writes out of place: NaN in fresh memory, guarded margins, strides, aliases
    determinism   the same bits from run to run

made cases, of the same kind

    pairs         every possible pair of features, and every schedule with every format and mask

tables, `ids(capabilities)`, `check(impl, entry_id, device) -> findings` and `cases(entry_id)`, the problems that an
entry plays; an entry's text is "TIER ID"

    errors        malformed calls: every rank raises, none hangs; their texts begin with "error"
    special       every edge of what attention means, under every schedule
    known         bugs that were reported of other systems
    torch         gradcheck, autocast, checkpointing, compiled graphs, operators

Both raise `UnsupportedCase` where the implementation does not have what is asked, and says so on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from conformance.case import Case
from conformance.draw.capabilities import Capabilities
from conformance.draw.covering import covering
from conformance.implementation import Implementation
from conformance.tiers import (
    budget,
    determinism,
    hygiene,
    logic,
    metamorphic,
    named,
    pairs,
    plan,
    probes,
    torch_integration,
)
from conformance.tiers.calls import errors, spellings

__all__ = ["CASE_TIERS", "TABLE_TIERS", "TIER_NAMES", "TableTier", "Tier", "cases_of", "table_entry"]


@dataclass(frozen=True)
class Tier:
    """A tier of drawn cases, the dtypes that it is meant for, and the dtypes for implementations with none of these: in
    those it sees less. With `made` the cases are these, and none are drawn.
    """

    name: str
    check: Callable[[Implementation, Case, str], list[str]]
    dtypes: tuple[str, ...]
    coarser: tuple[str, ...] = ()
    made: Callable[[Capabilities, Sequence[int]], Iterable[Case]] | None = None

    def dtypes_of(self, capabilities: Capabilities) -> tuple[str, ...]:
        """The dtypes to draw for an implementation; none if it has none."""
        for dtypes in (self.dtypes, self.coarser):
            if found := tuple(d for d in dtypes if capabilities.has("dtype", d)):
                return found
        return ()


@dataclass(frozen=True)
class TableTier:
    """A tier that plays a table. `word` begins its entries' texts: "error lengths-decrease"."""

    name: str
    word: str
    ids: Callable[[Capabilities], list[str]]
    check: Callable[[Implementation, str, str], list[str]]
    cases: Callable[[str], tuple[Case, ...]]


ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")

CASE_TIERS = {
    tier.name: tier
    for tier in (
        Tier("plan", plan.check, ALL_DTYPES),
        Tier("logic", logic.check, ("float64", "float32")),
        Tier("probes", probes.check, ALL_DTYPES),
        Tier("budget", budget.check, ("bfloat16", "float16", "float32")),
        Tier("metamorphic", metamorphic.check, ("float64", "float32", "bfloat16")),
        Tier("spellings", spellings.check, ("float64", "float32")),
        Tier("hygiene", hygiene.check, ("float64", "float32"), coarser=("bfloat16", "float16")),
        Tier("determinism", determinism.check, ALL_DTYPES),
        Tier("pairs", pairs.check, ALL_DTYPES, made=covering),
    )
}

TABLE_TIERS = {
    tier.name: tier
    for tier in (
        TableTier("errors", "error", errors.ids, errors.check, errors.cases),
        TableTier("special", "special", named.SPECIAL.ids, named.SPECIAL.check, named.SPECIAL.cases),
        TableTier("known", "known", named.KNOWN.ids, named.KNOWN.check, named.KNOWN.cases),
        TableTier("torch", "torch", torch_integration.ids, torch_integration.check, torch_integration.cases),
    )
}

TIER_NAMES = (*CASE_TIERS, *TABLE_TIERS)


def table_entry(text: str) -> tuple[TableTier, str] | None:
    """The table and the entry that a text names; None for other texts, such as a case's.

    >>> tier, entry = table_entry("error lengths-decrease")
    >>> tier.name, entry
    ('errors', 'lengths-decrease')
    """
    word, _, entry_id = text.strip().partition(" ")
    for tier in TABLE_TIERS.values():
        if word == tier.word:
            return tier, entry_id.strip()
    return None


def cases_of(text: str) -> tuple[Case, ...]:
    """The problems of the level schedule that a text names: its own, or those of an entry of a table.

    >>> [case.problem.cp_comm_type for case in cases_of("special group-of-seven")]
    ['p2p', 'all_gather', 'a2a', 'a2a+p2p']
    """
    if text.startswith("Case("):
        return (Case.parse(text),)
    entry = table_entry(text)
    return () if entry is None else entry[0].cases(entry[1])
