"""The interface of the data-moving kernels: one protocol, implemented natively, in Numba CUDA and by PyTorch operators.

These are the primitives that `cp_fast.thd` and the executor are made of. An implementation trusts its caller: shapes
and dtypes have been checked, and the values of lengths that lie on the CPU. Lengths on a GPU cannot be looked at
without waiting for it, so kernels check them where they run: whatever they hold, nothing outside a tensor is touched,
and a broken rule ends in a device-side assertion that names the helper and the rule.

No implementation waits for the device, allocates on the host path of a captured graph, or uses another stream than
PyTorch's current one. Tensors may have any strides between tokens and heads unless said otherwise; the last axis has
stride 1.

    legend   b = sequences, t = tokens of a buffer (tail included), n = tokens that are moved, h = heads, d = head dim
             lengths = cumulative lengths with padding, int32 or int64 [b + 1], on the tensors' device
             rows = slice (contiguous) or index tensor, int32 or int64 [n], distinct, on the tensors' device
             wide = float32, or float64 where an operand is float64; every sum is formed in it and rounded once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from cp_fast.rows import Rows

__all__ = ["Kernels"]


class Kernels(Protocol):
    """One implementation. Methods that end in an underscore change their first arguments in place."""

    name: str  # "native", "numba", "torch"

    # ---- lengths and indices

    def partition_indices(self, lengths: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
        """[total_tokens / cp_size], lengths' dtype: the global row of each row of a rank's slice (layout dual_chunk):
        chunks cp_rank and 2 * cp_size - 1 - cp_rank of every sequence, then the rank's part of the tail.
        """
        ...

    def rank_lengths(
        self,
        real_lengths: torch.Tensor,
        lengths: torch.Tensor,
        cp_size: int,
        cp_rank: int,
        first_half: bool,
        second_half: bool,
    ) -> torch.Tensor:
        """[b + 1], real_lengths' dtype: cumulative numbers of real tokens in a rank's early and / or late chunks."""
        ...

    # ---- movers: bytes, of any dtype; the tensors of one call differ in row shape and dtype only, and share one launch

    def partition(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, cp_rank: int
    ) -> list[torch.Tensor]:
        """Each x [t, ...] -> [t / cp_size, ...]: x[partition_indices], without the index."""
        ...

    def reorder(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, to_rank_order: bool
    ) -> list[torch.Tensor]:
        """Each x [t, ...] between sequence order and the ranks' slices one behind the other."""
        ...

    def read_half(self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, half: int) -> list[torch.Tensor]:
        """Each x [t, ...] -> [t / 2, ...]: a half of every sequence (local lengths), then that half of the tail."""
        ...

    def read_second_half_lse(
        self, lse: torch.Tensor, lengths: torch.Tensor, lse_packed: bool, max_seqlen: int
    ) -> torch.Tensor:
        """[h, t] -> [h, t / 2]; [b, h, s] -> [b, h, max_seqlen], 0 behind each half: see `cp_ref.thd`."""
        ...

    def copy_valid_(
        self, out: torch.Tensor, inp: torch.Tensor, lengths: torch.Tensor, real_lengths: torch.Tensor
    ) -> None:
        """out[r] = inp[r] (converted, if their float dtypes differ) for the first real_lengths[s + 1] - real_lengths[s]
        rows from lengths[s], for every s; nothing else is written. lengths[0] may be past 0.
        """
        ...

    def pad_sequences(
        self, x: torch.Tensor, real_lengths: torch.Tensor, lengths: torch.Tensor, padded_tokens: int, fill: int
    ) -> torch.Tensor:
        """x [t] of integers -> [padded_tokens]: sequence s from lengths[s], `fill` behind it up to lengths[s + 1];
        behind lengths[b] the tail of x (its rows from real_lengths[b] on), and `fill` where that is shorter.
        """
        ...

    def take_rows(self, xs: Sequence[torch.Tensor], rows: Rows) -> list[torch.Tensor]:
        """Each x [t, ...] -> x[rows] [n, ...]; a view for a slice."""
        ...

    def put_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        """out[rows] = x, x [n, ...] of out's dtype."""
        ...

    def heads_to_front(self, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], heads: int) -> torch.Tensor:
        """x [t, h, ...] -> [p, n, heads, ...] with [i] = x[rows, first_heads[i] : first_heads[i] + heads]: what an
        all-to-all sends, gathered and transposed in one pass. Head ranges may overlap (replicated K/V heads).
        """
        ...

    def heads_to_back_(
        self, out: torch.Tensor, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], add: bool
    ) -> None:
        """The inverse: out[rows, first_heads[i] : first_heads[i] + heads] = x[i], or += the sum over the i that
        hold a head, in order of i, with add (out in float32 or float64). x [p, n, heads, ...]. Without add the head
        ranges are distinct. Nothing else of out is written.
        """
        ...

    # ---- arithmetic

    def merge_(
        self, out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor, rows: Rows
    ) -> None:
        """Merge a partial result into normalised accumulators, both in one pass over out.

        With new = log(exp(lse) + exp(lse_step)): out = out * exp(lse - new) + out_step * exp(lse_step - new), and
        lse = new. out [t, h, d] and out_step [n, h, d] of any float dtypes, computed with in float32 (float64) and
        rounded once; lse [h, t] and lse_step [h, n] in float32 or float64. A step row with lse -inf changes nothing,
        whatever its out_step holds; an accumulator row with lse -inf counts as 0 (it may hold NaN), and where both are
        -inf out becomes 0.
        """
        ...

    def add_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        """out[rows] += x in one launch for all pairs; out [t, ...] and x [n, ...] of any float dtypes."""
        ...

    def lse_correction_(
        self, lse: torch.Tensor, lse_step: torch.Tensor, lengths: torch.Tensor, lse_packed: bool
    ) -> None:
        """`thd_second_half_lse_correction`: log(exp + exp) into the second halves."""
        ...

    def out_correction_(
        self,
        out: torch.Tensor,
        out_step: torch.Tensor,
        lse: torch.Tensor,
        lse_step: torch.Tensor,
        lengths: torch.Tensor,
        only_second_half: bool,
        lse_packed: bool,
    ) -> None:
        """`thd_out_correction`: out += exp(lse_step - lse) * out_step, 0 where lse_step is -inf."""
        ...

    def grad_correction_(
        self, grad: torch.Tensor, grad_step: torch.Tensor, lengths: torch.Tensor, first_half: str, second_half: str
    ) -> None:
        """`thd_grad_correction`: "add", "copy" or "none" per half of every sequence; [2, t, h, d] in one launch."""
        ...
