"""What planning spends its time on: loops over the sequences of a batch, each of them one method.

A planner is steps, messages and launches in Python, and in between a few dozen of these a step. Columns have one number
a sequence, int32 or int64, the same for all of a call; ranges, slots and bands are those of `columns`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from cp_fast.planning.columns import (
    Array,
    Arrived,
    Band,
    Chunked,
    Cut,
    Owned,
    OwnedColumns,
    Pieces,
    Range,
    Slot,
    Spanned,
    Spans,
)

__all__ = ["Loops", "Ring", "RingStep", "Sight", "Tiles"]


class Tiles(NamedTuple):
    """Tiles on rows: of the queries, of the keys, of the gradients (None for the rows of the keys); and the cumulative
    lengths of their rows and columns, int32 [n + 1].
    """

    q: Spans
    kv: Spans
    grad: Spans | None
    cu_q: Array
    cu_kv: Array


class Sight(Enum):
    """What a piece of queries sees of a unit's keys in every sequence."""

    ALL = -1
    WINDOW = -2  # what its window has of them
    NOTHING = -3


class Ring(NamedTuple):
    """What a ring of `count` units is about, seen from one of them.

    Attributes:
        unit: its number.
        tokens: the keys of every unit, `Chunked` tokens of one problem, which are its queries too.
        hi: how far behind a query it sees keys; None without a bound. Ahead of it there is none.
        pieces: of every step's tile, the piece of the queries and of the keys, or all (None); None for no tile.
        q_anchor, own_anchor: what is added to a token for its row, of the queries and of the own keys.
    """

    unit: int
    tokens: Sequence[Owned]
    hi: int | None
    pieces: Sequence[tuple[int | None, int | None] | None]
    q_anchor: Array
    own_anchor: Array


class RingStep(NamedTuple):
    """What a step of a ring comes to.

    Attributes:
        size, grad_size: rows of the block in hand, and of the buffer of its gradients.
        tiles: the tiles.
        sent: rows of the block that go on; None in the last step.
        got: rows of the gradients that come; None in the first two steps.
    """

    size: int
    grad_size: int
    tiles: Tiles
    sent: Spans | None
    got: Spans | None


