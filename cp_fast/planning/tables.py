"""The row indices and cumulative lengths of a whole plan, in one upload.

A planner asks for rows as spans (first row, number of rows) and gets a slice where they are contiguous, else a key. The
spans of all keys are uploaded together, in one copy, and are spread out into row numbers on the device, all at once:

    spans (4, 2) (9, 3)   ->   rows 4 5 9 10 11

So what crosses the bus grows with the number of sequences, not of tokens. Equal requests share a key.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from cp_fast.backends.lengths import Cumulative
from cp_fast.planning.columns import Array, Borrowed, Spans, spread
from cp_fast.planning.loops import BY_NUMPY, Loops
from cp_fast.rows import Rows

__all__ = ["Key", "Lengths", "RowKey", "Tables", "Uploaded"]


class Key(int):
    """The number of a table."""


RowKey = slice | Key


class Lengths(NamedTuple):
    """Cumulative lengths [n + 1], int32, on the host and on the device; the longest where it is known."""

    host: Array
    device: torch.Tensor
    longest: int | None = None


class Tables:
    """What the planners ask for.

    >>> tables = Tables()
    >>> tables.rows(np.array([4, 6]), np.array([2, 3])), tables.rows(np.array([4, 9]), np.array([2, 3]))
    (slice(4, 9, None), 0)
    >>> tables.on_device(tables.on_host(pinned=False)).rows(Key(0)).tolist()
    [4, 5, 9, 10, 11]
    """

    def __init__(self, loops: Loops = BY_NUMPY) -> None:
        self.loops = loops
        self._spans: list[tuple[Array, Array, int]] = []  # first rows, numbers of rows, their sum
        self._lengths: list[Array] = []
        self._longest: list[int] = []  # of each of them
        self._known: dict[tuple[int, ...], list[tuple[Key, Array, Array]]] = {}  # by what is quickly compared
        self._known_lengths: dict[tuple[int, int], list[tuple[Key, Array]]] = {}

    def rows(self, start: Array, count: Array) -> RowKey:
        """Rows [start, start + count), span after span; empty spans are allowed."""
        return self.spans(self.loops.spans(start, count))

    def spans(self, spans: Spans) -> RowKey:
        """The same for rows that have been looked at."""
        start, count, total, contiguous = spans
        if not total:
            return slice(0, 0)
        begin, same = int(start[0]), self.loops.same
        if contiguous:
            return slice(begin, begin + total)
        known = self._known.setdefault((len(count), total, begin, int(start[-1])), [])
        for key, known_start, known_count in known:
            if same(start, known_start) and same(count, known_count):
                return key
        if isinstance(spans, Borrowed):
            start, count = self.loops.copied(start), self.loops.copied(count)
        key = Key(len(self._spans))
        self._spans.append((start, count, total))
        known.append((key, start, count))
        return key

    def lengths(self, count: Array) -> Key:
        """The cumulative sum of these, from 0."""
        return self.sums(self.loops.cumulative(count))

    def sums(self, cumulative: Array) -> Key:
        """The same for a cumulative sum."""
        known = self._known_lengths.setdefault((len(cumulative), int(cumulative[-1])), [])
        for key, known_lengths in known:
            if self.loops.same(cumulative, known_lengths):
                return key
        if cumulative.base is not None:  # a part of something that is longer, and may be written over
            cumulative = cumulative.copy()
        key = Key(len(self._lengths))
        self._lengths.append(cumulative)
        self._longest.append(self.loops.longest(cumulative))
        known.append((key, cumulative))
        return key

    def numbers(self, key: RowKey) -> Array:
        """A table's row numbers, on the host.

        >>> tables = Tables()
        >>> key = tables.rows(np.array([4, 9]), np.array([2, 3]))
        >>> tables.numbers(key).tolist(), tables.numbers(slice(2, 4)).tolist()
        ([4, 5, 9, 10, 11], [2, 3])
        """
        if isinstance(key, slice):
            return np.arange(key.start, key.stop)
        start, count, _ = self._spans[key]
        return spread(start, count)

    def cumulative(self, key: Key) -> Array:
        """Cumulative lengths, on the host."""
        return self._lengths[key]

    def on_host(self, *, pinned: bool) -> torch.Tensor:
        """All tables as they travel, int32: the spans' numbers of rows, their first rows, the cumulative lengths."""
        parts = [count for _, count, _ in self._spans] + [start for start, _, _ in self._spans]
        words = self._dtype().itemsize // 4
        spans = words * sum(map(len, parts))
        words_in_all = spans + sum(map(len, self._lengths))
        host = torch.empty(words_in_all, dtype=torch.int32, device="cpu", pin_memory=pinned)
        view = host.numpy()
        if parts:
            np.concatenate(parts, out=view[:spans].view(self._dtype()), casting="same_kind")
        if self._lengths:
            np.concatenate(self._lengths, out=view[spans:])
        return host

    def on_device(self, buffer: torch.Tensor) -> Uploaded:
        """The tables by key, from what `on_host` made and what has been copied to the device since."""
        sizes = [total for _, _, total in self._spans]
        cumulative = [len(cu) for cu in self._lengths]
        spans = buffer[: len(buffer) - sum(cumulative)].view(_TORCH[self._dtype()])
        half = len(spans) // 2
        rows = _spread(spans[:half], spans[half:], sum(sizes)) if half else spans
        on_device = buffer[len(buffer) - sum(cumulative) :].split(cumulative)
        return Uploaded(list(rows.split(sizes)), list(map(Lengths, self._lengths, on_device, self._longest)))

    def _dtype(self) -> np.dtype[np.signedinteger]:
        """Of the rows: 32 bits where all of them fit, and the number of rows of all tables together."""
        wide = [start for start, _, _ in self._spans if start.itemsize > 4]
        largest = max([sum(total for _, _, total in self._spans), *(int(start.max()) for start in wide)])
        return np.dtype(np.int32 if largest < 2**31 else np.int64)


