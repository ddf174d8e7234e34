"""The kernels by PyTorch's operators: any device, no compiler, some passes over memory more than the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.kernels import torch_merges
from cp_fast.kernels.torch_asserts import assert_lengths, assert_real_lengths
from cp_fast.kernels.torch_rows import half_rows, locate, rank_order_rows, sequence_order_rows, slice_rows
from cp_fast.rows import Rows

__all__ = ["TorchKernels", "load"]


class TorchKernels:
    """`cp_fast.kernels.base.Kernels`, which says what each method does."""

    name = "torch"

    # ---- lengths and indices

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

    # ---- movers

    def partition(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, cp_rank: int
    ) -> list[torch.Tensor]:
        return self.take_rows(xs, self.partition_indices(lengths, xs[0].shape[0], cp_size, cp_rank))

    def reorder(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, to_rank_order: bool
    ) -> list[torch.Tensor]:
        total = xs[0].shape[0]
        assert_lengths("reorder", lengths, 2 * cp_size, total, cp_size)
        rows_of = rank_order_rows if to_rank_order else sequence_order_rows
        return self.take_rows(xs, rows_of(lengths, total, cp_size))

    def read_half(self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, half: int) -> list[torch.Tensor]:
        assert_lengths("read_half", lengths, 2, xs[0].shape[0])
        return self.take_rows(xs, half_rows(lengths, xs[0].shape[0], half)[0])

    def read_second_half_lse(
        self, lse: torch.Tensor, lengths: torch.Tensor, lse_packed: bool, max_seqlen: int
    ) -> torch.Tensor:
        return torch_merges.read_second_half_lse(lse, lengths, lse_packed, max_seqlen)

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
            out, inp = _bits(out), _bits(inp)
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

    def take_rows(self, xs: Sequence[torch.Tensor], rows: Rows) -> list[torch.Tensor]:
        if isinstance(rows, slice):
            return [x[rows] for x in xs]
        return [_bits(x).index_select(0, rows).view(x.dtype) for x in xs]

    def put_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        for out, x in zip(outs, xs, strict=True):
            if isinstance(rows, slice):
                out[rows].copy_(x)
            else:
                _bits(out).index_copy_(0, rows.long(), _bits(x))

    def heads_to_front(self, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], heads: int) -> torch.Tensor:
        moved = _bits(x)
        count = len(moved[rows]) if isinstance(rows, slice) else len(rows)
        result = moved.new_empty(len(first_heads), count, heads, *x.shape[2:])
        for box, first in zip(result, first_heads, strict=True):
            part = moved[:, first : first + heads]
            box.copy_(part[rows] if isinstance(rows, slice) else part.index_select(0, rows))
        return result.view(x.dtype)

    def heads_to_back_(
        self, out: torch.Tensor, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], add: bool
    ) -> None:
        heads = x.shape[2]
        if add:
            wide = torch_merges.wide_dtype(out, x)
            whole = torch_merges.taken(out, rows).to(wide)
            for part, first in zip(x, first_heads, strict=True):
                whole[:, first : first + heads] += part
            torch_merges.put(out, whole, rows)
            return
        for part, first in zip(_bits(x), first_heads, strict=True):
            self.put_rows_([_bits(out)[:, first : first + heads]], [part], rows)

    # ---- arithmetic

    def merge_(
        self, out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor, rows: Rows
    ) -> None:
        torch_merges.merge_(out, lse, out_step, lse_step, rows)

    def add_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        for out, x in zip(outs, xs, strict=True):
            wide = torch_merges.wide_dtype(out, x)
            if isinstance(rows, slice) and out.dtype == wide:
                out[rows].add_(x)
            else:
                torch_merges.put(out, torch_merges.taken(out, rows).to(wide).add(x), rows)

    def lse_correction_(
        self, lse: torch.Tensor, lse_step: torch.Tensor, lengths: torch.Tensor, lse_packed: bool
    ) -> None:
        torch_merges.lse_correction_("lse_correction_", lse, lse_step, lengths, lse_packed)

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
        torch_merges.out_correction_(out, out_step, lse, lse_step, lengths, only_second_half, lse_packed)

    def grad_correction_(
        self, grad: torch.Tensor, grad_step: torch.Tensor, lengths: torch.Tensor, first_half: str, second_half: str
    ) -> None:
        torch_merges.grad_correction_(grad, grad_step, lengths, first_half, second_half)


def load(device: str) -> TorchKernels:
    """The implementation for a device type: one for all."""
    return TorchKernels()


def _bits(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes: not every operator that moves knows them."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.element_size() == 1 else x
