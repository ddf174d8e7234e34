"""What planners know of ten thousand sequences: columns, which are arrays with one number a sequence.

A unit is a rank, or a group of `a2a_size` ranks (see `cp_ref.spec.units`). Its real tokens of a sequence form one axis,
the *token axis*: 0 is its first real token, whatever gap lies between its two chunks.

    dual_chunk, 2 units, 8 slots, 7 real tokens      position    0 1 2 3 4 5 6 .
    unit 0 has two pieces, [0, 2) and [6, 7)         token axis  0 1         2

A window is a range of positions, so on the token axis it is a range again, whichever pieces it touches; and real tokens
of one unit lie side by side in its buffer, because a chunk is only padded where no later chunk has a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

__all__ = [
    "Array",
    "Arrived",
    "Band",
    "Chunked",
    "Cut",
    "Owned",
    "Pieces",
    "Range",
    "Slot",
    "Spanned",
    "Spans",
    "by_sequence",
    "spread",
]

Array = np.ndarray


def spread(start: Array, count: Array) -> Array:
    """The numbers of spans, one span behind the other.

    >>> spread(np.array([4, 9]), np.array([2, 3])).tolist()
    [4, 5, 9, 10, 11]
    """
    total, ends = int(count.sum()), np.cumsum(count, dtype=count.dtype)
    return np.repeat(start - ends + count, count) + np.arange(total, dtype=start.dtype)


def by_sequence(columns: Sequence[Array]) -> Array:
    """Columns side by side: all of the first sequence, then all of the second.

    >>> by_sequence([np.array([1, 2]), np.array([3, 4])]).tolist()
    [1, 3, 2, 4]
    """
    return columns[0] if len(columns) == 1 else np.stack(columns, axis=1).ravel()


class Chunked(NamedTuple):
    """Tokens of sequences that are cut into equal chunks, in one or two pieces a sequence.

    `numbers`, int64 [4]: the chunks [first, stop) of the first piece, and of the second; -1 where there is none.
    """

    lengths: Array
    chunk: Array
    numbers: Array


class Spanned(NamedTuple):
    """Tokens in one piece a sequence: the positions [first, stop)."""

    first: Array
    stop: Array


OwnedColumns = tuple[tuple[Array, ...], tuple[Array, ...], tuple[Array, ...], Array]


class Spans(NamedTuple):
    """Rows [start, start + count), none of them empty; their number, and whether they are one range of rows."""

    start: Array
    count: Array
    total: int
    contiguous: bool


class Borrowed(Spans):
    """Rows in arrays that will be written over: who keeps them makes a copy."""


class Owned:
    """The real tokens of one unit on one side, in one or two pieces a sequence.

    Piece p has the positions [first[p], stop[p]), `count[p]` of them (0 if there is none); `total` is the length of the
    token axis. Of two pieces the second is empty wherever the first is not full. The columns are made when somebody
    looks at them: most loops need `tokens` alone.
    """

    def __init__(self, tokens: Chunked | Spanned, columns: Callable[[Chunked | Spanned], OwnedColumns]) -> None:
        self.tokens = tokens
        self._columns = columns

    @cached_property
    def columns(self) -> OwnedColumns:
        """first, stop, count, total."""
        return self._columns(self.tokens)

    @cached_property
    def shifts(self) -> tuple[Array, ...]:
        """What is to be added to a position of each piece for its place on the token axis."""
        first, count = self.first, self.count
        return (-first[0], *(before - after for before, after in zip(count, first[1:], strict=False)))

    @property
    def pieces(self) -> int:
        """How many."""
        return 2 if isinstance(self.tokens, Chunked) and self.tokens.numbers[2] >= 0 else 1

    @property
    def first(self) -> tuple[Array, ...]:
        """The first position of each piece."""
        return self.columns[0]

    @property
    def stop(self) -> tuple[Array, ...]:
        """The position behind each piece."""
        return self.columns[1]

    @property
    def count(self) -> tuple[Array, ...]:
        """The number of tokens of each piece."""
        return self.columns[2]

    @property
    def total(self) -> Array:
        """The length of the token axis."""
        return self.columns[3]


class Range(NamedTuple):
    """[start, start + count) of a token axis, or of positions: one range a sequence."""

    start: Array
    count: Array


class Band(NamedTuple):
    """Query i sees key j of its sequence if lo <= j - i <= hi; on a side that is unbounded, `lo` and `hi` are beyond
    all positions. `shift` is the diagonal of the last query and the last key.
    """

    lo: Array
    hi: Array
    shift: Array


class Slot(NamedTuple):
    """One tile a sequence, on the token axes of queries and keys: `rows` queries from `q`, `columns` keys from `k`;
    all zero where a sequence has none. `piece` numbers the queries' piece. For tiles with windows of their own, `left`
    and `right` have them, -1 where unbounded.
    """

    q: Array
    rows: Array
    k: Array
    columns: Array
    piece: int = 0
    left: Array | None = None
    right: Array | None = None

    def only(self, where: Array) -> Slot:
        """The tiles of some sequences."""
        q, rows, k, columns = (x * where for x in (self.q, self.rows, self.k, self.columns))
        return self._replace(q=q, rows=rows, k=k, columns=columns)


class Cut(NamedTuple):
    """A rectangle's tiles, by kind; None where no sequence has one."""

    natural: Slot | None = None
    right: Slot | None = None
    full: Slot | None = None
    left: Slot | None = None
    own: Slot | None = None


class Arrived(NamedTuple):
    """What has arrived of one piece of a peer's keys: its part of a range of their token axis. A token's row is the
    token + `anchor` + `base`. `numbers` are those of the sequences, None where they count up.
    """

    tokens: Range
    keys: Owned
    piece: int
    anchor: Array
    base: int
    numbers: Array | None


class Pieces(NamedTuple):
    """Pieces of keys by sequence: how many there are up to the end of each sequence; and of each piece [n, 3] the
    positions [first, stop), and what is to be added to a position for its row.
    """

    ends: Array
    pieces: Array
