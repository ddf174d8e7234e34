"""A group of ranks as a schedule needs it: an exchange of messages, and a gather of small objects before the first one.

Anything with these members can carry a context-parallel attention: `cp_ref.SimGroup` (all ranks in one process), the
adapters over torch.distributed in both packages, or the user's own. Tensors are only passed through, so this module
needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

__all__ = [
    "Group",
    "PairGroup",
    "PaperGroup",
    "Parcel",
    "Pending",
]


class Parcel(NamedTuple):
    """One tensor to send to `peer`, or the buffer for one from `peer`."""

    peer: int
    tag: int
    tensor: Any


class Pending(Protocol):
    """Messages on their way."""

    def wait(self) -> None:
        """Return when they have arrived: send buffers may be reused, receive buffers may be read (in stream order on
        a GPU).
        """
        ...


@runtime_checkable
class Group(Protocol):
    """One rank's place in a group."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post messages and return at once. Between two ranks they arrive in the order they were posted in, and tags
        must agree.
        """
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable), by rank."""
        ...


@dataclass(frozen=True)
class PaperGroup:
    """A group without processes, for planning: every rank's value is this one's, and no tensor can travel. With one
    rank it can also compute.

    >>> PaperGroup(2).all_gather_object("yes")
    ['yes', 'yes']
    """

    size: int
    rank: int = 0

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> PaperGroup:
        """Nothing; raises RuntimeError for any message, as no tensor can travel."""
        if sends or recvs:
            raise RuntimeError("a group on paper plans; it carries no tensors")
        return self

    def wait(self) -> None:
        """Return at once: nothing is on its way."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value, as often as there are ranks."""
        return [value] * self.size


# ---- two groups of a2a+p2p
#
# Two groups that cross in a rank, as one group: the schedule a2a+p2p runs on it.


class PairGroup:
    """An a2a group and a p2p group that cross in this rank, as one group: rank = p2p_rank * a2a_size + a2a_rank.

                 a2a_rank 0   1          a rank reaches its row (a2a) and its column (p2p), which is all
    p2p_rank 0            0   1          that the schedule a2a+p2p needs
    p2p_rank 1            2   3
    """

    def __init__(self, a2a: Group, p2p: Group) -> None:
        self.a2a, self.p2p = a2a, p2p
        self.rank = p2p.rank * a2a.size + a2a.rank
        self.size = p2p.size * a2a.size

    def joins(self, rank: int, other: int) -> bool:
        """Whether two ranks have their a2a group or their p2p group in common, so that messages go between them."""
        return rank // self.a2a.size == other // self.a2a.size or rank % self.a2a.size == other % self.a2a.size

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post each message in the group that its peer shares with this rank."""
        row_sends, column_sends = self._split(sends)
        row_recvs, column_recvs = self._split(recvs)
        return _All([self.a2a.exchange(row_sends, row_recvs), self.p2p.exchange(column_sends, column_recvs)])

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank: the rows gather, then the columns gather the rows.

        Each of the two gathers uses both groups, in an order that all ranks agree on. So if a rank swaps the groups, no
        rank hangs, and all learn of it.

        Raises:
            ValueError: a rank has the groups the other way round, or they are not the rows and columns of one grid.
        """
        row, column = self._gather(("a2a", self.p2p.rank, value), ("p2p", self.a2a.rank, value))
        swapped = _swapped(row) or _swapped(column)
        here = [(p2p_rank, its) for _, p2p_rank, its in row]
        told, rows = self._gather((swapped, 0, None), (swapped, self.a2a.rank, here))
        if wrong := next((complaint for complaint, *_ in (*told, *rows) if complaint), ""):
            raise ValueError(wrong)
        found = [(p2p_rank, a2a_rank) for _, a2a_rank, row in rows for p2p_rank, _ in row]
        if found != [(p2p_rank, self.a2a.rank) for p2p_rank in range(self.p2p.size) for _ in range(self.a2a.size)]:
            raise ValueError(
                "group is a pair (a2a_group, p2p_group) whose groups are not the rows and columns of one grid: all "
                "ranks of an a2a group need the same rank in their p2p groups, and all of a p2p group the same in "
                "their a2a groups"
            )
        return [its for _, _, row in rows for _, its in row]

    def _gather(self, in_row: tuple[Any, ...], in_column: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        """The values of the ranks of the row and of the column; the group of the lower ranks first, if known."""
        if getattr(self.a2a, "ranks", None) is None or getattr(self.p2p, "ranks", None) is None:
            return self.a2a.all_gather_object(in_row), self.p2p.all_gather_object(in_column)
        if sorted(cast(Any, self.a2a).ranks) <= sorted(cast(Any, self.p2p).ranks):
            row = self.a2a.all_gather_object(in_row)
            return row, self.p2p.all_gather_object(in_column)
        column = self.p2p.all_gather_object(in_column)
        return self.a2a.all_gather_object(in_row), column

    def _split(self, parcels: Sequence[Parcel]) -> tuple[list[Parcel], list[Parcel]]:
        row: list[Parcel] = []
        column: list[Parcel] = []
        for parcel in parcels:
            p2p_rank, a2a_rank = divmod(parcel.peer, self.a2a.size)
            assert self.joins(self.rank, parcel.peer), f"rank {parcel.peer} is in neither group"
            if p2p_rank == self.p2p.rank:
                row.append(parcel._replace(peer=a2a_rank))
            else:
                column.append(parcel._replace(peer=p2p_rank))
        return row, column


def _swapped(gathered: list[Any]) -> str:
    """A complaint unless all ranks of a group have it in the same place of their pair."""
    roles = [role for role, *_ in gathered]
    if len(set(roles)) == 1:
        return ""
    return (
        "group is a pair (a2a_group, p2p_group), and a rank has it the other way round: a group is the "
        f"{', '.join(f'{role} group of its rank {rank}' for rank, role in enumerate(roles))}"
    )


class _All:
    """Wait for all of them."""

    def __init__(self, pending: Sequence[Any]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for one in self._pending:
            one.wait()
