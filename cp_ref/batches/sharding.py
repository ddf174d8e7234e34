"""Cutting global tensors into the ranks' slices, and putting them together again: one code for both packages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from cp_ref.batches.tensors import (
    as_integers,
    check_usable,
    differentiable_once,
    filled,
    like_slice,
    read_device,
    read_fill,
    taken,
)
from cp_ref.calls.plan_arguments import Plan
from cp_ref.groups.agreement import agreed, collective
from cp_ref.groups.collectives import all_gather, all_to_all
from cp_ref.groups.context import ContextParallel
from cp_ref.groups.group import PairGroup, Parcel
from cp_ref.problems.call_checks import check_context, local_part
from cp_ref.problems.cuts import Cut, Gathering, read_cut, read_gathering, read_positions, roll_of, sequences_of
from cp_ref.schedules.table import Column
from cp_ref.schedules.values import MOST, read_count

__all__ = [
    "gathered",
    "in_format",
    "lined_up",
    "numbers",
    "position_ids",
    "positions_on",
    "roll",
    "rolled",
    "rows_axis",
    "shard",
    "slice_of",
    "unshard",
]


def numbers(values: Column, device: torch.device) -> torch.Tensor:
    """A column of integers on a device, int64."""
    return torch.as_tensor(values, dtype=torch.int64, device="cpu").to(device)


def slice_of(x: torch.Tensor, cut: Cut, rank: int, fill_value: float) -> torch.Tensor:
    """One rank's slice of a global tensor. Differentiable."""
    axis, rows = rows_axis(cut), lined_up(x, cut)
    if (missing := cut.cp_size * cut.rows * (cut.batch or 1) - rows.shape[axis]) > 0:
        shape = list(rows.shape)
        shape[axis] = missing
        rows = torch.cat([rows, filled(rows, shape, fill_value)], axis)
    return in_format(taken(rows, axis, numbers(cut.of(rank), x.device)), cut)


def gathered(x: torch.Tensor, cut: Cut, cp: ContextParallel) -> torch.Tensor:
    """The global tensor of which this rank has slice x. Collective, as its backward pass is."""
    rows = lined_up(x, cut)
    index = [numbers(cut.of(rank), x.device) for rank in range(cp.size)]
    whole = cast(Any, _Gather).apply(rows, cp, rows_axis(cut), index)  # torch leaves apply untyped
    return in_format(whole.narrow(rows_axis(cut), 0, cut.size * (cut.batch or 1)), cut)


def positions_on(device: torch.device | str | None, cp: ContextParallel, plan: Any, *lengths: Any) -> torch.Tensor:
    """The result of `position_ids`; lengths: its arguments for `read_positions`."""
    positions = read_positions(cp, plan, *lengths)
    where = read_device(("cpu" if plan is None else plan.device) if device is None else device)
    check_usable(where)
    return numbers(positions, where)


class _Gather(torch.autograd.Function):
    """Every rank's slice into its rows; backward: all ranks' gradients of this rank's rows, added up in rank order."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cp: ContextParallel, axis: int, index: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        ctx.cp, ctx.axis, ctx.index = cp, axis, index
        shape = list(x.shape)
        shape[axis] *= cp.size
        whole = as_integers(x.new_empty(shape))
        with cp.naming_errors("unshard"):
            parts = all_gather(cp.comm, as_integers(x))
        for rows, part in zip(index, parts, strict=True):
            whole.index_copy_(axis, rows, part)
        return whole if whole.dtype == x.dtype else whole.view(x.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = [grads[0].index_select(ctx.axis, rows) for rows in ctx.index]
        with ctx.cp.naming_errors("unshard, backward"):
            total, *others = all_to_all(ctx.cp.comm, parts)
        for other in others:
            total = total + other
        return total, None, None, None


def rows_axis(cut: Cut) -> int:
    """The axis of a lined-up tensor that has its rows."""
    return 1 if cut.batch is None and cut.qkv_format == "bshd" else 0


def lined_up(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The tensor with all rows that are cut as one on one axis."""
    if cut.batch is None:
        return x
    return (x if cut.qkv_format == "bshd" else x.transpose(0, 1)).flatten(0, 1)


