"""A group that exists on paper: a size, one rank's place in it, and nobody to talk to. Enough to plan with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from cp_fast.context import ContextParallel
from cp_ref.spec import Parcel

__all__ = ["PaperGroup", "paper_context"]


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


def paper_context(size: int, cp_comm_type: str, a2a_size: int, layout: str) -> ContextParallel:
    """Rank 0 of `size` ranks on paper, as all calls take it.

    >>> paper_context(6, "a2a+p2p", 2, "dual_chunk").a2a_size
    2
    """
    if cp_comm_type != "a2a+p2p":
        return ContextParallel(PaperGroup(size), cp_comm_type, layout=layout)
    pair = PaperGroup(a2a_size), PaperGroup(size // a2a_size)
    context = ContextParallel(pair, cp_comm_type, layout=layout)
    context.comm = PaperGroup(size)  # a pair asks every rank where in the grid it is, and here all are rank 0
    return context
