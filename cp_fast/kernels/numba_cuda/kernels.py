"""The kernels' interface over the Numba kernels: addresses, strides and grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cp_fast.kernels.numba_cuda.launch import launch
from cp_fast.kernels.numba_cuda.lengths import held_kernel, indices_kernel, lse_half_kernel, pad_kernel
from cp_fast.kernels.numba_cuda.movers import THREADS, move_kernel
from cp_fast.kernels.numba_cuda.moves import Move, moves_of, rows_per_block, table_of, word_size
from cp_fast.kernels.numba_cuda.sums import add_heads_, pairs_, weigh_
from cp_fast.rows import Rows

__all__ = ["NumbaKernels"]

MOST_MOVES = 16  # in one launch: arguments are 4 KB at most
ANY = 2**62
ACTIONS = {"none": 0, "add": 1, "copy": 2}


class NumbaKernels:
    """`cp_fast.kernels.base.Kernels`, which says what each method does."""

    name = "numba"

    # ---- lengths and indices

    def partition_indices(self, lengths: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
        out = lengths.new_empty(total_tokens // cp_size)
        if out.numel():
            plan = _plan(lengths, total_tokens, cp_size, cp_rank)
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
        plan = _plan(lengths, ANY, other=real_lengths)
        early, late = cp_rank if first_half else -1, 2 * cp_size - 1 - cp_rank if second_half else -1
        kernel = held_kernel(held.element_size())
        launch(kernel, held.device, _blocks(len(held)), held.data_ptr(), plan, cp_size, early, late)
        return torch.cumsum(held, 0, dtype=held.dtype)

    # ---- movers

    def partition(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, cp_rank: int
    ) -> list[torch.Tensor]:
        total = xs[0].shape[0]
        plan = _plan(lengths, total, cp_size, cp_rank)
        return _gathered("partition", "partition", xs, total // cp_size, plan, 2 * cp_size, cp_size)

    def reorder(
        self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, cp_size: int, to_rank_order: bool
    ) -> list[torch.Tensor]:
        total = xs[0].shape[0]
        kind = "to_rank_order" if to_rank_order else "to_sequence_order"
        return _gathered("reorder", kind, xs, total, _plan(lengths, total, cp_size), 2 * cp_size, cp_size)

    def read_half(self, xs: Sequence[torch.Tensor], lengths: torch.Tensor, half: int) -> list[torch.Tensor]:
        total = xs[0].shape[0]
        return _gathered("read_half", "half", xs, total // 2, _plan(lengths, total, half), 2, 2)

    def read_second_half_lse(
        self, lse: torch.Tensor, lengths: torch.Tensor, lse_packed: bool, max_seqlen: int
    ) -> torch.Tensor:
        out = lse.new_empty(*lse.shape[:-1], max_seqlen)
        if out.numel():
            plan = _plan(lengths, min(lse.shape[-1], 2 * max_seqlen) if lse_packed else ANY)
            rows = max_seqlen * (1 if lse_packed else len(lengths) - 1)
            kernel = lse_half_kernel(lse.element_size(), lse_packed)
            ends = [(x.data_ptr(), *_strides(x, lse_packed)) for x in (out, lse)]
            heads = lse.shape[-2]
            launch(kernel, out.device, _blocks(rows), plan, max_seqlen, heads, ends[0], (*ends[1], lse.shape[-1]))
        return out

    def copy_valid_(
        self, out: torch.Tensor, inp: torch.Tensor, lengths: torch.Tensor, real_lengths: torch.Tensor
    ) -> None:
        plan = _plan(lengths, out.shape[0], other=real_lengths)
        if out.dtype != inp.dtype:
            pairs_("copy_valid_", "valid", [(out, inp)], out.shape[0], plan)
        elif out.numel():
            moves = list(moves_of(inp, out))
            _move("copy_valid_", "valid", False, moves, out.shape[0], plan, out.device)

    def pad_sequences(
        self, x: torch.Tensor, real_lengths: torch.Tensor, lengths: torch.Tensor, padded_tokens: int, fill: int
    ) -> torch.Tensor:
        out = x.new_empty(padded_tokens)
        if padded_tokens:
            plan, size = _plan(lengths, padded_tokens, other=real_lengths), x.element_size()
            ends = out.data_ptr(), x.data_ptr(), x.stride(0) * size
            launch(pad_kernel(size), x.device, _blocks(padded_tokens), *ends, x.shape[0], plan, fill)
        return out

    def take_rows(self, xs: Sequence[torch.Tensor], rows: Rows) -> list[torch.Tensor]:
        if isinstance(rows, slice):
            return [x[rows] for x in xs]
        return _gathered("take_rows", "index", xs, len(rows), _row_plan(rows, xs[0].shape[0])[2])

    def put_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        kind, count, plan = _row_plan(rows, outs[0].shape[0])
        moves = [m for out, x in zip(outs, xs, strict=True) if x.numel() for m in moves_of(x, out)]
        _move("put_rows_", kind, True, moves, count, plan, outs[0].device)

    def heads_to_front(self, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], heads: int) -> torch.Tensor:
        kind, count, plan = _row_plan(rows, x.shape[0])
        out = x.new_empty(len(first_heads), count, heads, *x.shape[2:])
        parts = zip(out, first_heads, strict=True)
        if out.numel():
            moves = [m for part, first in parts for m in moves_of(x[:, first : first + heads], part)]
            _move("heads_to_front", kind, False, moves, count, plan, x.device)
        return out

    def heads_to_back_(
        self, out: torch.Tensor, x: torch.Tensor, rows: Rows, first_heads: Sequence[int], add: bool
    ) -> None:
        kind, count, plan = _row_plan(rows, out.shape[0])
        if not x.numel():
            return
        if add:
            add_heads_(out, x, kind, count, plan, tuple(first_heads))
            return
        parts = zip(x, first_heads, strict=True)
        moves = [m for part, first in parts for m in moves_of(part, out[:, first : first + x.shape[2]])]
        _move("heads_to_back_", kind, True, moves, count, plan, out.device)

    # ---- arithmetic

    def merge_(
        self, out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor, rows: Rows
    ) -> None:
        kind, count, plan = _row_plan(rows, out.shape[0])
        weigh_("merge_", kind, False, out, out_step, lse, lse_step, True, count, plan)

    def add_rows_(self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows) -> None:
        kind, count, plan = _row_plan(rows, outs[0].shape[0])
        pairs_("add_rows_", kind, list(zip(outs, xs, strict=True)), count, plan)

    def lse_correction_(
        self, lse: torch.Tensor, lse_step: torch.Tensor, lengths: torch.Tensor, lse_packed: bool
    ) -> None:
        step_columns = lse_step.shape[-1]
        if lse_packed:
            kind, count, plan = "half", step_columns, _plan(lengths, lse.shape[1])
        else:
            kind, count, plan = "padded", (len(lengths) - 1) * step_columns, _plan(lengths, ANY, step_columns)
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
        kind, plan = "half" if only_second_half else "whole", _plan(lengths, out.shape[0])
        weigh_("out_correction_", kind, True, out, out_step, lse, lse_step, lse_packed, len(out_step), plan)

    def grad_correction_(
        self, grad: torch.Tensor, grad_step: torch.Tensor, lengths: torch.Tensor, first_half: str, second_half: str
    ) -> None:
        actions = ACTIONS[first_half], ACTIONS[second_half]
        pairs = [(grad, grad_step)] if grad.ndim < 4 else list(zip(grad, grad_step, strict=True))
        plan = _plan(lengths, pairs[0][0].shape[0], *actions)
        plan = (*plan[:3], int("none" in (first_half, second_half)), *plan[4:])
        pairs_("grad_correction_", "halves", pairs, pairs[0][0].shape[0], plan)


def _plan(
    lengths: torch.Tensor, tokens: int, a: int = 0, b: int = 0, other: torch.Tensor | None = None
) -> tuple[int, ...]:
    """See `maps`."""
    assert lengths.is_contiguous(), "lengths are dense"
    assert other is None or other.is_contiguous(), "real lengths are dense"
    beside = (0, 0) if other is None else (other.data_ptr(), int(other.dtype == torch.int64))
    return lengths.data_ptr(), int(lengths.dtype == torch.int64), len(lengths) - 1, *beside, tokens, a, b


def _row_plan(rows: Rows, tokens: int) -> tuple[str, int, tuple[int, ...]]:
    """(kind, count, plan) of rows that the caller gives."""
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(tokens)
        return "span", max(stop - start, 0), (0, 0, 0, 0, 0, tokens, start, 0)
    assert rows.is_contiguous()
    return "index", len(rows), (rows.data_ptr(), int(rows.dtype == torch.int64), 0, 0, 0, tokens, 0, 0)


def _gathered(
    helper: str,
    kind: str,
    xs: Sequence[torch.Tensor],
    count: int,
    plan: tuple[int, ...],
    divisor: int = 1,
    tail_divisor: int = 1,
) -> list[torch.Tensor]:
    """Rows of each x, in new tensors."""
    outs = [x.new_empty(count, *x.shape[1:]) for x in xs]
    moves = [m for x, out in zip(xs, outs, strict=True) if out.numel() for m in moves_of(x, out)]
    _move(helper, kind, False, moves, count, plan, xs[0].device, divisor, tail_divisor)
    return outs


def _move(
    helper: str,
    kind: str,
    scatter: bool,
    moves: Sequence[Move],
    count: int,
    plan: tuple[int, ...],
    device: torch.device,
    divisor: int = 1,
    tail_divisor: int = 1,
) -> None:
    if not moves or not count:
        return
    size = word_size(moves)
    kernel: Callable[..., Any] = move_kernel(helper, kind, scatter, size)
    for at in range(0, len(moves), MOST_MOVES):
        some = moves[at : at + MOST_MOVES]
        rows = rows_per_block(some)
        arguments = table_of(some, size), plan, count, divisor, tail_divisor, rows
        launch(kernel, device, -(-count // rows), *arguments, layers=len(some))


def _strides(lse: torch.Tensor, packed: bool) -> tuple[int, int, int]:
    """Of sequences, heads and rows, in bytes."""
    size = lse.element_size()
    return (0 if packed else lse.stride(0) * size, lse.stride(-2) * size, lse.stride(-1) * size)


def _blocks(rows: int) -> int:
    return -(-rows // THREADS)
