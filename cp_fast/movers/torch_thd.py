"""The kernels of packed sequences by PyTorch's operators: any device, no compiler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.movers.torch_asserts import assert_lengths, assert_real_lengths
from cp_fast.movers.torch_corrections import TorchCorrections
from cp_fast.movers.torch_ops import TorchKernels
from cp_fast.movers.torch_rows import bits, half_rows, locate, rank_order_rows, sequence_order_rows, slice_rows

__all__ = ["TorchThdKernels", "load", "load_thd"]


class TorchThdKernels(TorchCorrections):
    """`cp_fast.movers.base_thd.ThdKernels`, which says what each method does."""

    name = "torch"

    def partition_indices(self, lengths: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
        assert_lengths("partition_indices", lengths, 2 * cp_size, total_tokens, cp_size)
        local = torch.arange(total_tokens // cp_size, device=lengths.device)
        return slice_rows(local, cp_rank, lengths, total_tokens, cp_size).to(lengths.dtype)

    def rank_lengths(
        self,
        real_lengths: torch.Tensor,
        lengths: torch.Tensor,
        cp_size: int,
        cp_rank: int,
        first_half: bool,
        second_half: bool,
    ) -> torch.Tensor:
        assert_lengths("rank_lengths", lengths, 2 * cp_size, torch.iinfo(torch.int64).max)
        assert_real_lengths("rank_lengths", real_lengths, lengths)
        real, chunk = real_lengths.long().diff(), lengths.long().diff() // (2 * cp_size)
        held = torch.zeros_like(real_lengths, dtype=torch.int64)
        for number, counted in ((cp_rank, first_half), (2 * cp_size - 1 - cp_rank, second_half)):
            if counted:
                held[1:] += torch.minimum((real - number * chunk).clamp_(min=0), chunk)
        return held.cumsum(0).to(real_lengths.dtype)

    def partition(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, cp_rank: int
    ) -> list[torch.Tensor]:
        return _taken(xs, self.partition_indices(lengths, xs[0].shape[0], cp_size, cp_rank))

    def reorder(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, to_rank_order: bool
    ) -> list[torch.Tensor]:
        total = xs[0].shape[0]
        assert_lengths("reorder", lengths, 2 * cp_size, total, cp_size)
        rows_of = rank_order_rows if to_rank_order else sequence_order_rows
        return _taken(xs, rows_of(lengths, total, cp_size))

    def read_half(self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, half: int) -> list[torch.Tensor]:
        assert_lengths("read_half", lengths, 2, xs[0].shape[0])
        return _taken(xs, half_rows(lengths, xs[0].shape[0], half)[0])

    def copy_valid_(
        self, out: torch.Tensor, inp: torch.Tensor, lengths: torch.Tensor, real_lengths: torch.Tensor
    ) -> None:
        total = out.shape[0]
        assert_lengths("copy_valid_", lengths, 1, total, from_zero=False)
        assert_real_lengths("copy_valid_", real_lengths, lengths)
        row = torch.arange(total, device=out.device)
        located = locate(row, lengths, total)
        offset = row - located.start
        real = torch.nn.functional.pad(real_lengths.long().diff(), (0, 1))  # the tail has none
        valid = (offset >= 0) & (offset < real[located.seq])
        if out.dtype == inp.dtype:
            out, inp = bits(out), bits(inp)
        if out.device.type == "cpu":
            rows = valid.nonzero().flatten()
            out.index_copy_(0, rows, inp.index_select(0, rows).to(out.dtype))
        else:  # how many there are is not known here: every row is written, with what it holds
            out.copy_(torch.where(valid.view(-1, *[1] * (out.ndim - 1)), inp.to(out.dtype), out))

    def pad_sequences(
        self, x: torch.Tensor, real_lengths: torch.Tensor, lengths: torch.Tensor, padded_tokens: int, fill: int
    ) -> torch.Tensor:
        tokens = x.shape[0]
        assert_lengths("pad_sequences", lengths, 1, padded_tokens)
        assert_lengths("pad_sequences", real_lengths, 1, tokens)
        assert_real_lengths("pad_sequences", real_lengths, lengths)
        if tokens == 0:
            return x.new_full((padded_tokens,), fill)
        row = torch.arange(padded_tokens, device=x.device)
        located = locate(row, lengths, padded_tokens)
        bounds = torch.nn.functional.pad(real_lengths.long(), (0, 1), value=tokens)
        source = bounds[located.seq] + row - located.start
        valid = source < bounds[located.seq + 1]
        return torch.where(valid, x[source.clamp(max=tokens - 1)], fill)


def load(device: str) -> TorchKernels:
    """The kernels of attention for a device type: one for all."""
    return TorchKernels()


def load_thd(device: str) -> TorchThdKernels:
    """Those of packed sequences."""
    return TorchThdKernels()


def _taken(xs: Sequence[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    """The same rows of every tensor, bit by bit."""
    return [bits(x).index_select(0, rows).view(x.dtype) for x in xs]
