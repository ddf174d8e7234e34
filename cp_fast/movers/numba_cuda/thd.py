"""`cp_fast.movers.base_thd.ThdKernels` over the Numba kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.movers.numba_cuda.launch import launch
from cp_fast.movers.numba_cuda.lengths import held_kernel, indices_kernel, lse_half_kernel, pad_kernel
from cp_fast.movers.numba_cuda.movers import THREADS
from cp_fast.movers.numba_cuda.moves import moves_of
from cp_fast.movers.numba_cuda.plans import gathered, lengths_plan, move
from cp_fast.movers.numba_cuda.sums import pairs_, weigh_

__all__ = ["NumbaThdKernels"]

ANY = 2**62
ACTIONS = {"none": 0, "add": 1, "copy": 2}


class NumbaThdKernels:
    """`cp_fast.movers.base_thd.ThdKernels`, which says what each method does."""

    name = "numba"

    def partition_indices(self, lengths: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
        out = lengths.new_empty(total_tokens // cp_size)
        if out.numel():
            plan = lengths_plan(lengths, total_tokens, cp_size, cp_rank)
            kernel = indices_kernel(out.element_size())
            launch(kernel, out.device, _blocks(len(out)), out.data_ptr(), plan, len(out), 2 * cp_size, cp_size)
        return out

    def rank_lengths(
        self,
        real_lengths: torch.Tensor,
        lengths: torch.Tensor,
        cp_size: int,
        cp_rank: int,
        first_half: bool,
        second_half: bool,
    ) -> torch.Tensor:
        held = torch.empty_like(real_lengths)
        plan = lengths_plan(lengths, ANY, other=real_lengths)
        early, late = cp_rank if first_half else -1, 2 * cp_size - 1 - cp_rank if second_half else -1
        kernel = held_kernel(held.element_size())
        launch(kernel, held.device, _blocks(len(held)), held.data_ptr(), plan, cp_size, early, late)
        return torch.cumsum(held, 0, dtype=held.dtype)

    def partition(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, cp_rank: int
    ) -> list[torch.Tensor]:
        total = xs[0].shape[0]
        plan = lengths_plan(lengths, total, cp_size, cp_rank)
        return gathered("partition", "partition", xs, total // cp_size, plan, 2 * cp_size, cp_size)

    def reorder(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, to_rank_order: bool
    ) -> list[torch.Tensor]:
        total = xs[0].shape[0]
        kind = "to_rank_order" if to_rank_order else "to_sequence_order"
        return gathered("reorder", kind, xs, total, lengths_plan(lengths, total, cp_size), 2 * cp_size, cp_size)

    def read_half(self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, half: int) -> list[torch.Tensor]:
        total = xs[0].shape[0]
        return gathered("read_half", "half", xs, total // 2, lengths_plan(lengths, total, half), 2, 2)

    def read_second_half_lse(
        self, lse: torch.Tensor, lengths: torch.Tensor, lse_packed: bool, max_seqlen: int
    ) -> torch.Tensor:
        out = lse.new_empty(*lse.shape[:-1], max_seqlen)
        if out.numel():
            plan = lengths_plan(lengths, min(lse.shape[-1], 2 * max_seqlen) if lse_packed else ANY)
            rows = max_seqlen * (1 if lse_packed else len(lengths) - 1)
            kernel = lse_half_kernel(lse.element_size(), lse_packed)
            ends = [(x.data_ptr(), *_strides(x, lse_packed)) for x in (out, lse)]
            heads = lse.shape[-2]
            launch(kernel, out.device, _blocks(rows), plan, max_seqlen, heads, ends[0], (*ends[1], lse.shape[-1]))
        return out

    def copy_valid_(
        self, out: torch.Tensor, inp: torch.Tensor, lengths: torch.Tensor, real_lengths: torch.Tensor
    ) -> None:
        plan = lengths_plan(lengths, out.shape[0], other=real_lengths)
        if out.dtype != inp.dtype:
            pairs_("copy_valid_", "valid", [(out, inp)], out.shape[0], plan)
        elif out.numel():
            moves = list(moves_of(inp, out))
            move("copy_valid_", "valid", False, moves, out.shape[0], plan, out.device)

    def pad_sequences(
        self, x: torch.Tensor, real_lengths: torch.Tensor, lengths: torch.Tensor, padded_tokens: int, fill: int
    ) -> torch.Tensor:
        out = x.new_empty(padded_tokens)
        if padded_tokens:
            plan, size = lengths_plan(lengths, padded_tokens, other=real_lengths), x.element_size()
            ends = out.data_ptr(), x.data_ptr(), x.stride(0) * size
            launch(pad_kernel(size), x.device, _blocks(padded_tokens), *ends, x.shape[0], plan, fill)
        return out

    def lse_correction_(
        self, lse: torch.Tensor, lse_step: torch.Tensor, lengths: torch.Tensor, lse_packed: bool
    ) -> None:
        step_columns = lse_step.shape[-1]
        if lse_packed:
            kind, count, plan = "half", step_columns, lengths_plan(lengths, lse.shape[1])
        else:
            kind, count, plan = "padded", (len(lengths) - 1) * step_columns, lengths_plan(lengths, ANY, step_columns)
        weigh_("lse_correction_", kind, False, None, None, lse, lse_step, lse_packed, count, plan)

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
        kind, plan = "half" if only_second_half else "whole", lengths_plan(lengths, out.shape[0])
        weigh_("out_correction_", kind, True, out, out_step, lse, lse_step, lse_packed, len(out_step), plan)

    def grad_correction_(
        self, grad: torch.Tensor, grad_step: torch.Tensor, lengths: torch.Tensor, first_half: str, second_half: str
    ) -> None:
        actions = ACTIONS[first_half], ACTIONS[second_half]
        pairs = [(grad, grad_step)] if grad.ndim < 4 else list(zip(grad, grad_step, strict=True))
        plan = lengths_plan(lengths, pairs[0][0].shape[0], *actions)
        plan = (*plan[:3], int("none" in (first_half, second_half)), *plan[4:])
        pairs_("grad_correction_", "halves", pairs, pairs[0][0].shape[0], plan)


def _strides(lse: torch.Tensor, packed: bool) -> tuple[int, int, int]:
    """Of sequences, heads and rows, in bytes."""
    size = lse.element_size()
    return (0 if packed else lse.stride(0) * size, lse.stride(-2) * size, lse.stride(-1) * size)


def _blocks(rows: int) -> int:
    return -(-rows // THREADS)