class Loops(ABC):
    """The loops. None of them writes to what it is given."""

    name: str

    # ---- which tokens a unit has, and which of them are seen

    def owned(self, tokens: Chunked | Spanned) -> Owned:
        """These tokens, whose columns are made when somebody looks at them."""
        return Owned(tokens, self.columns)

    def columns(self, tokens: Chunked | Spanned) -> OwnedColumns:
        """First and stop positions and numbers of tokens of each piece, and the length of the token axis."""
        if isinstance(tokens, Chunked):
            return self.chunked(tokens)
        count = tokens.stop - tokens.first
        return (tokens.first,), (tokens.stop,), (count,), count

    @abstractmethod
    def chunked(self, tokens: Chunked) -> OwnedColumns:
        """The same, of chunks."""

    @abstractmethod
    def ends(self, owned: Owned, far: int) -> Array:
        """The position behind the last token; -far without one."""

    @abstractmethod
    def below(self, owned: Owned, position: Array) -> Array:
        """How many of the tokens lie before a position: where it falls on the token axis."""

    @abstractmethod
    def seen(self, queries: Owned, how: Sequence[int | Sight], band: Band, keys: Owned) -> tuple[Range, ...]:
        """What each piece of the queries sees of the keys, without what the piece before it sees; nothing where it has
        no query. `how`: one piece of the keys, by its number, or as `Sight` says.
        """

    @abstractmethod
    def packed(self, ranges: tuple[Range, ...]) -> tuple[tuple[Array, ...], int]:
        """The buffer that holds one or two ranges a sequence, sequence after sequence: what is to be added to a token
        of each range for its row, and the number of rows.
        """

    def ring(self, ring: Ring) -> Iterator[RingStep] | None:
        """The steps of a ring in which no tile is cut; None where loops have nothing for it. What a step has is written
        over by the next one.
        """
        return None

    # ---- tiles

    @abstractmethod
    def plain(self, queries: Owned, piece: int | None, keys: Owned, other: int | None) -> Slot:
        """One tile a sequence: a piece of the queries, or all of them (None), and a piece of the keys, or all."""

    @abstractmethod
    def cut(
        self, q: Range, k: Range, band: Band, bounded: bool, large: int, offsets: tuple[Array, Array], piece: int
    ) -> Cut:
        """The tiles of rectangles of positions (see `tiles`). `bounded`: the band has an edge; `large`: the rows from
        which a tile that would be cut keeps a window of its own; `offsets`: token - position, of queries and keys.
        """

    @abstractmethod
    def meet(self, one: Slot, other: Slot) -> bool:
        """Whether any sequence has a query row or a key row in both."""

    @abstractmethod
    def tiles(
        self, slots: Sequence[Slot], q_anchor: Array, k_anchors: Sequence[Array], grad_anchors: Sequence[Array] | None
    ) -> Tiles:
        """All tiles, those of the first sequence first; rows by what is added to tokens, for each slot."""

    # ---- spans of rows

    @abstractmethod
    def spans(self, start: Array, count: Array) -> Spans:
        """Those that are not empty."""

    @abstractmethod
    def tokens(self, ranges: tuple[Range, ...]) -> tuple[int, int]:
        """How many of these ranges are not empty, over all sequences, and how many tokens they have."""

    @abstractmethod
    def rows(self, ranges: tuple[Range, ...], anchor: Array, number: int, total: int) -> Spans:
        """The ranges that are not empty as rows, all of the first sequence and then of the next: `number` of them, with
        `total` tokens. `anchor` is what is added to a token for its row.
        """

    @abstractmethod
    def cumulative(self, count: Array) -> Array:
        """The cumulative sum from 0, int32 [n + 1]."""

    @abstractmethod
    def longest(self, cumulative: Array) -> int:
        """The largest difference of neighbours, of int32; 0 without any."""

    def copied(self, x: Array) -> Array:
        """A copy for as long as the plan is made."""
        return x.copy()

    @abstractmethod
    def same(self, one: Array, other: Array) -> bool:
        """Whether two arrays of one length are equal."""

    @abstractmethod
    def exchanged(
        self, owned: Owned, shares: Sequence[Owned], positions: tuple[Array, Array], row: Array
    ) -> tuple[Spans, list[int]]:
        """The rows of every rank's share of a unit's tokens that take part, rank by rank and sequence by sequence; and
        their number for each rank.

        Args:
            owned: the unit's tokens.
            shares: the positions of each rank.
            positions: those [start, stop) that take part.
            row: what is added to a token for its row.
        """

    # ---- keys that were gathered

    @abstractmethod
    def pieces(self, arrived: Sequence[Arrived], size: int, ends: Array | None) -> Pieces:
        """All that has arrived by sequence, in the order given; `size` sequences. `ends`: those of another order."""

    @abstractmethod
    def gathered(self, slots: Sequence[Slot], q_anchor: Array, pieces: Pieces) -> Tiles:
        """Tiles whose keys are the positions [k, k + columns) of a sequence, wherever their rows are; those of the
        first sequence first.
        """

    @abstractmethod
    def gathered_whole(
        self, rows: Array, keys: Sequence[tuple[Owned, int]], anchors: Sequence[Array], bases: Sequence[int]
    ) -> tuple[Array, Spans]:
        """Tiles that see every one of many pieces of keys in full: their columns; and the rows of the pieces, for tiles
        with `rows` above zero, one tile after the other.

        Args:
            rows: of the tiles, one a sequence.
            keys: pieces of `Chunked` tokens of one problem, by their number in these.
            anchors, bases: together what is added to a token of each piece for its row.
        """
