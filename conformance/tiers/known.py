"""Tier `known`: bugs that were reported of other systems, `conformance.known.KNOWN`, each under the schedules that
had it."""

from __future__ import annotations

from conformance.capabilities import Capabilities
from conformance.case import Case
from conformance.implementation import Implementation
from conformance.judged import Judged

__all__ = ["cases", "check", "ids"]


def ids(capabilities: Capabilities) -> list[str]:
    """The ids that `check` takes: every entry, whatever the capabilities; what is not supported says so."""
    from conformance.known import KNOWN  # which plays entries by the other tiers

    return list(KNOWN)


def cases(entry_id: str) -> tuple[Case, ...]:
    """The problems of one entry; none where there is no such entry."""
    from conformance.known import KNOWN

    return KNOWN[entry_id].entry.cases if entry_id in KNOWN else ()


def check(impl: Implementation, entry_id: str, device: str = "cpu") -> Judged:
    """Findings about one entry.

    Raises:
        ValueError: there is no such entry.
        UnsupportedCase: the implementation has none of it.
    """
    from conformance.known import KNOWN

    if entry_id not in KNOWN:
        raise ValueError(f"there is no known bug {entry_id!r}; there are: {', '.join(KNOWN)}")
    return KNOWN[entry_id].entry.play(impl, device)
