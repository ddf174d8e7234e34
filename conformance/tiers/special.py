"""Tier `special`: the table of special cases, `conformance.special.SPECIAL`, each under every schedule."""

from __future__ import annotations

from conformance.capabilities import Capabilities
from conformance.implementation import Implementation

__all__ = ["check", "ids"]


def ids(capabilities: Capabilities) -> list[str]:
    """What `check` takes: every entry, whatever the capabilities; what is not supported says so."""
    from conformance.special import SPECIAL  # which plays entries by the other tiers

    return list(SPECIAL)


def check(impl: Implementation, entry_id: str, device: str = "cpu") -> list[str]:
    """Findings about one entry.

    Raises:
        ValueError: there is no such entry.
        UnsupportedCase: the implementation has none of it.
    """
    from conformance.special import SPECIAL

    if entry_id not in SPECIAL:
        raise ValueError(f"there is no special case {entry_id!r}; there are: {', '.join(SPECIAL)}")
    return SPECIAL[entry_id].play(impl, device)
