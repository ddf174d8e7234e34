"""The lengths of a batch: one `Sequence` each, or ten thousand of them as four columns of integers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import overload

__all__ = ["Sequence", "Sequences"]


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: real tokens, and the slots it occupies (real tokens first, then its padding).

    In bshd and sbhd the slots are the tensor's sequence length; in thd they are the differences of
    `cu_seqlens_*_padded`.
    """

    len_q: int
    len_kv: int
    slots_q: int
    slots_kv: int


class Sequences(Seq[Sequence]):
    """A tuple of `Sequence` kept as four columns: each `Sequence` is made when it is read.

    Planning reads the columns, which are made in a millisecond for ten thousand sequences.

    Attributes:
        len_q, len_kv, slots_q, slots_kv: signed 64-bit integers, one a sequence; not to be written to.

    >>> two = Sequences([3, 4], [3, 4], [4, 4], [4, 4])
    >>> two[1], len(two), two == (Sequence(3, 3, 4, 4), Sequence(4, 4, 4, 4)), two.len_q.tolist()
    (Sequence(len_q=4, len_kv=4, slots_q=4, slots_kv=4), 2, True, [3, 4])
    """

    def __init__(
        self, len_q: Iterable[int], len_kv: Iterable[int], slots_q: Iterable[int], slots_kv: Iterable[int]
    ) -> None:
        self.len_q = array("q", len_q)
        self.len_kv = self.len_q if len_kv is len_q else array("q", len_kv)
        self.slots_q = self.len_q if slots_q is len_q else array("q", slots_q)
        self.slots_kv = self.slots_q if slots_kv is slots_q else array("q", slots_kv)

    @staticmethod
    def of(sequences: Seq[Sequence]) -> Sequences:
        """These sequences as columns."""
        if isinstance(sequences, Sequences):
            return sequences
        columns = ([s.len_q for s in sequences], [s.len_kv for s in sequences])
        return Sequences(*columns, [s.slots_q for s in sequences], [s.slots_kv for s in sequences])

    @property
    def columns(self) -> tuple[array[int], array[int], array[int], array[int]]:
        """len_q, len_kv, slots_q, slots_kv."""
        return self.len_q, self.len_kv, self.slots_q, self.slots_kv

    def tokens(self, side: str) -> array[int]:
        """The real tokens of each sequence on one side, "q" or "kv"."""
        return self.len_q if side == "q" else self.len_kv

    def slots(self, side: str) -> array[int]:
        """The slots of each sequence on one side, padding included."""
        return self.slots_q if side == "q" else self.slots_kv

    @cached_property
    def _made(self) -> tuple[Sequence, ...]:
        return tuple(map(Sequence, *self.columns))

    def __len__(self) -> int:
        return len(self.len_q)

    @overload
    def __getitem__(self, index: int) -> Sequence: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Sequence, ...]: ...
    def __getitem__(self, index: int | slice) -> Sequence | tuple[Sequence, ...]:
        return self._made[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequences):
            return self.columns == other.columns
        return self._made == other

    def __hash__(self) -> int:
        return hash(self._made)  # equal to a tuple, so its hash too

    def __repr__(self) -> str:
        return repr(self._made)