def in_format(rows: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The inverse of `lined_up`, contiguous."""
    if cut.batch is None:
        return rows.contiguous()
    x = rows.reshape(cut.batch, len(rows) // max(cut.batch, 1), *rows.shape[1:])
    return (x if cut.qkv_format == "bshd" else x.transpose(0, 1)).contiguous()


Numbers = tuple[torch.Tensor, ...]


def rolled(
    x: torch.Tensor, cut: Cut, starts: Column, shifts: int, fill_value: float, cp: ContextParallel
) -> torch.Tensor:
    """This rank's slice of the shifted tensor, of which it has slice x. Collective, as its backward pass is."""
    roll = roll_of(cut, starts, shifts, cp.rank)
    sends, recvs = (tuple(numbers(rows, x.device) for rows in side) for side in (roll.sends, roll.recvs))
    flat = lined_up(x, cut).movedim(rows_axis(cut), 0)
    moved = cast(Any, _Roll).apply(flat, cp, sends, recvs, roll.most, fill_value)  # torch leaves apply untyped
    return in_format(moved.movedim(0, rows_axis(cut)), cut)


class _Roll(torch.autograd.Function):
    """Rows to the ranks that take them; backward: their gradients to the ranks that had them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cp: ContextParallel, sends: Numbers, recvs: Numbers, most: int, fill: float
    ) -> torch.Tensor:  # fmt: skip
        ctx.cp, ctx.sends, ctx.recvs, ctx.most = cp, sends, recvs, most
        with cp.naming_errors("roll"):
            return _moved(x.detach(), cp, sends, recvs, most, fill)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with ctx.cp.naming_errors("roll, backward"):
            grad = _moved(grads[0], ctx.cp, ctx.recvs, ctx.sends, ctx.most, 0)
        return grad, *[None] * 5


def _moved(
    x: torch.Tensor, cp: ContextParallel, sends: Numbers, recvs: Numbers, most: int, fill: float
) -> torch.Tensor:
    """Rows `sends[r]` of x go to rank r, rows `recvs[r]` of the result come from it, and all others are `fill`."""
    group, filled = cp.comm, torch.full_like(x, fill, memory_format=torch.contiguous_format)
    x, result = as_integers(x), as_integers(filled)  # the same memory
    result.index_copy_(0, recvs[cp.rank], x.index_select(0, sends[cp.rank]))
    if isinstance(group, PairGroup):  # Two hops need parts of one size.
        parts = [x.new_zeros(most, *x.shape[1:]) for _ in sends]
        for part, rows in zip(parts, sends, strict=True):
            part[: len(rows)] = x.index_select(0, rows)[:most]
        buffers = all_to_all(group, parts) if most else parts
    else:
        buffers = [x.new_empty(len(rows), *x.shape[1:]) for rows in recvs]
        group.exchange(
            [Parcel(r, 0, x.index_select(0, rows)) for r, rows in enumerate(sends) if len(rows) and r != cp.rank],
            [Parcel(r, 0, buffers[r]) for r, rows in enumerate(recvs) if len(rows) and r != cp.rank],
        ).wait()
    for r, rows in enumerate(recvs):
        if r != cp.rank:
            result.index_copy_(0, rows, buffers[r][: len(rows)])
    return filled


def shard(
    x: torch.Tensor,
    *,
    cp: ContextParallel,
    qkv_format: str = "bshd",
    cu_seqlens_padded: torch.Tensor | None = None,
    plan: Plan | None = None,
    fill_value: float = 0,
) -> torch.Tensor:
    """Cut this rank's slice out of a global tensor that every rank has whole.

    Args:
        x: any plain tensor with the format's sequence axis: token ids [b, s] (bshd), activations [s, b, d] (sbhd),
            packed [t, ...] (thd). Of a DTensor give the whole, `x.full_tensor()`.
        cp, qkv_format: as in `attention`.
        cu_seqlens_padded: thd only, GLOBAL, int32 or int64 [b + 1]. Tokens after the last of them are the tail, which
            fills the slices up, after each rank's own tokens.
        plan: gives format, lengths and layout of the query side instead; layout "balanced" needs it.
        fill_value: the value of rows of a slice without a token: for labels -100, which cross entropy ignores. A
            number of x's dtype; a float may be rounded.

    Returns:
        The slice, contiguous, of ceil(t / cp_size) tokens in thd. Where s does not divide (by 2 * cp_size in
        dual_chunk, by cp_size in the others) a sequence of bshd and sbhd is cut as if padded at its end until it does.
        `attention` then needs a padding mask, or a plan that gives the end of the sequence; only causal self-attention
        does not. Differentiable: the gradient of x is the slice's, in its place, and zero elsewhere.

    Raises:
        ValueError, TypeError: lengths that do not fit x, are not the format's, or are given together with a plan;
        fill_value is no number of x's dtype; x is a DTensor.

    >>> from cp_ref import SimGroup
    >>> ids = torch.arange(8)[None]                                                # b 1, s 8: chunks 01 23 45 67
    >>> SimGroup(2).run(lambda member: shard(ids, cp=ContextParallel(member)).tolist())
    [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    """
    check_context(cp, ContextParallel)
    cut = read_cut(cp, plan, x, qkv_format, cu_seqlens_padded, whole=True)
    fill = read_fill("fill_value", fill_value, x.dtype)
    if plan is None and cut.qkv_format != "thd" and cut.size < cut.rows * cp.size:
        cp.uneven[cut.rows] = cut.size
    return slice_of(x, cut, cp.rank, fill)


@collective()
def unshard(
    x: torch.Tensor,
    *,
    cp: ContextParallel,
    qkv_format: str = "bshd",
    cu_seqlens_padded: torch.Tensor | None = None,
    seqlen: int | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Put the global tensor together, on every rank, from every rank's slice: the inverse of `shard`. Collective.

    Differentiable, and so also collective in the backward pass: every rank's global tensor depends on a slice, so the
    gradient of the slice is the sum over all ranks of the gradients of its place. So if every rank computes the same
    loss from the global tensor, gradients are cp_size times those of that loss.

    Args:
        x: this rank's slice, as `shard` gives it; alike on all ranks. A DTensor is taken as its local part if the
            context's group shards its sequence and the layout is "contiguous"; the result is a plain tensor.
        cp, qkv_format, cu_seqlens_padded, plan: as in `shard`.
        seqlen: bshd and sbhd only: the global sequence length, where it does not divide. By default the result has
            cp_size times the rows of x. If `shard` has cut another length into slices of this size with this context,
            the length of x is unknown, and seqlen is needed.

    Returns:
        The global tensor. In thd it has exactly the tokens of the sequences, or, if slices are longer because of a
        tail, cp_size times the rows of x.

    Raises:
        ValueError: the ranks' slices differ in shape or dtype, or some require gradients and others do not (on every
            rank); a length that is needed is not given; or as `shard`.

    >>> from cp_ref import SimGroup
    >>> ids = torch.arange(8)
    >>> cu = torch.tensor([0, 8])
    >>> def there_and_back(member):
    ...     cp = ContextParallel(member, layout="contiguous")
    ...     mine = shard(ids, cp=cp, qkv_format="thd", cu_seqlens_padded=cu)
    ...     return unshard(mine, cp=cp, qkv_format="thd", cu_seqlens_padded=cu).tolist()
    >>> SimGroup(2).run(there_and_back)
    [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
    """
    check_context(cp, ContextParallel)

    def read() -> tuple[Cut, Gathering]:
        wanted = torch.is_grad_enabled()
        return read_gathering(cp, plan, x, qkv_format, cu_seqlens_padded, seqlen, with_grad=wanted)

    cut, _ = agreed(cp, "unshard", read, lambda found: found[1])
    return gathered(local_part(x), cut, cp)


@collective()
def roll(
    x: torch.Tensor,
    shifts: int,
    *,
    cp: ContextParallel,
    qkv_format: str = "bshd",
    cu_seqlens_padded: torch.Tensor | None = None,
    seqlen: int | None = None,
    plan: Plan | None = None,
    fill_value: float = 0,
) -> torch.Tensor:
    """Shift every sequence inside itself, across ranks: the next token as label, hidden states for multi-token
    prediction. Collective; only the rows that change ranks travel.

    Args:
        x: this rank's slice, as `shard` gives it; alike on all ranks. A DTensor is taken as by `unshard`, and the
            result is a DTensor placed like it.
        shifts: as in `torch.roll`: row i of a sequence goes to row i + shifts; -1 gives every token the next one.
        cp, qkv_format, cu_seqlens_padded, seqlen, plan: as in `unshard`.
        fill_value: the value of rows whose source is outside the sequence (padding belongs to it), and of the tail.

    Returns:
        The slice of the shifted tensor, contiguous, of x's shape and dtype. Differentiable: gradients go back to the
        moved rows, so the backward pass is also collective.

    Raises:
        ValueError, TypeError: as `unshard`; shifts or fill_value is no number of x's dtype, or not the same on all
            ranks (on every rank).

    >>> from cp_ref import SimGroup
    >>> ids = torch.arange(8)[None]                                                # b 1, s 8: chunks 01 23 45 67
    >>> def next_tokens(member):
    ...     cp = ContextParallel(member)
    ...     return roll(shard(ids, cp=cp), -1, cp=cp, fill_value=-100).tolist()
    >>> SimGroup(2).run(next_tokens)
    [[[1, 2, 7, -100]], [[3, 4, 5, 6]]]
    """
    check_context(cp, ContextParallel)

    def how() -> tuple[int, float]:
        return read_count("shifts", shifts, at_least=-MOST), read_fill("fill_value", fill_value, x.dtype)

    def read() -> tuple[Cut, Gathering]:
        wanted = torch.is_grad_enabled()
        return read_gathering(cp, plan, x, qkv_format, cu_seqlens_padded, seqlen, how, with_grad=wanted)

    cut, _ = agreed(cp, "roll", read, lambda found: found[1])
    starts = sequences_of(cut, plan, cu_seqlens_padded)
    return like_slice(x, rolled(local_part(x), cut, starts, *how(), cp))


def position_ids(
    *,
    cp: ContextParallel,
    qkv_format: str = "bshd",
    seqlen: int | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    plan: Plan | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    """Return a rank's positions inside each sequence, for RoPE.

    Args:
        cp, qkv_format: as in `attention`.
        seqlen: bshd and sbhd only: the global sequence length.
        cu_seqlens_padded: thd only: GLOBAL, int32 or int64 [b + 1].
        device: where the positions are made; by default the CPU, or the plan's.
        plan: gives format, lengths and layout instead; layout "balanced" needs it.
        rank: the rank of the positions; this rank by default.

    Returns:
        int64, one per row of the slice: [s/cp] for bshd and sbhd, [t/cp] for thd, rounded up; 0 where thd has no token.
        With a plan in bshd or sbhd whose layout does not cut all sequences alike, [b, s/cp] or [s/cp, b].

    Raises:
        ValueError, TypeError: the lengths are missing, or do not belong to the format.

    >>> from cp_ref import SimGroup
    >>> SimGroup(2).run(lambda member: position_ids(cp=ContextParallel(member), seqlen=8).tolist())
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    check_context(cp, ContextParallel)
    return positions_on(device, cp, plan, qkv_format, seqlen, cu_seqlens_padded, rank)