class Uploaded:
    """The tables by key."""

    def __init__(self, rows: list[torch.Tensor], lengths: list[Lengths]) -> None:
        self._rows, self._lengths = rows, lengths
        self._cumulative: dict[tuple[Key, int | None], Cumulative] = {}

    def rows(self, key: RowKey) -> Rows:
        """A slice as it is, or the row numbers."""
        return key if isinstance(key, slice) else self._rows[key]

    def numbers(self, key: Key) -> torch.Tensor:
        """A table that is no slice."""
        return self._rows[key]

    def lengths(self, key: Key) -> Lengths:
        """Cumulative lengths."""
        return self._lengths[key]

    def cumulative(self, key: Key, bound: int | None) -> Cumulative:
        """Those on the host, as backends get them: shared by launches, which look for the longest once."""
        if (key, bound) not in self._cumulative:
            host, _, longest = self._lengths[key]
            self._cumulative[key, bound] = Cumulative(host, bound, longest)
        return self._cumulative[key, bound]


_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def _spread(count: torch.Tensor, start: torch.Tensor, total: int) -> torch.Tensor:
    """The row numbers of all spans, one table behind the other.

    >>> _spread(torch.tensor([2, 3]), torch.tensor([4, 9]), 5).tolist()
    [4, 5, 9, 10, 11]
    """
    ends = count.cumsum(0, dtype=count.dtype)
    if count.device.type == "cpu":  # where numpy is several times faster
        return torch.from_numpy(_spread_on_host(count.numpy(), start.numpy(), ends.numpy()))
    rows = torch.repeat_interleave(start - ends + count, count, output_size=total)
    return rows.add_(torch.arange(total, dtype=rows.dtype, device=rows.device))


def _spread_on_host(count: Array, start: Array, ends: Array) -> Array:
    """One up from row to row, and a jump where a span begins."""
    steps = np.ones(int(ends[-1]), dtype=start.dtype)
    steps[0] = start[0]
    steps[ends[:-1]] = start[1:] - start[:-1] - count[:-1] + 1
    return np.cumsum(steps, out=steps)
