"""Row maps: the index tables of the kernels, as data.

A map connects the rows of a part with rows of a whole tensor. A caller gives the rows (a slice or an index), or lengths
that a kernel computes them from, without a table in memory. `lengths` below are cumulative, with padding.

    kind            row i of the part is                             rows of the part, of t
    slice           row i of rank b's slice, cp_size a               t / a
    rank_order      row i of all ranks' slices, cp_size a            t
    sequence_order  row i of the inverse of that order               t
    half            row i of half a of all sequences                 t / 2
    in_half         row i, if it lies in half a of its sequence      t
    valid           row i, if its sequence has so many real rows     t
    unpad           row i with padding, to rows without              a

A row of the part may have no row in the whole. A gather takes the tail behind the last sequence along; a scatter or a
merge leaves it unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["HELPERS", "KINDS", "LengthsMap"]

# As csrc/common/types.h numbers them.
HELPERS = ("rows", "partition_indices", "partition", "reorder", "read_half", "read_second_half_lse", "copy_valid_")
HELPERS += ("pad_sequences", "lse_correction_", "out_correction_", "grad_correction_")
KINDS = ("span", "index", "slice", "rank_order", "sequence_order", "half", "in_half", "valid", "unpad")


class LengthsMap(NamedTuple):
    """Rows by cumulative lengths, int32 or int64 [b + 1], contiguous, on the device of the rows.

    >>> LengthsMap("read_half", "half", torch.tensor([0, 8]), a=1).count(10)
    5
    """

    helper: str  # One of HELPERS, named by a device-side assertion.
    kind: str  # One of KINDS, from "slice" on.
    lengths: torch.Tensor
    real: torch.Tensor | None = None  # Real lengths, for "valid" and "unpad".
    a: int = 0
    b: int = 0

    def count(self, tokens: int) -> int:
        """Rows of the part, where the whole has `tokens`."""
        if self.kind == "slice":
            return tokens // self.a
        if self.kind == "half":
            return tokens // 2
        return self.a if self.kind == "unpad" else tokens

    def divisors(self) -> tuple[int, int]:
        """The divisor of every length, and of the tail."""
        if self.kind in ("slice", "rank_order", "sequence_order"):
            return 2 * self.a, self.a
        return 2 if self.kind in ("half", "in_half") else 1, 1
