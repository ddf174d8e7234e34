"""Tables of constant size, so that the next batch's can be written over them.

Every table has the largest size of the plan's shape, for any batch. The padding is harmless:

    rows that are read from     repeat the table's first row, a real token's: finite, and its result is not read
    rows that are added to      are the one spare row at the buffer's end, never read
    cumulative lengths          repeat the last one: segments of length zero

All tables lie in one buffer on the device, so that a batch is one copy from the host.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch

from cp_fast.compile.index_tables import Key, Uploaded
from cp_ref.schedules.table import Column

__all__ = ["PaddedTables", "pad"]

_ALIGNMENT = 16  # Bytes: kernels may read a table in words of this size.


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
