"""The layout "balanced": all ranks hold equally many rows, compute equally many visible pairs, and send little.

Ranks are filled one after the other. A rank has room for its share of the rows, and needs its share of the pairs.
Documents are sorted by their pairs per row (under a causal mask: by their lengths). A rank takes from the whole line:

    light                                     dense
    [1][2][ 3 ][ 4  ][  5  ][   6    ][         7       ]
    3  3  3                     1              [222222]

1. Whole documents, the densest first. It stops when its other rows, filled with the lightest documents, would see more
   pairs than it needs.
2. The late rows of a denser document, until the rank's need is met.
3. The lightest documents, until the rows are full; of the last one its early rows.

More rows from 2 and fewer from 3 give more pairs, so some number of rows meets the need to within a row. A whole
document needs no message; late rows receive the document's rows before them, early rows receive none. The rest of a cut
document is a document for the next ranks. The last rank gets all the rest, which is its share.

The method is greedy: equal rows and equal pairs at once is bin packing in two dimensions. Two steps improve the result.
Where 1 can continue or stop, or 2 can cut one document or another, the choice that receives the fewest rows is taken.
At the end, the ranks with the most and the fewest pairs redistribute theirs by 2 and 3 until all ranks are level. A
single document is cut into late and early rows for every rank, which is dual_chunk. Equal parts of the buffer
("contiguous") are used where they are no worse: for documents of equal lengths, and for masks under which all rows see
equally many keys.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from cp_ref.schedules.areas import Areas, crop
from cp_ref.schedules.ownership import Fragments, contiguous
from cp_ref.schedules.table import Column

__all__ = [
    "balanced",
    "pairs_before",
]

_CLOSE = 0.004  # A fraction of a rank's need: a document is cut only if more pairs than this are missing.
_LEVEL = 0.01  # A fraction of a rank's need: ranks that differ by no more from it are level.
_TILE = 128  # Cuts are at multiples of this where ranks stay level. A constant of the rule, as kernels have such tiles.
_CHOICES = 4  # Documents tried for the cut, at each of the last few numbers of whole documents; more gain little.

RankSpans = list[tuple[int, int]]  # the rows of one rank


class Part(NamedTuple):
    """Rows [start, stop) of one document that no rank has yet; sorted by pairs per row."""

    density: float
    start: int
    stop: int
    pairs: int

    @property
    def span(self) -> tuple[int, int]:
        """The rows."""
        return self.start, self.stop

    @property
    def rows(self) -> int:
        """Their number."""
        return self.stop - self.start


def balanced(starts: Column, tokens: Column, areas: Areas, cp_size: int) -> Fragments:
    """The rows of each rank: equally many rows and equally many visible pairs on all ranks.

    Args:
        starts: where each sequence begins in the global buffer, and where the last ends, [b + 1].
        tokens: how many rows of each are its document, [b]; those behind them are padding.
        areas: who may see whom.

    >>> starts, tokens = np.array([0, 6, 8, 10, 12]), np.array([6, 2, 2, 2])
    >>> causal = Areas.of_rows([(a, b, a, b, -(2**40), 0) for a, b in ((0, 6), (6, 8), (8, 10), (10, 12))])
    >>> list(balanced(starts, tokens, causal, 2).rows())  # rank 0 sees 6 + 3 + 3 + 1 of the 30 pairs, rank 1 the rest
    [(0, 5, 11, 0), (1, 0, 5, 0), (1, 11, 12, 5)]
    """
    even = contiguous(starts[[0, -1]], cp_size)
    if cp_size == 1 or not len(even):
        return even
    solver = _Solver(pairs_before(areas, int(starts[-1])), cp_size)
    found = solver.level(solver.fill(solver.parts(starts, tokens)))
    as_spans = [list(zip(own.start.tolist(), own.stop.tolist(), strict=True)) for own in map(even.of, range(cp_size))]
    return even if solver.most_pairs(as_spans) <= solver.most_pairs(found) else _fragments(found)


def pairs_before(areas: Areas, rows: int) -> Column:
    """How many pairs the rows before each row of the buffer see, [rows + 1].

    >>> pairs_before(Areas.parse("area q[0:3] k[0:3] band *:0"), 4).tolist()
    [0, 1, 3, 6, 6]
    """
    areas = areas.take(areas.pairs > 0)
    q0, q1, k0, k1 = crop(*areas.columns)
    # Row i sees keys from max(k0, i + lo) to min(k1, i + hi + 1); each bound changes once from one term to the other.
    last, first = np.clip(k1 - areas.hi - 1, q0, q1), np.clip(k0 - areas.lo, q0, q1)
    terms = [  # of rows [start, stop): constant + slope * i
        (q0, last, areas.hi + 1, 1), (last, q1, k1, 0), (q0, first, -k0, 0), (first, q1, -areas.lo, -1),
    ]  # fmt: skip
    found = np.zeros(rows + 2, dtype=np.int64)  # from one row to the next: how the slope changes, then how a term does
    for start, stop, _, slope in terms:
        there = start < stop
        np.add.at(found, start[there] + 2, slope)
        np.add.at(found, stop[there] + 1, -slope)
    np.cumsum(found, out=found)
    for start, stop, constant, slope in terms:
        there = start < stop
        start, stop, constant = start[there], stop[there], constant[there]
        np.add.at(found, start + 1, constant + slope * start)
        np.add.at(found, stop + 1, -(constant + slope * (stop - 1)))
    np.cumsum(found, out=found)  # The pairs of each row, one place further back.
    return np.cumsum(found, out=found)[:-1]


def _fragments(ranks: list[RankSpans]) -> Fragments:
    """Every rank's spans as one table, each rank's in the order of the global buffer; spans that touch are one."""
    found: list[tuple[int, int, int, int]] = []
    for rank, spans in enumerate(ranks):
        row = 0
        for start, stop in sorted(spans):
            if found and found[-1][0] == rank and found[-1][2] == start:
                found[-1] = (rank, found[-1][1], stop, found[-1][3])
            else:
                found.append((rank, start, stop, row))
            row += stop - start
    return Fragments.of_rows(found)


class _Solver:
    """Shares rows out among ranks by the pairs that they see."""

    def __init__(self, before: Column, cp_size: int) -> None:
        self.before, self.total, self.cp_size = memoryview(before.data), int(before[-1]), cp_size  # is quick to index

    def pairs(self, start: int, stop: int) -> int:
        """The number of pairs that rows [start, stop) see."""
        return self.before[stop] - self.before[start]

    def most_pairs(self, ranks: list[RankSpans]) -> int:
        """The number of pairs of the rank with the most."""
        return max(sum(self.pairs(*span) for span in spans) for spans in ranks)

    def part(self, start: int, stop: int) -> Part:
        """Rows of one document."""
        pairs = self.pairs(start, stop)
        return Part(pairs / (stop - start), start, stop, pairs)

    def parts(self, starts: Column, tokens: Column) -> list[Part]:
        """The tokens of each document, and its padding, which sees nothing; the lightest first."""
        real = (starts[:-1] + tokens).tolist()
        spans = [*zip(starts[:-1].tolist(), real, strict=True), *zip(real, starts[1:].tolist(), strict=True)]
        return sorted(self.part(start, stop) for start, stop in spans if start < stop)

    def fill(self, parts: list[Part]) -> list[RankSpans]:
        """The spans of every rank, one rank after the other."""
        rows, pairs = sum(part.rows for part in parts), self.total
        ranks: list[RankSpans] = []
        for left in range(self.cp_size, 0, -1):
            room = -(-rows // left)
            spans, parts = self.fill_rank(parts, room, pairs / left)
            ranks.append(spans)
            rows, pairs = rows - room, pairs - sum(self.pairs(*span) for span in spans)
        return ranks

    def fill_rank(self, parts: list[Part], room: int, need: float) -> tuple[RankSpans, list[Part]]:
        """The spans that one rank takes of the parts, and the remaining parts."""
        line, missing = _Line(self, parts), need * _CLOSE
        whole: list[int] = []  # numbers of parts that are taken
        choices: list[_Choice] = []
        end, cut = len(parts), -1  # All from number `end` on are taken or do not fit.

        def fits(n: int) -> bool:
            rest = room - parts[n].rows
            return rest >= 0 and parts[n].pairs + line.first(rest) <= need

        while room and need - line.first(room) > missing:  # The lightest alone see too little.
            if end and fits(end - 1):
                n = end - 1
            else:  # The densest part that does not fit now never will: it is cut first.
                n = bisect_right(range(end), False, key=lambda n: not fits(n)) - 1 if whole else -1
            first = n + 1 if whole or n >= 0 else end - 1
            choices.append(_Choice(len(whole), room, need, range(first, min(first + _CHOICES, end))))
            if n < 0 or parts[n].density * room < need:  # All that fit from here on are too light.
                count, cut = self.best_cut(parts, line, choices[-_CHOICES:], missing)
                room, need = choices[count].room, choices[count].need
                del whole[count:]
                break
            whole.append(n)
            room, need, end = room - parts[n].rows, need - parts[n].pairs, n
        taken = {*whole, cut}
        others = [part for n, part in enumerate(parts) if n not in taken]
        spans: RankSpans = [parts[n].span for n in whole]
        more, left = _Line(self, others if cut < 0 else [*others, parts[cut]]).ends(room, need if cut >= 0 else 0)
        return spans + more, left

    def best_cut(self, parts: list[Part], line: _Line, choices: list[_Choice], missing: float) -> tuple[int, int]:
        """How many whole parts to take, and the number of the part to cut after them. Of the choices that meet the
        need, the one with the fewest rows before the cut: the late rows receive these.
        """
        found: list[tuple[float, int, int, int]] = []
        for count, room, need, candidates in choices:
            for n in candidates:
                part = parts[n]

                def pairs(late: int, part: Part = part, room: int = room) -> int:
                    return self.pairs(part.stop - late, part.stop) + line.first(room - late)

                late = bisect_right(range(min(part.rows, room) + 1), need, key=pairs) - 1
                if late > 0:
                    short = need - pairs(late)
                    found.append((short if short > missing else 0, part.rows - late, count, n))
        return min(found)[2:] if found else (choices[-1].whole, -1)

    def level(self, ranks: list[RankSpans]) -> list[RankSpans]:
        """The ranks with the most and the fewest pairs redistribute theirs, until none has much more than the mean."""
        pairs = [sum(self.pairs(*span) for span in spans) for spans in ranks]
        for _ in range(2 * self.cp_size):
            most, fewest = pairs.index(max(pairs)), pairs.index(min(pairs))
            if pairs[most] * self.cp_size <= self.total * (1 + _LEVEL):
                break
            both = pairs[most] + pairs[fewest]
            line = _Line(self, sorted(self.part(*span) for span in ranks[most] + ranks[fewest]))
            ranks[most], left = line.ends(sum(stop - start for start, stop in ranks[most]), both / 2)
            ranks[fewest] = [part.span for part in left]
            pairs[most] = sum(self.pairs(*span) for span in ranks[most])
            pairs[fewest] = both - pairs[most]
        return ranks


class _Choice(NamedTuple):
    """A rank after `whole` whole documents: the room and the need that remain, and the documents that could be cut."""

    whole: int
    room: int
    need: float
    candidates: range


class _Line:
    """Parts concatenated to one line of rows."""

    def __init__(self, solver: _Solver, parts: list[Part]) -> None:
        self.solver, self.parts = solver, parts
        self.rows = list(accumulate((part.rows for part in parts), initial=0))
        self.pairs = list(accumulate((part.pairs for part in parts), initial=0))

    def first(self, rows: int) -> int:
        """The number of pairs that the first rows of the line see."""
        n = bisect_right(self.rows, rows) - 1
        if n >= len(self.parts):
            return self.pairs[-1]
        start = self.parts[n].start
        return self.pairs[n] + self.solver.pairs(start, start + rows - self.rows[n])

    def between(self, first: int, last: int) -> list[Part]:
        """Rows first ... last - 1 of the line: its parts, of which two at most are cut."""
        found: list[Part] = []
        for n in range(max(bisect_right(self.rows, first) - 1, 0), len(self.parts)):
            if self.rows[n] >= last:
                break
            part, shift = self.parts[n], self.parts[n].start - self.rows[n]
            start, stop = max(first + shift, part.start), min(last + shift, part.stop)
            if start < stop:
                found.append(part if (start, stop) == part.span else self.solver.part(start, stop))
        return found

    def ends(self, room: int, need: float) -> tuple[RankSpans, list[Part]]:
        """`room` rows from both ends of the line that see `need` pairs, and the remaining parts."""
        total, all_rows = self.pairs[-1], self.rows[-1]

        def pairs(last: int) -> int:
            return total - self.first(all_rows - last) + self.first(room - last)

        last = max(bisect_right(range(room + 1), need, key=pairs) - 1, 0)
        whole = min((last + _TILE // 2) // _TILE * _TILE, room)
        if abs(pairs(whole) - need) <= _LEVEL * need:
            last = whole
        taken = self.between(0, room - last) + self.between(all_rows - last, all_rows)
        return [part.span for part in taken], sorted(self.between(room - last, all_rows - last))
