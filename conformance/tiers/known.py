"""Tier `known`: bugs that were reported of other systems, `conformance.known.KNOWN`, each under the schedules that
had it."""

from __future__ import annotations

from conformance.capabilities import Capabilities
from conformance.implementation import Implementation

__all__ = ["check", "ids"]


def ids(capabilities: Capabilities) -> list[str]:
    """What `check` takes: every entry, whatever the capabilities; what is not supported says so."""
    from conformance.known import KNOWN  # which plays entries by the other tiers

    return list(KNOWN)


def check(impl: Implementation, entry_id: str, device: str = "cpu") -> list[str]:
    """Findings about one entry.

    Raises:
        ValueError: there is no such entry.
        UnsupportedCase: the implementation has none of it.
    """
    from conformance.known import KNOWN

    if entry_id not in KNOWN:
        raise ValueError(f"there is no known bug {entry_id!r}; there are: {', '.join(KNOWN)}")
    return KNOWN[entry_id].entry.play(impl, device)
