"""How the page speaks of verdicts: seven states of a cell, each with a symbol, so that no reader needs the colours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conformance.record import VERDICTS, Verdict

__all__ = ["STATES", "State", "counted", "state_of"]


@dataclass(frozen=True)
class State:
    """`name` is the CSS class; colours and symbols in the style sheet and in `STATES`."""

    name: str
    symbol: str
    meaning: str
    verdicts: tuple[Verdict, ...]


# what a cell shows when it has several: the first that it has
STATES: dict[str, State] = {
    state.name: state
    for state in (
        State("wrong", "\u2715", "computed, and not what the oracle says", ("wrong",)),
        State("stopped", "!", "crashed, hung or out of memory", ("crashed", "hung", "out of memory")),
        State("known", "\u25c6", "fails, as expected", ("known",)),
        State("right", "\u2713", "all checks held", ("right",)),
        State("unsupported", "\u2013", "refused, with a clear error", ("unsupported",)),
        State("missing", "\u25cb", "not offered by the implementation", ("missing",)),
        State("none", "\u00b7", "no problem had this", ()),
    )
}


def state_of(counts: Mapping[str, int]) -> State:
    """The state of a cell with these verdicts.

    >>> state_of({"right": 8, "unsupported": 1}).name, state_of({"right": 8, "hung": 1}).name, state_of({}).name
    ('right', 'stopped', 'none')
    """
    return next((s for s in STATES.values() if any(counts.get(v) for v in s.verdicts)), STATES["none"])


def counted(counts: Mapping[str, int]) -> str:
    """The counts in words, most telling first.

    >>> counted({"right": 2, "wrong": 1}), counted({})
    ('1 wrong, 2 right', 'not exercised')
    """
    order = [v for state in STATES.values() for v in state.verdicts]
    assert set(order) == set(VERDICTS)
    return ", ".join(f"{counts[v]:,} {v}" for v in order if counts.get(v)) or "not exercised"
