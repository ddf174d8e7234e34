"""The row indices and cumulative lengths of a whole plan, in one upload.

Rows are requested as spans (first row, number of rows): the result is a slice if they are contiguous, else a key. The
spans of all keys are uploaded in one copy, and the device expands all of them into row numbers at once:

    spans (4, 2) (9, 3)   ->   rows 4 5 9 10 11

So the bytes of the upload grow with the number of sequences, not of tokens. Equal requests share a key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cp_fast.backends.backend_protocol import Cumulative
from cp_fast.movers.rows import Rows
from cp_ref.schedules.table import Column, ranges

__all__ = ["Key", "RowKey", "Tables", "Uploaded", "one_range", "spread"]


_FEW = 8  # Spans.


class Key(int):
    """The number of a table."""


RowKey = slice | Key


def one_range(start: Column, count: Column) -> bool:
    """Whether spans are consecutive, without a gap."""
    if len(start) > _FEW and not one_range(start[:_FEW], count[:_FEW]):  # most gaps are found here
        return False
    return bool((start[1:] == start[:-1] + count[:-1]).all())


class Tables:
    """All row indices and lengths of a plan.

    >>> tables = Tables()
    >>> tables.rows(np.array([4, 6]), np.array([2, 3])), tables.rows(np.array([4, 9]), np.array([2, 3]))
    (slice(4, 9, None), 0)
    >>> tables.on_device(tables.on_host(pinned=False)).rows(Key(0)).tolist()
    [4, 5, 9, 10, 11]
    """

    def __init__(self) -> None:
        self._spans: list[tuple[Column, Column, int]] = []  # First rows, numbers of rows, their sum.
        self._lengths: list[Column] = []
        self._asked: dict[tuple[int, int], tuple[Column, Column, RowKey]] = {}  # By the columns' ids.
        self._known: dict[tuple[int, ...], list[Key]] = {}  # By values that compare quickly.
        self._known_lengths: dict[tuple[int, int], list[Key]] = {}

    def rows(self, start: Column, count: Column) -> RowKey:
        """Rows [start, start + count), span after span; none of the spans is empty."""
        if (id(start), id(count)) not in self._asked:
            self._asked[id(start), id(count)] = start, count, self._rows(start, count)
        return self._asked[id(start), id(count)][2]

    def _rows(self, start: Column, count: Column) -> RowKey:
        total = int(count.sum())
        if not total:
            return slice(0, 0)
        begin, last = int(start[0]), int(start[-1])
        if one_range(start, count):
            return slice(begin, begin + total)
        known = self._known.setdefault((len(count), total, begin, last), [])
        for key in known:
            if np.array_equal(start, self._spans[key][0]) and np.array_equal(count, self._spans[key][1]):
                return key
        known.append(Key(len(self._spans)))
        self._spans.append((start, count, total))
        return known[-1]

    def lengths(self, count: Column) -> Key:
        """The cumulative sum of these lengths, from 0."""
        cumulative = np.zeros(len(count) + 1, dtype=np.int32)
        np.cumsum(count, out=cumulative[1:])
        return self.numbers_of(cumulative)

    def numbers_of(self, values: Column) -> Key:
        """These numbers, unchanged; there is at least one."""
        known = self._known_lengths.setdefault((len(values), int(values[-1])), [])
        for key in known:
            if np.array_equal(values, self._lengths[key]):
                return key
        known.append(Key(len(self._lengths)))
        self._lengths.append(values.astype(np.int32))
        return known[-1]

    def numbers(self, key: RowKey) -> Column:
        """A table's row numbers, on the host.

        >>> tables = Tables()
        >>> key = tables.rows(np.array([4, 9]), np.array([2, 3]))
        >>> tables.numbers(key).tolist(), tables.numbers(slice(2, 4)).tolist()
        ([4, 5, 9, 10, 11], [2, 3])
        """
        if isinstance(key, slice):
            return np.arange(key.start, key.stop)
        start, count, _ = self._spans[key]
        return ranges(start, count)

    def count(self, key: RowKey) -> int:
        """How many rows a table has."""
        return key.stop - key.start if isinstance(key, slice) else self._spans[key][2]

    def spans(self, key: RowKey) -> list[tuple[int, int]]:
        """The spans (first row, number of rows) of a table, on the host."""
        if isinstance(key, slice):
            return [(key.start, key.stop - key.start)]
        start, count, _ = self._spans[key]
        return list(zip(start.tolist(), count.tolist(), strict=True))

    def cumulative(self, key: Key) -> Column:
        """Cumulative lengths, on the host."""
        return self._lengths[key]

    def on_host(self, *, pinned: bool) -> torch.Tensor:
        """All tables in the upload's layout, int32: the spans' numbers of rows, their first rows, the cumulative
        lengths.
        """
        parts = [count for _, count, _ in self._spans] + [start for start, _, _ in self._spans]
        words = self._dtype().itemsize // 4
        spans = words * sum(map(len, parts))
        size = spans + sum(map(len, self._lengths))
        host = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=pinned)
        view = host.numpy()
        if parts:
            np.concatenate(parts, out=view[:spans].view(self._dtype()), casting="same_kind")
        if self._lengths:
            np.concatenate(self._lengths, out=view[spans:])
        return host

    def on_device(self, buffer: torch.Tensor) -> Uploaded:
        """The tables by key, from a device copy of the result of `on_host`."""
        sizes = [total for _, _, total in self._spans]
        cumulative = [len(cu) for cu in self._lengths]
        spans = buffer[: len(buffer) - sum(cumulative)].view(_TORCH[self._dtype()])
        half = len(spans) // 2
        rows = spread(spans[:half], spans[half:], sum(sizes)) if half else spans
        on_device = buffer[len(buffer) - sum(cumulative) :].split(cumulative)
        return Uploaded(rows.split(sizes), list(zip(self._lengths, on_device, strict=True)))

    def _dtype(self) -> np.dtype[np.signedinteger]:
        """The dtype of row numbers: 32 bits if all row numbers and the number of rows of all tables together fit."""
        largest = max([sum(total for _, _, total in self._spans), *(int(start.max()) for start, _, _ in self._spans)])
        return np.dtype(np.int32 if largest < 2**31 else np.int64)


class Uploaded:
    """The tables by key: row numbers, and cumulative lengths on the host and on the device."""

    def __init__(self, rows: Sequence[torch.Tensor], lengths: Sequence[tuple[Column, torch.Tensor]]) -> None:
        self._rows, self._lengths = rows, lengths
        self._read: dict[tuple[Key, int | None], Cumulative] = {}  # Shared by launches: the longest is searched once.

    def rows(self, key: RowKey) -> Rows:
        """A slice unchanged, or the row numbers of a key."""
        return key if isinstance(key, slice) else self._rows[key]

    def lengths(self, key: Key, bound: int | None = None) -> tuple[Cumulative, torch.Tensor]:
        """Cumulative lengths for backends: on the host with an upper bound of the lengths, and on the device."""
        host, device = self._lengths[key]
        if (key, bound) not in self._read:
            self._read[key, bound] = Cumulative(host, bound)
        return self._read[key, bound], device


_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def spread(count: torch.Tensor, start: torch.Tensor, total: int) -> torch.Tensor:
    """The row numbers of all spans, table after table.

    >>> spread(torch.tensor([2, 3]), torch.tensor([4, 9]), 5).tolist()
    [4, 5, 9, 10, 11]
    """
    ends = count.cumsum(0, dtype=count.dtype)
    if count.device.type == "cpu":  # Numpy is several times faster here.
        return torch.from_numpy(_spread_on_host(count.numpy(), start.numpy(), ends.numpy()))
    rows = torch.repeat_interleave(start - ends + count, count, output_size=total)
    return rows.add_(torch.arange(total, dtype=rows.dtype, device=rows.device))


def _spread_on_host(count: Column, start: Column, ends: Column) -> Column:
    """Each row number is the last one plus 1, with a jump at the start of a span."""
    steps = np.ones(int(ends[-1]), dtype=start.dtype)
    steps[0] = start[0]
    steps[ends[:-1]] = start[1:] - start[:-1] - count[:-1] + 1
    return np.cumsum(steps, out=steps)
