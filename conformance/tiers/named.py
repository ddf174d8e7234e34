"""Tiers `special` and `known`: tables of named entries, which the other tiers play. `special`: edge cases
of attention, each under every schedule. `known`: bugs reported of other systems, each under the schedules that had it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conformance.case import Case
from conformance.draw.capabilities import Capabilities
from conformance.implementation import Implementation
from conformance.judge.run_record import Judged

if TYPE_CHECKING:
    from conformance.judge.named_entries import TableEntry

__all__ = ["KNOWN", "SPECIAL"]


@dataclass(frozen=True)
class NamedEntries:
    """A table: what its entries are called, and a function that has them."""

    what: str
    entries: Callable[[], dict[str, TableEntry]]

    def ids(self, capabilities: Capabilities) -> list[str]:
        """The ids that `check` takes: entries quick enough for the device. An unsupported entry says so itself."""
        on_gpu = capabilities.device.startswith("cuda")
        return [name for name, entry in self.entries().items() if on_gpu or not entry.gpu]

    def cases(self, entry_id: str) -> tuple[Case, ...]:
        """The problems of one entry; none where there is no such entry."""
        found = self.entries().get(entry_id)
        return () if found is None else found.cases

    def check(self, impl: Implementation, entry_id: str, device: str = "cpu") -> Judged:
        """Findings about one entry.

        Raises:
            ValueError: there is no such entry.
            UnsupportedCase: the implementation has none of it.
        """
        entries = self.entries()
        if entry_id not in entries:
            raise ValueError(f"there is no {self.what} {entry_id!r}; there are: {', '.join(entries)}")
        return entries[entry_id].play(impl, device)


def _special() -> dict[str, TableEntry]:
    from conformance.special import SPECIAL  # which plays entries by the other tiers

    return SPECIAL


def _known() -> dict[str, TableEntry]:
    from conformance.known import KNOWN

    return {name: bug.entry for name, bug in KNOWN.items()}


SPECIAL = NamedEntries("special case", _special)
KNOWN = NamedEntries("known bug", _known)
