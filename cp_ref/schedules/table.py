"""Tables of integers: columns of equal length, one entry a row. Attention slices, ownership and schedules are made of
these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Column",
    "Table",
    "constant",
    "in_blocks",
    "joined",
    "one_value",
    "ordered_by",
    "overlaps",
    "ranges",
    "runs",
    "starts_of",
]

Column = NDArray[Any]  # [n], signed integers of 32 or 64 bits


@dataclass(frozen=True, eq=False)
class Table:
    """The base of all tables: a dataclass whose fields are columns. Tables are not changed once they are made.

    >>> @dataclass(frozen=True, eq=False)
    ... class Spans(Table):
    ...     start: Column
    ...     stop: Column
    >>> spans = Spans.of_rows([(0, 4), (6, 9)])
    >>> len(spans), spans.stop.tolist(), list(spans.take(spans.start > 0).rows()), spans == spans.take(slice(None))
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


def starts_of(sizes: Sequence[int]) -> Column:
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


def joined(start: Column, stop: Column, others_start: Column, others_stop: Column) -> tuple[Column, Column]:
    """All pairs (number of a span, number of another span) that have an element in common, by the span's number.

    `others` are sorted, disjoint and not empty; an empty span has nothing in common with any.

    >>> [pair.tolist() for pair in joined(*np.array([[0, 5], [4, 9]]), *np.array([[0, 3, 6], [2, 5, 9]]))]
    [[0, 0, 1], [0, 1, 2]]
    """
    first = np.searchsorted(others_stop, start, side="right")
    last = np.searchsorted(others_start, stop, side="left")
    count = np.where(start < stop, last - first, 0)
    np.maximum(count, 0, out=count)
    return np.repeat(np.arange(len(start)), count), ranges(first, count)


def overlaps(
    start: Column, stop: Column, others_start: Column, others_stop: Column
) -> tuple[Column, Column, Column, Column]:
    """What spans have in common with others: (number of a span, number of another span, start, stop), as in `joined`.

    >>> [x.tolist() for x in overlaps(*np.array([[0, 5], [4, 9]]), *np.array([[0, 3, 6], [2, 5, 9]]))]
    [[0, 0, 1], [0, 1, 2], [0, 3, 6], [2, 4, 9]]
    """
    span, other = joined(start, stop, others_start, others_stop)
    return span, other, np.maximum(start[span], others_start[other]), np.minimum(stop[span], others_stop[other])
