"""Rows of a packed buffer, as a slice where they are contiguous (no copy) and as an index on the device where they
are not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from cp_ref.spec import Fragment, Piece

__all__ = ["Frame", "Rows", "Span", "rows_of", "take"]

Rows = slice | torch.Tensor


class Span(NamedTuple):
    """Rows [start, stop) of a buffer."""

    start: int
    stop: int


class Frame:
    """Which row of a buffer holds which position of which sequence.

    >>> frame = Frame.of_pieces([Piece(0, 4, 8), Piece(2, 0, 3)])     # rows 0:4 and 4:7
    >>> frame.size, frame.spans(Piece(0, 5, 8)), frame.pieces(Span(2, 5))
    (7, [Span(start=1, stop=4)], [Piece(seq=0, start=6, stop=8, heads=None), Piece(seq=2, start=0, stop=1, heads=None)])
    """

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        """The fragments in the order of their rows, which leave no gap."""
        self.fragments = list(fragments)
        self._starts = [f.row for f in self.fragments]
        self._by_sequence: dict[int, list[Fragment]] = {}
        for f in self.fragments:
            self._by_sequence.setdefault(f.seq, []).append(f)

    @staticmethod
    def of_pieces(pieces: Iterable[Piece]) -> Frame:
        """The buffer that holds a message: its pieces one after the other."""
        fragments, row = [], 0
        for p in pieces:
            fragments.append(Fragment(p.seq, p.start, p.stop, row))
            row += p.stop - p.start
        return Frame(fragments)

    @property
    def size(self) -> int:
        """How many rows there are."""
        return self.fragments[-1].row + self.fragments[-1].stop - self.fragments[-1].start if self.fragments else 0

    def holds(self, piece: Piece) -> bool:
        """Whether the first position of the piece is here."""
        return any(f.start <= piece.start < f.stop for f in self._by_sequence.get(piece.seq, ()))

    def spans(self, piece: Piece) -> list[Span]:
        """The rows of a piece that is here, in the order of its positions."""
        found = []
        for f in sorted(self._by_sequence.get(piece.seq, []), key=lambda f: f.start):
            low, high = max(f.start, piece.start), min(f.stop, piece.stop)
            if low < high:
                found.append(Span(f.row + low - f.start, f.row + high - f.start))
        assert sum(s.stop - s.start for s in found) == piece.stop - piece.start, f"{piece} is not all in this buffer"
        return found

    def pieces(self, span: Span) -> list[Piece]:
        """The positions that some rows hold, in row order."""
        found = []
        for f in self.fragments[max(bisect_right(self._starts, span.start) - 1, 0) :]:
            if f.row >= span.stop:
                break
            low, high = max(f.row, span.start), min(f.row + f.stop - f.start, span.stop)
            if low < high:
                found.append(Piece(f.seq, f.start + low - f.row, f.start + high - f.row))
        return found


def rows_of(spans: Iterable[Span], device: torch.device) -> Rows:
    """The spans one after the other: a slice if they continue each other, else int64 rows on the device."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        elif span.start < span.stop:
            joined.append(span)
    if not joined:
        return slice(0, 0)
    if len(joined) == 1:
        return slice(*joined[0])
    return torch.from_numpy(np.concatenate([np.arange(*span) for span in joined])).to(device)


def take(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """x's rows: a view for a slice, a copy for an index."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
