"""The loops as operations on whole arrays, where there is no compiler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    Spans,
    by_sequence,
)
from cp_fast.planning.loops.base import Loops, Sight, Tiles

__all__ = ["ByNumpy"]


class ByNumpy(Loops):
    """A few operations each. `.take` is faster than brackets, and fresh memory costs more than arithmetic."""

    name = "numpy"

    def chunked(self, tokens: Chunked) -> OwnedColumns:
        (a, b, c, d), chunk = tokens.numbers.tolist(), tokens.chunk
        edges = [(a, b), (c, d)] if c >= 0 else [(a, b)]
        first = tuple(chunk * start for start, _ in edges)
        stop = tuple(
            np.maximum(np.minimum(chunk * end, tokens.lengths), start)
            for start, (_, end) in zip(first, edges, strict=True)
        )
        count = tuple(b - a for a, b in zip(first, stop, strict=True))
        return first, stop, count, count[0] if len(count) == 1 else count[0] + count[1]

    def ends(self, owned: Owned, far: int) -> Array:
        found: Array | int = -far
        for count, stop in zip(owned.count, owned.stop, strict=True):
            found = np.where(count > 0, stop, found)
        assert isinstance(found, np.ndarray)
        return found

    def below(self, owned: Owned, position: Array) -> Array:
        found = _clipped(position, owned.first[0], owned.stop[0])
        for first, stop in zip(owned.first[1:], owned.stop[1:], strict=True):
            found += _clipped(position, first, stop)
        return found

    def seen(self, queries: Owned, how: Sequence[int | Sight], band: Band, keys: Owned) -> tuple[Range, ...]:
        nothing = np.zeros_like(band.lo)
        ranges: list[Range] = []
        for piece, sight in enumerate(how):
            there = queries.count[piece] > 0
            if sight is Sight.NOTHING:
                start, count = nothing, nothing
            elif sight is Sight.WINDOW:
                start = self.below(keys, queries.first[piece] + band.lo)
                count = self.below(keys, queries.stop[piece] + band.hi) - start
            else:
                start, count = _part(keys, None if isinstance(sight, Sight) else sight)
            start, count = np.where(there, start, 0), np.where(there, count, 0)
            if ranges and sight is not Sight.NOTHING:
                before = ranges[0].start + ranges[0].count
                begin = np.maximum(start, before)
                start, count = begin, np.maximum(start + count - begin, 0)
            ranges.append(Range(start, count))
        return tuple(ranges)

    def packed(self, ranges: tuple[Range, ...]) -> tuple[tuple[Array, ...], int]:
        total = ranges[0].count
        for r in ranges[1:]:
            total = total + r.count
        ends = np.cumsum(total, dtype=total.dtype)
        row, anchors = ends - total, []
        for r in ranges:
            anchors.append(row - r.start)
            row = row + r.count
        return tuple(anchors), int(ends[-1]) if len(ends) else 0

    def plain(self, queries: Owned, piece: int | None, keys: Owned, other: int | None) -> Slot:
        q, rows = _part(queries, piece)
        k, columns = _part(keys, other)
        there = (rows > 0) & (columns > 0)
        return Slot(q * there, rows * there, k * there, columns * there, piece or 0)

    def cut(
        self, q: Range, k: Range, band: Band, bounded: bool, large: int, offsets: tuple[Array, Array], piece: int
    ) -> Cut:
        (q0, rows), (k0, columns), (lo, hi, shift) = q, k, band
        q1, k1 = q0 + rows, k0 + columns
        row0, row1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
        begin, end = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
        there = (q0 < q1) & (k0 < k1) & (row0 < row1) & (begin < end)
        if not there.any():
            return Cut()
        cut_right = there & (end - 1 - row0 > hi)
        cut_left = there & (begin - (row1 - 1) < lo)
        natural = there & (end - row1 == shift) & bounded
        rest = there & ~natural

        split = np.where(cut_right, end - hi, row0)  # rows from here on see every key on the right
        below = rest & (split < row1)
        start = np.maximum(begin, split + lo)
        edge = np.where(start - (row1 - 1) < lo, row1 + lo, start)
        has_right, has_left, has_full = rest & cut_right, below & (start < edge), below & (edge < end)
        several = (has_right.astype(np.int8) + has_left + has_full > 1) & (row1 - row0 >= large)

        def slot(where: Array, a: Array, b: Array, c: Array, d: Array) -> Slot | None:
            if not where.any():
                return None
            return Slot(a + offsets[0], b - a, c + offsets[1], d - c, piece).only(where)

        own = slot(several, row0, row1, begin, end)
        if own is not None:
            left, right = np.where(cut_left, end - row1 - lo, -1), np.where(cut_right, hi + row1 - end, -1)
            own = own._replace(left=left, right=right)
        return Cut(
            natural=slot(natural, row0, row1, begin, end),
            right=slot(has_right & ~several, row0, split, begin, end),
            full=slot(has_full & ~several, split, row1, edge, end),
            left=slot(has_left & ~several, split, row1, start, edge),
            own=own,
        )

    def meet(self, one: Slot, other: Slot) -> bool:
        in_q = (one.q < other.q + other.rows) & (other.q < one.q + one.rows)
        in_k = (one.k < other.k + other.columns) & (other.k < one.k + one.columns)
        return bool((in_q | in_k).any())

    def tiles(
        self, slots: Sequence[Slot], q_anchor: Array, k_anchors: Sequence[Array], grad_anchors: Sequence[Array] | None
    ) -> Tiles:
        q, rows, columns = (
            by_sequence(x) for x in zip(*((s.q + q_anchor, s.rows, s.columns) for s in slots), strict=True)
        )
        k = by_sequence([s.k + anchor for s, anchor in zip(slots, k_anchors, strict=True)])
        grad = None
        if grad_anchors is not None:
            grad = by_sequence([s.k + anchor for s, anchor in zip(slots, grad_anchors, strict=True)])
        if not rows.all():
            there = np.flatnonzero(rows > 0)
            q, rows, k, columns = (x.take(there) for x in (q, rows, k, columns))
            grad = grad if grad is None else grad.take(there)
        of_grads = None if grad is None else self.spans(grad, columns)
        sums = (self.cumulative(rows), self.cumulative(columns))
        return Tiles(self.spans(q, rows), self.spans(k, columns), of_grads, *sums)

    def spans(self, start: Array, count: Array) -> Spans:
        if not count.all():
            there = np.flatnonzero(count > 0)
            start, count = start.take(there), count.take(there)
        total = int(count.sum(dtype=count.dtype))
        if not len(count) or int(start[-1]) + int(count[-1]) - int(start[0]) != total:
            return Spans(start, count, total, not len(count))
        return Spans(start, count, total, bool((start[1:] == start[:-1] + count[:-1]).all()))

    def tokens(self, ranges: tuple[Range, ...]) -> tuple[int, int]:
        number = sum(int(np.count_nonzero(r.count)) for r in ranges)
        return number, sum(int(r.count.sum(dtype=r.count.dtype)) for r in ranges)

    def rows(self, ranges: tuple[Range, ...], anchor: Array, number: int, total: int) -> Spans:
        return self.spans(by_sequence([r.start + anchor for r in ranges]), by_sequence([r.count for r in ranges]))

    def cumulative(self, count: Array) -> Array:
        found = np.empty(len(count) + 1, dtype=np.int32)
        found[0] = 0
        np.cumsum(count, out=found[1:])
        return found

    def longest(self, cumulative: Array) -> int:
        return int((cumulative[1:] - cumulative[:-1]).max(initial=0))

    def same(self, one: Array, other: Array) -> bool:
        return bool((one == other).all())

    def exchanged(
        self, owned: Owned, shares: Sequence[Owned], positions: tuple[Array, Array], row: Array
    ) -> tuple[Spans, list[int]]:
        shape = (len(shares), len(row), shares[0].pieces)
        rows, counts = (np.empty(shape, dtype=row.dtype) for _ in range(2))  # written once
        for n, share in enumerate(shares):
            for piece in range(share.pieces):
                taken = np.maximum(share.first[piece], positions[0])
                np.add(self.below(owned, taken), row, out=rows[n, :, piece])
                np.subtract(np.minimum(share.stop[piece], positions[1]), taken, out=counts[n, :, piece])
        np.maximum(counts, 0, out=counts)
        sizes = counts.sum(axis=(1, 2)).tolist()
        return self.spans(rows.ravel(), counts.ravel()), sizes

    def pieces(self, arrived: Sequence[Arrived], size: int, ends: Array | None) -> Pieces:
        small = np.uint16 if size < 2**16 else np.int64  # sorts fast
        seqs: list[Array] = []
        found: list[Array] = []
        for tokens, keys, piece, anchor, base, numbers in arrived:
            offset, count = _part(keys, piece)
            begin = np.maximum(tokens.start, offset)
            length = np.minimum(tokens.start + tokens.count, offset + count) - begin
            there = np.flatnonzero(length > 0)
            seqs.append((there if numbers is None else numbers.take(there)).astype(small))
            first = (begin + keys.first[piece] - offset).take(there)
            row = (begin + anchor + base).take(there)
            found.append(np.stack([first, first + length.take(there), row - first], axis=1))
        seq = np.concatenate(seqs)
        order = np.argsort(seq, kind="stable")
        ends = np.cumsum(np.bincount(seq, minlength=size)) if ends is None else ends
        return Pieces(ends, np.concatenate(found).take(order, axis=0))

    def gathered(self, slots: Sequence[Slot], q_anchor: Array, pieces: Pieces) -> Tiles:
        q, rows, begin, columns = (
            by_sequence(x) for x in zip(*((s.q + q_anchor, s.rows, s.k, s.columns) for s in slots), strict=True)
        )
        there = np.flatnonzero(rows > 0)
        q, rows, begin, end = (x.take(there) for x in (q, rows, begin, begin + columns))
        seq = there // len(slots)
        number = np.diff(pieces.ends, prepend=0).take(seq)  # pieces of each tile's sequence
        behind = np.cumsum(number)
        piece = np.repeat(pieces.ends.take(seq) - behind, number)
        piece += np.arange(behind[-1])
        first, stop, anchor = pieces.pieces.T
        start = first.take(piece)
        np.maximum(start, np.repeat(begin, number), out=start)
        length = stop.take(piece)
        np.minimum(length, np.repeat(end, number), out=length)
        length -= start
        np.maximum(length, 0, out=length)
        total = np.add.reduceat(length, behind - number)
        there = np.flatnonzero(length > 0)
        kv = self.spans(anchor.take(piece.take(there)) + start.take(there), length.take(there))
        return Tiles(self.spans(q, rows), kv, None, self.cumulative(rows), self.cumulative(total))

    def gathered_whole(
        self, rows: Array, keys: Sequence[tuple[Owned, int]], anchors: Sequence[Array], bases: Sequence[int]
    ) -> tuple[Array, Spans]:
        counts = np.array([owned.count[piece] for owned, piece in keys])
        starts = np.empty_like(counts)
        for start, (owned, piece), anchor, base in zip(starts, keys, anchors, bases, strict=True):
            np.add(anchor, owned.count[0] if piece else 0, out=start)
            start += base
        columns = counts.sum(axis=0, dtype=rows.dtype)
        there = rows > 0
        if not there.all():
            starts, counts = starts[:, there], counts[:, there]
        return columns, self.spans(starts.T.ravel(), counts.T.ravel())  # sequence after sequence


def _part(owned: Owned, piece: int | None) -> tuple[Array, Array]:
    """Where a piece begins on the token axis, and how long it is; the whole of it for None."""
    if piece is None:
        return np.zeros_like(owned.total), owned.total
    return owned.count[0] if piece else np.zeros_like(owned.total), owned.count[piece]


def _clipped(position: Array, first: Array, stop: Array) -> Array:
    """How many of the positions from `first` to `stop` lie before this one."""
    found = np.maximum(position, first)
    np.minimum(found, stop, out=found)
    return np.subtract(found, first, out=found)
