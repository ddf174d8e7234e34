"""The kernels of the helpers in `cp_fast.thd`: one protocol, implemented natively, in Numba CUDA and by PyTorch's
operators.

Checks: the operators `torch.ops.cp_attention.*` (`ops`) check arguments before a call here. So the implementations in
PyTorch and Numba trust shapes, dtypes, and the values of lengths on the CPU. A native operator can be called directly,
so it checks everything that could make it touch memory outside a tensor. The host cannot read lengths on a GPU without
waiting for it: the kernels check them, as in `base`.

Streams, captured graphs and strides are as in `base`.

    legend   b = sequences, t = tokens of a buffer (tail included), h = heads, d = head dim
             lengths = cumulative lengths with padding, int32 or int64 [b + 1], contiguous, on the tensors' device
             wide = float32, or float64 where an operand is float64; every sum is formed in it and rounded once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["ThdKernels"]


class ThdKernels(Protocol):
    """One implementation. Methods that end in an underscore change their first arguments in place.

    The tensors of one call differ in row shape and dtype only, and share one launch.
    """

    name: str  # "native", "numba" or "torch".

    def partition_indices(self, lengths: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
        """The global row of each row of a rank's slice (layout dual_chunk), [total_tokens / cp_size] of lengths' dtype:
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
        """Cumulative numbers of real tokens in a rank's early and / or late chunks, [b + 1] of real_lengths' dtype."""
        ...

    def partition(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, cp_rank: int
    ) -> list[torch.Tensor]:
        """Each x [t, ...] -> [t / cp_size, ...]: x[partition_indices], without the index."""
        ...

    def reorder(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, to_rank_order: bool
    ) -> list[torch.Tensor]:
        """Each x [t, ...] between sequence order and the ranks' slices in order of ranks."""
        ...

    def read_half(self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, half: int) -> list[torch.Tensor]:
        """Each x [t, ...] -> [t / 2, ...]: a half of every sequence (local lengths), then that half of the tail."""
        ...

    def read_second_half_lse(
        self, lse: torch.Tensor, lengths: torch.Tensor, lse_packed: bool, max_seqlen: int
    ) -> torch.Tensor:
        """[h, t] -> [h, t / 2]; [b, h, s] -> [b, h, max_seqlen], 0 after each half: see `cp_ref.thd`."""
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
        """x [t] of integers -> [padded_tokens]: sequence s from lengths[s], then `fill` up to lengths[s + 1]; after
        lengths[b] the tail of x (its rows from real_lengths[b] on), then `fill`.
        """
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
