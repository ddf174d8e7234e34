"""Fragments cut into chunks of equal size: packed rows to padded chunks, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from cp_fast.kernels.linear.linear_kernels import FragmentRows

__all__ = ["ChunkRows", "chunk_rows", "compute_dtype"]


@dataclass(frozen=True, eq=False)
class ChunkRows:
    """Where the rows of fragments lie in chunks.

    Attributes:
        rows: the row in each place of each chunk, int64 [chunks, size]; n where a chunk has no more rows.
        places: the place of each row in the flat chunks, int64 [n].
        counts: how many chunks each fragment has, int64 [f], on the host.
    """

    rows: torch.Tensor
    places: torch.Tensor
    counts: np.ndarray

    @cached_property
    @torch.inference_mode(False)  # autograd may save tables that an evaluation made
    def waves(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """For wave i the chunks that are the i-th of their fragment, and these fragments: pairs of int64 tensors."""
        fragment = np.repeat(np.arange(len(self.counts)), self.counts)
        wave = np.arange(len(fragment)) - (np.cumsum(self.counts) - self.counts)[fragment]
        waves = [np.flatnonzero(wave == i) for i in range(int(self.counts.max(initial=0)))]
        return tuple((self._table(c), self._table(fragment[c])) for c in waves)

    def _table(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.rows.device)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [n, ...] as chunks [chunks, size, ...], with zeros where a chunk has no more rows."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[self.rows]

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Chunks [chunks, size, ...] as rows [n, ...]."""
        return x.flatten(0, 1)[self.places]


@torch.inference_mode(False)
def chunk_rows(fragments: FragmentRows, size: int) -> ChunkRows:
    """The chunks of `size` rows of every fragment, made once for a table of fragments.

    >>> made = chunk_rows(FragmentRows((0, 3, 5), torch.device("cpu")), 2)
    >>> made.rows.tolist(), [(chunks.tolist(), which.tolist()) for chunks, which in made.waves]
    ([[0, 1], [2, 5], [3, 4]], [([0, 2], [0, 1]), ([1], [0])])
    """
    if (known := fragments.tables.get(("chunks", size))) is not None:
        return known
    cu = np.array(fragments.cu, dtype=np.int64)
    n, counts = int(cu[-1]), -(-np.diff(cu) // size)
    fragment = np.repeat(np.arange(len(counts)), counts)
    wave = np.arange(len(fragment)) - (np.cumsum(counts) - counts)[fragment]
    rows = (cu[:-1][fragment] + wave * size)[:, None] + np.arange(size)
    rows = np.where(rows < cu[1:][fragment][:, None], rows, n)
    places = np.flatnonzero(rows.ravel() < n)
    there = [torch.from_numpy(x).to(fragments.device) for x in (rows, places)]
    made = fragments.tables["chunks", size] = ChunkRows(there[0], there[1], counts)
    return made


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
