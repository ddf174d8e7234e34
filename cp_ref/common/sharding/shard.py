"""Cutting global tensors into the ranks' slices, and putting them together again: one code for both packages."""

from __future__ import annotations

import torch

from cp_ref.common.collective_calls import collective, tell_context
from cp_ref.common.context import ContextParallel
from cp_ref.common.plan_arguments import Plan
from cp_ref.common.sharding.cut_tensors import gathered, positions_on, slice_of
from cp_ref.common.sharding.roll_tensors import rolled
from cp_ref.spec import agreed_cut, check_context, read_cut, read_fill, sequences_of

__all__ = ["position_ids", "roll", "shard", "unshard"]


def shard(
    x: torch.Tensor,
    *,
    cp: ContextParallel,
    qkv_format: str = "bshd",
    cu_seqlens_padded: torch.Tensor | None = None,
    plan: Plan | None = None,
    fill_value: float = 0,
) -> torch.Tensor:
    """This rank's slice of a global tensor that every rank has whole.

    Args:
        x: any tensor with the format's sequence axis: token ids [b, s] (bshd), activations [s, b, d] (sbhd), packed [t,
            ...] (thd).
        cp, qkv_format: as in `attention`.
        cu_seqlens_padded: thd only, GLOBAL, int32 or int64 [b + 1]. Tokens after the last of them are the tail, which
            fills the slices up, after each rank's own tokens.
        plan: gives format, lengths and layout of the query side instead; layout "balanced" needs it.
        fill_value: the value of rows of a slice without a token: for labels -100, which cross entropy ignores.

    Returns:
        The slice, contiguous, of ceil(t / cp_size) tokens in thd. Where s does not divide (by 2 * cp_size in
        dual_chunk, by cp_size in the others) a sequence of bshd and sbhd is cut as if padded at its end until it does.
        `attention` then needs a padding mask, or a plan that gives the end of the sequence; only causal self-attention
        does not. Differentiable: the gradient of x is the slice's, in its place, and zero elsewhere.

    Raises:
        ValueError, TypeError: lengths that do not fit x, are not the format's, or are given together with a plan;
        fill_value is no number of x's dtype.

    >>> from cp_ref import SimGroup
    >>> ids = torch.arange(8)[None]                                                # b 1, s 8: chunks 01 23 45 67
    >>> SimGroup(2).run(lambda member: shard(ids, cp=ContextParallel(member)).tolist())
    [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    """
    check_context(cp, ContextParallel)
    cut = read_cut(cp, plan, x, qkv_format, cu_seqlens_padded, whole=True)
    if plan is None and cut.qkv_format != "thd" and cut.size < cut.rows * cp.size:
        cp.uneven[cut.rows] = cut.size
    return slice_of(x, cut, cp.rank, read_fill(x, fill_value))


@collective(tell_context)
def unshard(
    x: torch.Tensor,
    *,
    cp: ContextParallel,
    qkv_format: str = "bshd",
    cu_seqlens_padded: torch.Tensor | None = None,
    seqlen: int | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """The global tensor, on every rank, from every rank's slice: the inverse of `shard`. Collective.

    Differentiable, and so also collective in the backward pass: every rank's global tensor depends on a slice, so the
    gradient of the slice is the sum over all ranks of the gradients of its place. So if every rank computes the same
    loss from the global tensor, gradients are cp_size times those of that loss.

    Args:
        x: this rank's slice, as `shard` gives it; alike on all ranks.
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
    with cp.alone("unshard"):
        cut = agreed_cut(cp, plan, x, qkv_format, cu_seqlens_padded, seqlen, with_grad=torch.is_grad_enabled())
    return gathered(x, cut, cp)


@collective(tell_context)
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
    """Every sequence shifted inside itself, across ranks: the next token as label, hidden states for multi-token
    prediction. Collective; only the rows that change ranks travel.

    Args:
        x: this rank's slice, as `shard` gives it; alike on all ranks.
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
    with cp.alone("roll"):
        how = shifts, fill_value
        cut = agreed_cut(cp, plan, x, qkv_format, cu_seqlens_padded, seqlen, how, with_grad=torch.is_grad_enabled())
    return rolled(x, cut, sequences_of(cut, plan, cu_seqlens_padded), shifts, fill_value, cp)


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
    """A rank's positions inside each sequence, for RoPE.

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
