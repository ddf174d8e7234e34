"""Log-sum-exps of packed sequences have two shapes; the corrections read both in the same way.

    packed   [h, t]       the LSE of row t of the buffer                      (lse_packed True)
    padded   [b, h, s]    the LSE of position p of sequence b, p < s          (lse_packed False)

A padded LSE has room for at least the longest sequence. Kernels round that room up, so s may be larger; values beyond a
sequence's length are never read and never changed.
"""

from __future__ import annotations

import torch

from cp_ref.common.thd.checks import check_columns
from cp_ref.common.thd.row_tables import locate
from cp_ref.thd.packed_lengths import end_of, longest_of

__all__ = ["check_lse_room", "lse_rows"]

Index = tuple[torch.Tensor, ...]


def lse_rows(
    lse: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, lse_packed: bool
) -> tuple[torch.Tensor, Index]:
    """A view of the LSE and an index into it: `view[index]` is [n, h], the LSE of these n rows of the packed buffer,
    and assigning to it changes `lse`.

    >>> rows, lengths = torch.tensor([1, 4, 5]), torch.tensor([0, 2, 6])     # second halves
    >>> packed = torch.tensor([[0, 1, 2, 3, 4, 5]])                          # h 1, t 6
    >>> padded = torch.tensor([[[0, 1, 0, 0]], [[2, 3, 4, 5]]])              # b 2, h 1, s 4: the same numbers
    >>> view, index = lse_rows(packed, rows, lengths, lse_packed=True)
    >>> view[index].flatten().tolist()
    [1, 4, 5]
    >>> view, index = lse_rows(padded, rows, lengths, lse_packed=False)
    >>> view[index].flatten().tolist()
    [1, 4, 5]
    """
    if lse_packed:
        return lse.t(), (rows,)
    located = locate(rows, lengths, end_of(lengths))
    return lse.transpose(1, 2), (located.seq, rows - located.start)


def check_lse_room(name: str, lse: torch.Tensor, lengths: torch.Tensor, lse_packed: bool) -> None:
    """Raise unless `lse` has room for every token of sequences of these lengths."""
    check_columns(name, lse, end_of(lengths) if lse_packed else longest_of(lengths), lse_packed)
