"""The corrections of a ring step's halves, by PyTorch's operators.

Rows that are no target (padding behind the sequences, the tail) are written with the bits that they hold: how many
rows are targets is a value on the device, and nobody waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_fast.movers.torch_asserts import assert_lengths
from cp_fast.movers.torch_merges import wide_dtype
from cp_fast.movers.torch_rows import half_rows, locate

__all__ = ["TorchCorrections"]

INF = float("inf")


class TorchCorrections:
    """The corrections among the methods of `cp_fast.movers.base_thd.ThdKernels`, which says what each does."""

    def lse_correction_(
        self, lse: torch.Tensor, lse_step: torch.Tensor, lengths: torch.Tensor, lse_packed: bool
    ) -> None:
        if len(lengths) == 1 or not lse_step.numel():
            return
        if lse_packed:
            assert_lengths("lse_correction_", lengths, 2, lse.shape[1])
            row = torch.arange(lse.shape[1], device=lse.device)
            located = locate(row, lengths, lse.shape[1])
            offset = row - located.start - located.size // 2
            valid = (offset >= 0) & (located.seq < len(lengths) - 1)
            of_step = (located.start // 2 + offset).clamp(0, lse_step.shape[1] - 1)
            step = lse_step.index_select(1, of_step)
        else:
            assert_lengths("lse_correction_", lengths, 2, torch.iinfo(torch.int64).max)
            half = (lengths.long().diff() // 2)[:, None, None]
            offset = torch.arange(lse.shape[2], device=lse.device) - half
            valid = (offset >= 0) & (offset < half)
            of_step = offset.clamp(0, lse_step.shape[2] - 1).expand(-1, lse.shape[1], -1)
            step = lse_step.gather(2, of_step)
        lse.copy_(torch.where(valid, torch.logaddexp(lse, step).to(lse.dtype), lse))

    def read_second_half_lse(
        self, lse: torch.Tensor, lengths: torch.Tensor, lse_packed: bool, max_seqlen: int
    ) -> torch.Tensor:
        result = lse.new_zeros(*lse.shape[:-1], max_seqlen)
        if not result.numel() or len(lengths) == 1 or not lse.shape[-1]:
            return result
        row = torch.arange(max_seqlen, device=lse.device)
        if lse_packed:
            assert_lengths("read_second_half_lse", lengths, 2, min(lse.shape[1], 2 * max_seqlen))
            located = locate(2 * row, lengths, max(2 * max_seqlen, lse.shape[1]))
            valid = located.seq < len(lengths) - 1
            source = (located.start // 2 + located.size // 2 + row).clamp(max=lse.shape[1] - 1)
            return torch.where(valid, lse.index_select(1, source), result)
        assert_lengths("read_second_half_lse", lengths, 2, torch.iinfo(torch.int64).max)
        half = (lengths.long().diff() // 2)[:, None, None]
        source = (half + row).clamp(max=lse.shape[2] - 1).expand(-1, lse.shape[1], -1)
        return torch.where(row < half, lse.gather(2, source), result)

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
        of = _halves(lengths, out.shape[0], 1) if only_second_half else _whole(lengths, out.shape[0])
        if len(lengths) == 1 or not len(of.rows):
            return
        final, step = (_lse_of(x, at, lse_packed) for x, at in ((lse, of.whole), (lse_step, of.step)))
        wide = wide_dtype(out, out_step, lse, lse_step)
        weight = torch.exp(step.to(wide) - final.to(wide))[..., None]
        part = (weight * out_step).masked_fill((step == -INF)[..., None], 0.0)
        before = out.index_select(0, of.rows)
        total = (before + part).to(out.dtype)
        out.index_copy_(0, of.rows, torch.where(of.valid[:, None, None], total, before))

    def grad_correction_(
        self, grad: torch.Tensor, grad_step: torch.Tensor, lengths: torch.Tensor, first_half: str, second_half: str
    ) -> None:
        axis = 1 if grad.ndim == 4 else 0
        target, source = grad.movedim(axis, 0), grad_step.movedim(axis, 0)
        idle = "none" in (first_half, second_half)
        for half, action in enumerate((first_half, second_half)):
            if action == "none":
                continue
            of = _halves(lengths, target.shape[0], half)
            step = source if idle else source.index_select(0, of.rows)
            before = target.index_select(0, of.rows)
            if action == "add":
                wide = wide_dtype(grad, grad_step)
                step = before.to(wide) + step.to(wide)
            valid = of.valid.view(-1, *[1] * (target.ndim - 1))
            target.index_copy_(0, of.rows, torch.where(valid, step.to(grad.dtype), before))


class TargetRows(NamedTuple):
    """Rows of an accumulator, distinct, int64 [n], some of which are meant; where their LSE lies, and a step's."""

    rows: torch.Tensor
    valid: torch.Tensor  # bool [n]: not the tail
    whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # row, sequence, position
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _halves(lengths: torch.Tensor, tokens: int, half: int) -> TargetRows:
    """One half of every sequence."""
    assert_lengths("halves", lengths, 2, tokens)
    rows, located = half_rows(lengths, tokens, half)
    step_row = torch.arange(len(rows), device=rows.device)
    sequence = located.seq.clamp(max=max(len(lengths) - 2, 0))
    whole, step = (rows, sequence, rows - located.start), (step_row, sequence, step_row - located.start // 2)
    return TargetRows(rows, located.seq < len(lengths) - 1, whole, step)


def _whole(lengths: torch.Tensor, tokens: int) -> TargetRows:
    """Every row."""
    assert_lengths("out_correction_", lengths, 1, tokens)
    rows = torch.arange(tokens, device=lengths.device)
    located = locate(rows, lengths, tokens)
    place = rows, located.seq.clamp(max=max(len(lengths) - 2, 0)), rows - located.start
    return TargetRows(rows, located.seq < len(lengths) - 1, place, place)


def _lse_of(
    lse: torch.Tensor, place: tuple[torch.Tensor, torch.Tensor, torch.Tensor], lse_packed: bool
) -> torch.Tensor:
    """The LSE of some rows, [n, h]."""
    row, sequence, position = place
    if lse_packed:
        return lse.index_select(1, row).t()
    if not lse.shape[2]:  # all sequences are empty, and these rows tail
        return lse.new_full((len(row), lse.shape[1]), -INF)
    return lse.transpose(1, 2)[sequence, position.clamp(0, lse.shape[2] - 1)]
