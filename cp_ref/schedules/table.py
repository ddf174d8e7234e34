"""Tables of integers: columns of equal length, one entry a row. Areas, ownership and schedules are made of these. And
`Spans`, the rows of a buffer as intervals, with what is done with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from typing import Any, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Column",
    "Spans",
    "Table",
    "constant",
    "in_blocks",
    "one_value",
    "ordered_by",
    "ranges",
    "runs",
    "starts_of",
]

Column = NDArray[Any]  # [n], signed integers of 32 or 64 bits


@dataclass(frozen=True, eq=False)
class Table:
    """The base of all tables: a dataclass whose fields are columns. Tables are not changed once they are made.

    >>> @dataclass(frozen=True, eq=False)
    ... class Points(Table):
    ...     x: Column
    ...     y: Column
    >>> points = Points.of_rows([(0, 4), (6, 9)])
    >>> len(points), points.y.tolist(), list(points.take(points.x > 0).rows()), points == points.take(slice(None))
    (2, [4, 9], [(6, 9)], True)
    """

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[int]]) -> Self:
        """A table from its rows, each with a number for every column; int64."""
        names = [f.name for f in fields(cls)]
        values = np.array(list(rows), dtype=np.int64).reshape(-1, len(names))
        return cls(*(np.ascontiguousarray(values[:, n]) for n in range(len(names))))

    @classmethod
    def concat(cls, tables: Sequence[Self]) -> Self:
        """The rows of several tables, concatenated."""
        if len(tables) == 1:
            return tables[0]
        columns = zip(*(table.columns for table in tables), strict=True)
        return cls(*map(np.concatenate, columns)) if tables else cls.of_rows([])

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns, in the order of the fields."""
        return tuple(vars(self).values())

    def __len__(self) -> int:
        return len(self.columns[0])

    def take(self, which: Column | slice) -> Self:
        """The rows at these indices, of this mask, or of this slice."""
        if isinstance(which, np.ndarray) and which.dtype == np.bool_:
            which = np.flatnonzero(which)
        return type(self)(*(column[which] for column in self.columns))

    def rows(self) -> Iterator[tuple[int, ...]]:
        """The rows as tuples of Python's integers."""
        return zip(*(column.tolist() for column in self.columns), strict=True)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(np.array_equal(a, b) for a, b in zip(self.columns, other.columns, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # columns are arrays


F = TypeVar("F", bound=Callable[..., tuple[Column, ...]])
_BLOCK = 2**14  # rows that are worked on at a time


def in_blocks(function: F) -> F:
    """A function from columns to columns, row by row, on blocks of rows whose columns stay in the processor's cache."""

    @wraps(function)
    def by_block(*columns: Column) -> tuple[Column, ...]:
        size = len(columns[0])
        if size <= _BLOCK:
            return function(*columns)
        found: tuple[Column, ...] = ()
        for here in (slice(n, n + _BLOCK) for n in range(0, size, _BLOCK)):
            block = function(*(x[here] for x in columns))
            found = found or tuple(np.empty(size, dtype=x.dtype) for x in block)
            for whole, part in zip(found, block, strict=True):
                whole[here] = part
        return found

    return cast(F, by_block)


def constant(value: int, like: Column) -> Column:
    """A column of the length of `like` with one value in all rows: the value is in memory once, and must not be written
    to.

    >>> constant(7, np.array([1, 2, 3])).tolist()
    [7, 7, 7]
    """
    return np.ndarray(like.shape, like.dtype, np.array(value, dtype=like.dtype), strides=(0,))


def one_value(column: Column) -> bool:
    """Whether all rows of a column have one value; of a `constant` one this is seen at once."""
    return column.strides == (0,) or bool((column == column[:1]).all())


def starts_of(sizes: Sequence[int] | Column) -> Column:
    """Where each part begins if parts of these sizes follow one another, and where the last one ends.

    >>> starts_of([4, 0, 3]).tolist()
    [0, 4, 4, 7]
    """
    return np.append(0, np.cumsum(np.array(sizes, dtype=np.int64)))


def ranges(first: Column, count: Column) -> Column:
    """The numbers first, first + 1, ... of every range, concatenated.

    >>> ranges(np.array([4, 9]), np.array([2, 3])).tolist()
    [4, 5, 9, 10, 11]
    """
    ends = np.cumsum(count, dtype=first.dtype)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(first - ends + count, count) + np.arange(total, dtype=first.dtype)


def runs(begins: Column, count: int) -> tuple[Column, Column]:
    """Where runs of a table's `count` rows begin, and how many rows each has. begins[n]: whether row n + 1 begins one.

    >>> [x.tolist() for x in runs(np.array([False, True, False]), 4)], [x.tolist() for x in runs(np.array([]), 0)]
    ([[0, 2], [2, 2]], [[], []])
    """
    inner = np.flatnonzero(begins)
    edges = np.empty(len(inner) + min(count, 1) + 1, dtype=np.int64)
    edges[0], edges[-1], edges[1:-1] = 0, count, inner + 1
    return edges[:-1], edges[1:] - edges[:-1]


def ordered_by(group: Column, count: int) -> tuple[Column | slice, list[int]]:
    """The order of rows by group 0, ..., count - 1, stable within a group; and the first place of each group in this
    order, with the end of the last.

    >>> order, ends = ordered_by(np.array([2, 0, 2]), 3)
    >>> order.tolist(), ends
    ([1, 0, 2], [0, 1, 1, 3])
    """
    ends = [0, *np.cumsum(np.bincount(group, minlength=count)).tolist()]
    if bool((group[1:] >= group[:-1]).all()):
        return slice(None), ends
    return np.argsort(group.astype(np.min_scalar_type(count)), kind="stable"), ends  # small numbers: sorts by counting


_SAMPLE = 1024  # spans


@dataclass(frozen=True, eq=False)
class Spans:
    """Rows [start, stop), span after span. They may have any order, and rows may repeat, unless a method says
    otherwise. They are not changed once they are made, and unpack as (start, stop).

    >>> spans = Spans(np.array([4, 0, 6]), np.array([8, 2, 9]))
    >>> len(spans), spans.size.tolist(), spans.total, spans.disjoint
    (3, [4, 2, 3], 9, False)
    """

    start: Column
    stop: Column

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[Column]:
        yield self.start
        yield self.stop

    @cached_property
    def size(self) -> Column:
        """The number of rows of each."""
        return self.stop - self.start

    @cached_property
    def total(self) -> int:
        """The number of rows of all."""
        return int(self.size.sum())

    @cached_property
    def begin(self) -> Column:
        """The first row of each if they are packed one after the other."""
        return np.cumsum(self.size) - self.size

    @property
    def disjoint(self) -> bool:
        """Whether no row repeats; none of the spans is empty. Where many rows repeat, a sample shows it."""
        start, stop, size = self.start, self.stop, len(self)
        if bool((start[1:] >= start[:-1]).all()):
            return bool((start[1:] >= stop[:-1]).all())
        for some in (_SAMPLE, size) if size > _SAMPLE else (size,):
            order = np.argsort(start[:some])
            if not bool((start[order[1:]] >= stop[order[:-1]]).all()):
                return False
        return True

    def cut(self, edges: Column) -> tuple[Column, Spans]:
        """Their rows, consecutively, cut into a part from each of these edges to the next, the last to the end: (number
        of the part, the spans of the parts). The first edge is 0, and edges rise.

        >>> part, spans = Spans(np.array([10, 20]), np.array([14, 22])).cut(np.array([0, 3]))
        >>> part.tolist(), *(x.tolist() for x in spans)
        ([0, 1, 1], [10, 13, 20], [13, 14, 22])
        """
        cuts = np.unique(np.concatenate([self.begin, edges]))
        span = np.searchsorted(self.begin, cuts, side="right") - 1
        start = self.start[span] + cuts - self.begin[span]
        stop = start + np.diff(np.append(cuts, self.total))
        return np.searchsorted(edges, cuts, side="right") - 1, Spans(start, stop)

    def merged(self) -> Spans:
        """The rows, each once, as few spans, sorted and disjoint: those that meet are one. None of the spans is empty.

        >>> [x.tolist() for x in Spans(np.array([4, 0, 6]), np.array([8, 2, 9])).merged()]
        [[0, 4], [2, 9]]
        """
        start, stop = self.start, self.stop
        if bool((start[1:] > stop[:-1]).all()):
            return self
        if not bool((start[1:] >= start[:-1]).all()):
            order = np.argsort(start, kind="stable")
            start, stop = start[order], stop[order]
        end = np.maximum.accumulate(stop)
        new = np.append(True, start[1:] > end[:-1])
        return Spans(start[new], end[np.append(new[1:], True)])

    def minus(self, others: Spans) -> Spans:
        """The rows that are not in `others`; both are sorted and disjoint.

        >>> [x.tolist() for x in Spans(np.array([0, 6]), np.array([4, 9])).minus(Spans(np.array([2]), np.array([7])))]
        [[0, 7], [2, 9]]
        >>> [x.tolist() for x in Spans(np.array([0]), np.array([4])).minus(Spans(np.array([0, 2]), np.array([2, 3])))]
        [[3], [4]]
        """
        far = np.array([2**60])
        begin, end = np.append(-far, others.stop), np.append(others.start, far)
        some = begin < end  # touching spans have no gap
        _, _, start, stop = self.overlaps(Spans(begin[some], end[some]))
        return Spans(start, stop)

    def meeting(self, others: Spans) -> tuple[Column, Column]:
        """All pairs (number of a span, number of one of the others) that have a row in common, by the span's number.

        `others` are sorted, disjoint and not empty; an empty span has nothing in common with any.

        >>> others = Spans(np.array([0, 3, 6]), np.array([2, 5, 9]))
        >>> [numbers.tolist() for numbers in Spans(np.array([0, 5]), np.array([4, 9])).meeting(others)]
        [[0, 0, 1], [0, 1, 2]]
        """
        first = np.searchsorted(others.stop, self.start, side="right")
        last = np.searchsorted(others.start, self.stop, side="left")
        count = np.where(self.start < self.stop, last - first, 0)
        np.maximum(count, 0, out=count)
        return np.repeat(np.arange(len(self)), count), ranges(first, count)

    def overlaps(self, others: Spans) -> tuple[Column, Column, Column, Column]:
        """The rows that spans share with others: (number of a span, number of one of the others, start, stop), as in
        `meeting`.

        >>> others = Spans(np.array([0, 3, 6]), np.array([2, 5, 9]))
        >>> [x.tolist() for x in Spans(np.array([0, 5]), np.array([4, 9])).overlaps(others)]
        [[0, 0, 1], [0, 1, 2], [0, 3, 6], [2, 4, 9]]
        """
        span, other = self.meeting(others)
        start = np.maximum(self.start[span], others.start[other])
        return span, other, start, np.minimum(self.stop[span], others.stop[other])
