"""A group that exists on paper: a size, one rank's place in it, and nobody to talk to. Enough to plan with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from cp_ref.spec import Parcel

__all__ = ["PaperGroup", "paper_group"]


@dataclass(frozen=True)
class PaperGroup:
    """A `cp_ref.spec.Group` in which every rank says what this one says, and no tensor can travel."""

    size: int
    rank: int = 0

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> NoReturn:
        """Refuse: there is nobody there."""
        raise RuntimeError("a group on paper plans; it carries no tensors")

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value, as often as there are ranks."""
        return [value] * self.size


def paper_group(size: int, cp_comm_type: str, a2a_size: int) -> PaperGroup | tuple[PaperGroup, PaperGroup]:
    """What `ContextParallel` takes as group: for "a2a+p2p" the pair (a2a_group, p2p_group), else one group.

    >>> paper_group(6, "a2a+p2p", 2)
    (PaperGroup(size=2, rank=0), PaperGroup(size=3, rank=0))
    """
    if cp_comm_type == "a2a+p2p":
        return PaperGroup(a2a_size), PaperGroup(size // a2a_size)
    return PaperGroup(size)
