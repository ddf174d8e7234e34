"""The row indices and cumulative lengths of a whole plan, in one upload.

Rows are requested as spans (first row, number of rows): the result is a slice if they are contiguous, else a key. The
spans of all keys are uploaded in one copy, and the device expands all of them into row numbers at once:

    spans (4, 2) (9, 3)   ->   rows 4 5 9 10 11

So the bytes of the upload grow with the number of sequences, not of tokens. Equal requests share a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from cp_fast.kernels.attention.varlen_batch import Cumulative
from cp_fast.movers.mover_protocol import Rows
from cp_ref.problems.room import Room
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.table import Column, Spans, ranges

__all__ = [
    "MOST_ROWS",
    "Key",
    "PaddedTables",
    "RowKey",
    "Tables",
    "Uploaded",
    "check_row_numbers",
    "one_range",
    "pad",
    "spread",
]

# ---- Row numbers
#
# Row numbers and the lengths of launches are int32: how many rows a buffer of a rank may have.


MOST_ROWS = 2**31 - 1  # Of one buffer of a rank.


def check_row_numbers(problem: Problem, room: Room | None = None) -> None:
    """Refuse a problem, or room, for which a rank would hold more rows of q or of k and v than int32 numbers.

    Raises:
        ValueError: naming the lengths (or the room), and how many rows a rank would hold.
    """
    for side, total, most in (
        ("q", problem.starts_q[-1], None if room is None else room.max_tokens_q),
        ("kv", problem.starts_kv[-1], None if room is None else room.max_tokens_kv),
    ):
        gathered = side == "kv" and problem.cp_comm_type == "all_gather"
        ranks = problem.cp_size if gathered else problem.a2a_size  # The ranks that gather rows.
        what, tokens = f"max_tokens_{side} is", most
        if tokens is None:
            what, tokens = f"cu_seqlens_{side}, padding included, ends at", total
        rows = -(-tokens // problem.cp_size) * ranks
        if rows > MOST_ROWS:
            raise ValueError(
                f"{what} {tokens}: with cp_comm_type {problem.cp_comm_type!r} at cp_size {problem.cp_size} a rank would"
                f" hold {rows} rows of {side}; row numbers are int32, so it must be at most {MOST_ROWS}"
            )


# ---- Tables of a plan


_FEW = 8  # Spans.


class Key(int):
    """The number of a table."""


RowKey = slice | Key


def one_range(start: Column, count: Column) -> bool:
    """Whether spans are consecutive, without a gap."""
    if len(start) > _FEW and not one_range(start[:_FEW], count[:_FEW]):  # most gaps are found here
        return False
    return bool((start[1:] == start[:-1] + count[:-1]).all())


_ALIGNMENT = 16  # Bytes: kernels may read a table in words of this size, and a library copies one that is not so.


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

    def spans(self, key: RowKey) -> Spans:
        """The spans of a table, on the host."""
        if isinstance(key, slice):
            return Spans(np.array([key.start]), np.array([key.stop]))
        start, count, _ = self._spans[key]
        return Spans(start, start + count)

    def cumulative(self, key: Key) -> Column:
        """Cumulative lengths, on the host."""
        return self._lengths[key]

    def on_host(self, *, pinned: bool) -> torch.Tensor:
        """All tables in the upload's layout, int32: the spans' numbers of rows, their first rows, the cumulative
        lengths, each of which begins at a multiple of `_ALIGNMENT`.
        """
        parts = [count for _, count, _ in self._spans] + [start for start, _, _ in self._spans]
        *places, size = self._places()
        host = torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=pinned)
        view = host.numpy()
        if parts:
            spans = view[: self._words].view(self._dtype())
            np.concatenate(parts, out=spans, casting="same_kind")
        for start, cumulative in zip(places, self._lengths, strict=True):
            view[start : start + len(cumulative)] = cumulative
        return host

    def on_device(self, buffer: torch.Tensor) -> Uploaded:
        """The tables by key, from a device copy of the result of `on_host`."""
        sizes = [total for _, _, total in self._spans]
        spans = buffer[: self._words].view(_TORCH[self._dtype()])
        half = len(spans) // 2
        rows = spread(spans[:half], spans[half:], sum(sizes)) if half else spans
        lengths = [(cu, buffer[n : n + len(cu)]) for n, cu in zip(self._places(), self._lengths, strict=False)]
        return Uploaded(rows.split(sizes), lengths)

    @property
    def _words(self) -> int:
        """How many int32 the spans take."""
        return 2 * sum(len(count) for _, count, _ in self._spans) * (self._dtype().itemsize // 4)

    def _places(self) -> list[int]:
        """Where each table of cumulative lengths begins, and the total size, in int32."""
        step = _ALIGNMENT // 4
        sizes = [self._words, *map(len, self._lengths)]
        return list(accumulate(-(-size // step) * step for size in sizes))

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


# ---- Tables of constant size
#
# Tables of constant size, so that the next batch's can be written over them.
#
# Every table has the largest size of the plan's shape, for any batch. The padding is harmless:
#
#     rows that are read from     repeat the table's first row, a real token's: finite, and its result is not read
#     rows that are added to      are the one spare row at the buffer's end, never read
#     cumulative lengths          repeat the last one: segments of length zero
#
# All tables lie in one buffer on the device, so that a batch is one copy from the host.


def pad(values: Column, size: int, fill: int) -> Column:
    """The values, followed by `fill`.

    >>> pad(np.array([4, 5]), 4, 9).tolist()
    [4, 5, 9, 9]
    """
    assert len(values) <= size
    padded = np.full(size, fill, dtype=values.dtype)
    padded[: len(values)] = values
    return padded


class PaddedTables:
    """The tables of a plan updated in place, padded to their full size.

    >>> tables = PaddedTables()
    >>> keys = tables.read_from(np.array([4, 5]), 3), tables.added_to(np.array([4, 5]), 3, spare=8)
    >>> [tables.on_device(tables.on_host(pinned=False)).rows(key).tolist() for key in keys]
    [[4, 5, 4], [4, 5, 8]]
    """

    def __init__(self) -> None:
        self._tables: list[Column] = []

    def read_from(self, rows: Column, size: int) -> Key:
        """Rows that are read from."""
        return self.add(pad(rows, size, int(rows[0]) if len(rows) else 0).astype(np.int32))

    def added_to(self, rows: Column, size: int, spare: int) -> Key:
        """Rows that are written or added to, of a buffer with a spare row."""
        return self.add(pad(rows, size, spare).astype(np.int32))

    def lengths(self, cumulative: Column, segments: int) -> Key:
        """Cumulative lengths [segments + 1]."""
        return self.add(pad(cumulative, segments + 1, int(cumulative[-1])).astype(np.int32))

    def add(self, table: Column) -> Key:
        """A table that has its size and its dtype."""
        self._tables.append(table)
        return Key(len(self._tables) - 1)

    def on_host(self, *, pinned: bool) -> torch.Tensor:
        """All tables in their device layout, uint8."""
        host = torch.zeros(self._places()[-1], dtype=torch.uint8, device="cpu", pin_memory=pinned)
        view = host.numpy()
        for (start, _), table in zip(pairwise(self._places()), self._tables, strict=True):
            view[start : start + table.nbytes] = table.view(np.uint8)
        return host

    def on_device(self, buffer: torch.Tensor) -> Uploaded:
        """The tables by key, as views of the buffer that `on_host` was copied to."""
        tensors = [
            buffer[start : start + table.nbytes].view(_DTYPES[table.dtype.name])
            for (start, _), table in zip(pairwise(self._places()), self._tables, strict=True)
        ]
        return Uploaded(tensors, list(zip(self._tables, tensors, strict=True)))

    def _places(self) -> list[int]:
        """The offset of each table in bytes, and the total size."""
        return list(accumulate((-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in self._tables), initial=0))


_DTYPES = {"int32": torch.int32, "int64": torch.int64, "bool": torch.bool}
