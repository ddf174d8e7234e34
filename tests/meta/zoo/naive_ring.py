"""A ring attention as an outsider would write it: K and V travel round, partial outputs are merged by their LSE.

Packed sequences (thd) in the dual_chunk layout, causal or not, windows, grouped heads. `Flaws` plants three bugs that
such code has had elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cp_ref.groups.group import Parcel

NOTHING = -1e30  # the LSE of what sees nothing: finite, so that differences are numbers


@dataclass(frozen=True)
class Flaws:
    window_of_own_block_only: bool = False  # K and V from other ranks are seen whole
    merge_of_nothing_is_nan: bool = False  # -inf - -inf
    heads_interleaved: bool = False  # query head h takes kv head h % h_kv


def positions(lengths: list[int], padded: list[int], size: int, rank: int) -> torch.Tensor:
    """[t / size, 2]: the sequence and the position in it of each of a rank's rows; position -1 is padding."""
    rows = []
    for n, (real, slots) in enumerate(zip(lengths, padded, strict=True)):
        chunk = slots // (2 * size)
        for c in (rank, 2 * size - 1 - rank):
            rows += [(n, i if i < real else -1) for i in range(c * chunk, (c + 1) * chunk)]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)


def ring(member: Any, q: Any, k: Any, v: Any, where: list[torch.Tensor], window: tuple[int, int], scale: float,
         flaws: Flaws) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """This rank's (out [t, h, d], lse [h, t])."""
    size, rank = member.size, member.rank
    mine, group = where[rank], q.shape[1] // k.shape[1]
    out, lse = q.new_zeros(()), q.new_full((q.shape[1], len(q)), NOTHING)
    for step in range(size):
        theirs = where[(rank - step) % size]
        sees = (mine[:, None, 0] == theirs[None, :, 0]) & (mine[:, None, 1] >= 0) & (theirs[None, :, 1] >= 0)
        ahead = theirs[None, :, 1] - mine[:, None, 1]
        if not (flaws.window_of_own_block_only and step):
            sees &= (ahead >= -window[0]) if window[0] >= 0 else True
        sees &= (ahead <= window[1]) if window[1] >= 0 else True
        wide = [x.repeat(1, group, 1) if flaws.heads_interleaved else x.repeat_interleave(group, 1) for x in (k, v)]
        scores = torch.einsum("nhd,mhd->hnm", q, wide[0]).mul(scale).masked_fill(~sees, -torch.inf)
        top = scores.detach().amax(-1, keepdim=True).clamp(min=NOTHING) if len(theirs) else q.new_zeros(1)
        weights = (scores - top).exp()
        total = weights.sum(-1).clamp(min=1e-30)
        part_lse = (top + total.log()[..., None])[..., 0]
        if flaws.merge_of_nothing_is_nan:
            part_lse = part_lse.masked_fill(part_lse < NOTHING / 2, -torch.inf)
        part = torch.einsum("hnm,mhd->nhd", weights / total[..., None], wide[1])
        out, lse = merge(out, lse, part, part_lse) if step else (part, part_lse)
        if step < size - 1:
            k, v = Shift.apply(member, k, v)
    return out, lse.masked_fill(lse < NOTHING / 2, -torch.inf)


def merge(out: Any, lse: Any, part: Any, part_lse: Any) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.logaddexp(lse, part_lse)
    old, new = ((x - both).exp().t()[..., None] for x in (lse, part_lse))
    return out * old + part * new, both


class Shift(torch.autograd.Function):
    """K and V to the next rank; their gradients to the one before."""

    @staticmethod
    def forward(ctx: Any, member: Any, *tensors: torch.Tensor) -> Any:
        ctx.member = member
        return travel(member, tensors, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *travel(ctx.member, grads, -1)


def travel(member: Any, tensors: tuple[torch.Tensor, ...], to: int) -> tuple[torch.Tensor, ...]:
    peers = ((member.rank + to) % member.size, (member.rank - to) % member.size)
    boxes = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
    member.exchange(
        [Parcel(peers[0], n, x.contiguous()) for n, x in enumerate(tensors)],
        [Parcel(peers[1], n, box) for n, box in enumerate(boxes)],
    ).wait()
    return boxes
