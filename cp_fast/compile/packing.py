"""Between the user's formats and the kernels' packed rows [t, h, d], without copies if possible.

    thd                             packed already
    bshd [b, s, h, d]               a view: rows of sequence 0, then of sequence 1, ...
    sbhd [s, b, h, d], no padding   a view [s, b * h, d]: one sequence of more heads. Sequence i's query head h is head
                                    i * h_q + h, and its kv head is (i * h_q + h) // g = i * h_kv + h // g
    sbhd with a padding mask        lengths differ by sequence: a copy to [b * s, h, d]

Where sbhd without padding becomes one sequence of more heads, so does the schedule. Kernels give the LSE as [h, t];
users get [b, h, s] for bshd and sbhd, [h, t] for thd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from cp_ref.calls.scores import ScoreTensors
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Message, Pieces, RankPasses, RankSchedule, Step, Tiles, side_of

__all__ = ["Packing", "fold_batch"]


@dataclass(frozen=True)
class Packing:
    """A problem as the user gives it and as kernels see it, and its tensors as packed rows, and back."""

    problem: Problem
    may_fold: bool = True

    @cached_property
    def folded(self) -> bool:
        """Whether the batch is folded into the heads. Not if heads are exchanged, since a head's number decides its
        rank. Not where scores depend on sequences and heads. Not under a user's schedule, since it may treat the
        sequences differently (`may_fold`).
        """
        p = self.problem
        equal_lengths = p.position_free_scores and not p.attn_mask_type.startswith("padding")
        return self.may_fold and p.qkv_format == "sbhd" and equal_lengths and p.a2a_size == 1

    @cached_property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.problem.sequences)

    @cached_property
    def packed_problem(self) -> Problem:
        """The problem that the kernels see."""
        p = self.problem
        if not self.folded:
            return p
        return replace(p, sequences=p.sequences[:1], heads_q=p.heads_q * self.batch, heads_kv=p.heads_kv * self.batch)

    def rows(self, shape: Sequence[int]) -> int:
        """The number of packed rows of a tensor of this shape in the user's format."""
        return shape[0] if self.problem.qkv_format == "thd" or self.folded else shape[0] * shape[1]

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Pack q, k, v, out or a gradient of these from the user's format into [t, h, d], contiguous."""
        if self.problem.qkv_format == "thd":
            return x.contiguous()
        if self.folded:
            return x.flatten(1, 2).contiguous()
        if self.problem.qkv_format == "sbhd":
            x = x.transpose(0, 1)
        return x.reshape(-1, *x.shape[2:]).contiguous()

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Unpack [t, h, d] into the user's format."""
        if self.problem.qkv_format == "thd":
            return x
        if self.folded:
            return x.unflatten(1, (self.batch, -1))
        x = x.reshape(self.batch, -1, *x.shape[1:])
        return x.transpose(0, 1).contiguous() if self.problem.qkv_format == "sbhd" else x

    def unpack_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """Unpack an LSE [h, t] into [b, h, s], or [h, t] for thd."""
        if self.problem.qkv_format == "thd":
            return lse
        if self.folded:
            return lse.unflatten(0, (self.batch, -1))
        return lse.reshape(lse.shape[0], self.batch, -1).transpose(0, 1).contiguous()

    def pack_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """The inverse of `unpack_lse`."""
        if self.problem.qkv_format == "thd":
            return lse
        if self.folded:
            return lse.flatten(0, 1)
        return lse.transpose(0, 1).reshape(lse.shape[1], -1)

    def heads_in(self, per_head: torch.Tensor) -> torch.Tensor:
        """Repeat one value a head [h_q] as one a packed head."""
        return per_head.repeat(self.batch) if self.folded else per_head

    def scores_in(self, inputs: ScoreTensors) -> ScoreTensors:
        """The inputs of scores with slopes of packed heads. Scores of a folded batch depend on no other place."""
        return inputs.with_folded_heads(self.batch) if self.folded else inputs

    def heads_out(self, per_packed_head: torch.Tensor) -> torch.Tensor:
        """View one value a packed head as [copies, h_q], to be reduced over the copies."""
        return per_packed_head.unflatten(0, (self.batch if self.folded else 1, -1))


def fold_batch(steps: RankPasses, problem: Problem) -> RankPasses:
    """A rank's steps, which treat all sequences of the batch alike, as those of the first one for the heads of all.

    The schedule is then one of `Packing.packed_problem`. Only for messages and tiles of all heads.
    """
    return _folded(steps[0], problem), _folded(steps[1], problem)


def _folded(rank_schedule: RankSchedule, problem: Problem) -> RankSchedule:
    batch = len(problem.sequences)
    slots = {"q": problem.sequences[0].slots_q, "kv": problem.sequences[0].slots_kv}

    def message(m: Message) -> Message:
        p = m.pieces
        end = slots[side_of(m.kind)]
        first = p.take(p.start < end)  # a piece may go on in the next sequence
        stop = np.minimum(first.stop, end)
        return replace(m, pieces=Pieces(first.start, stop, first.head_start, first.head_stop * batch))

    def tiles(t: Tiles) -> Tiles:
        first = t.take(t.q_start < slots["q"])
        return replace(first, area=np.zeros_like(first.area), head_stop=first.head_stop * batch)

    return tuple(
        Step(tuple(map(message, s.sends)), tuple(map(message, s.recvs)), tiles(s.tiles)) for s in rank_schedule
    )
