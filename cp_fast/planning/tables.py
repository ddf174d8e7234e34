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

from cp_fast.planning.batch import Array, spread
from cp_fast.rows import Rows

__all__ = ["Key", "Lengths", "RowKey", "Tables", "Uploaded"]


class Key(int):
    """The number of a table."""


RowKey = slice | Key


class Lengths(NamedTuple):
    """Cumulative lengths [n + 1], int32, on the host and on the device."""

    host: Array
    device: torch.Tensor


class Tables:
    """What the planners ask for.

    >>> tables = Tables()
    >>> tables.rows(np.array([4, 6]), np.array([2, 3])), tables.rows(np.array([4, 9]), np.array([2, 3]))
    (slice(4, 9, None), 0)
    >>> tables.upload(torch.device("cpu")).rows(Key(0)).tolist()
    [4, 5, 9, 10, 11]
    """

    def __init__(self) -> None:
        self._spans: list[tuple[Array, Array, int]] = []  # first rows, numbers of rows, their sum
        self._lengths: list[Array] = []
        self._known: dict[tuple[int, ...], list[tuple[Key, Array, Array]]] = {}  # by what is quickly compared
        self._known_lengths: dict[tuple[int, int], list[tuple[Key, Array]]] = {}

    def rows(self, start: Array, count: Array) -> RowKey:
        """Rows [start, start + count), span after span; empty spans are allowed."""
        total = int(count.sum())
        if total == 0:
            return slice(0, 0)
        if not count.all():
            there = count > 0
            start, count = start[there], count[there]
        begin = int(start[0])
        if int(start[-1]) + int(count[-1]) - begin == total and bool((start[1:] == start[:-1] + count[:-1]).all()):
            return slice(begin, begin + total)
        same = self._known.setdefault((len(count), total, begin, int(start[-1])), [])
        for key, known_start, known_count in same:
            if np.array_equal(start, known_start) and np.array_equal(count, known_count):
                return key
        key = Key(len(self._spans))
        self._spans.append((start, count, total))
        same.append((key, start, count))
        return key

    def lengths(self, count: Array) -> Key:
        """The cumulative sum of these, from 0."""
        cumulative = np.empty(len(count) + 1, dtype=np.int32)
        cumulative[0] = 0
        np.cumsum(count, out=cumulative[1:])
        same = self._known_lengths.setdefault((len(count), int(cumulative[-1])), [])
        for key, known in same:
            if np.array_equal(cumulative, known):
                return key
        key = Key(len(self._lengths))
        self._lengths.append(cumulative)
        same.append((key, cumulative))
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

    def upload(self, device: torch.device) -> Uploaded:
        """All tables on the device."""
        counts = [count for _, count, _ in self._spans]
        sizes = [total for _, _, total in self._spans]
        total = sum(sizes)
        dtype = np.int32 if max(total, max((int(s.max()) for s, _, _ in self._spans), default=0)) < 2**31 else np.int64
        spans = sum(map(len, counts))
        host = _host_buffer(2 * spans, dtype, device)
        view = host.numpy()
        if spans:
            np.concatenate(counts, out=view[:spans], casting="same_kind")
            ends = np.cumsum(view[:spans], dtype=dtype)
            starts = view[spans:]
            np.concatenate([start for start, _, _ in self._spans], out=starts, casting="same_kind")
            starts -= ends
            starts += view[:spans]  # first row, less the place of the span in the table
        cumulative = _host_buffer(sum(map(len, self._lengths)), np.int32, device)
        if self._lengths:
            np.concatenate(self._lengths, out=cumulative.numpy())
        rows = _spread(host, spans, total, device)
        return Uploaded(
            list(rows.split(sizes)),
            [
                Lengths(on_host, on_device)
                for on_host, on_device in zip(
                    self._lengths,
                    cumulative.to(device, non_blocking=True).split([len(x) for x in self._lengths]),
                    strict=True,
                )
            ],
        )


class Uploaded:
    """The tables by key."""

    def __init__(self, rows: list[torch.Tensor], lengths: list[Lengths]) -> None:
        self._rows, self._lengths = rows, lengths

    def rows(self, key: RowKey) -> Rows:
        """A slice as it is, or the row numbers."""
        return key if isinstance(key, slice) else self._rows[key]

    def numbers(self, key: Key) -> torch.Tensor:
        """A table that is no slice."""
        return self._rows[key]

    def lengths(self, key: Key) -> Lengths:
        """Cumulative lengths."""
        return self._lengths[key]


def _host_buffer(size: int, dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    """Room on the host; pinned for a GPU, so that the copy does not wait (PyTorch keeps and reuses such memory)."""
    pinned = device.type == "cuda" and size > 0
    return torch.empty(size, dtype=torch.int32 if dtype == np.int32 else torch.int64, pin_memory=pinned)


def _spread(host: torch.Tensor, spans: int, total: int, device: torch.device) -> torch.Tensor:
    """(counts, first rows less places) of all spans -> their row numbers, one table behind the other."""
    if device.type == "cpu":
        counts, starts = host.numpy()[:spans], host.numpy()[spans:]
        rows = np.repeat(starts, counts)
        rows += np.arange(total, dtype=rows.dtype)
        return torch.from_numpy(rows)
    sent = host.to(device, non_blocking=True)
    rows = torch.repeat_interleave(sent[spans:], sent[:spans], output_size=total)
    return rows.add_(torch.arange(total, dtype=rows.dtype, device=device))
