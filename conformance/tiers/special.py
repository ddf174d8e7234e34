"""Tier `special`: the table of special cases, `conformance.special.SPECIAL`, each under every schedule."""

from __future__ import annotations

from conformance.capabilities import Capabilities
from conformance.case import Case
from conformance.implementation import Implementation
from conformance.judged import Judged

__all__ = ["cases", "check", "ids"]


def ids(capabilities: Capabilities) -> list[str]:
    """The ids that `check` takes: every entry that the device is quick enough for; what is not supported says so."""
    from conformance.special import SPECIAL  # which plays entries by the other tiers

    return [name for name, entry in SPECIAL.items() if not entry.gpu or capabilities.device.startswith("cuda")]


def cases(entry_id: str) -> tuple[Case, ...]:
    """The problems of one entry; none where there is no such entry."""
    from conformance.special import SPECIAL

    return SPECIAL[entry_id].cases if entry_id in SPECIAL else ()


def check(impl: Implementation, entry_id: str, device: str = "cpu") -> Judged:
    """Findings about one entry.

    Raises:
        ValueError: there is no such entry.
        UnsupportedCase: the implementation has none of it.
    """
    from conformance.special import SPECIAL

    if entry_id not in SPECIAL:
        raise ValueError(f"there is no special case {entry_id!r}; there are: {', '.join(SPECIAL)}")
    return SPECIAL[entry_id].play(impl, device)
