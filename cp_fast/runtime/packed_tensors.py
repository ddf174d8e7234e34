"""Between the user's formats and the kernels' packed rows [t, h, d], without copies if possible.

    thd                             packed already
    bshd [b, s, h, d]               a view: rows of sequence 0, then of sequence 1, ...
    sbhd [s, b, h, d], no padding   a view [s, b * h, d]: one sequence of more heads. Sequence i's query head h is head
                                    i * h_q + h, and its kv head is (i * h_q + h) // g = i * h_kv + h // g
    sbhd with a padding mask        lengths differ by sequence: a copy to [b * s, h, d]

Kernels give the LSE as [h, t]; users get [b, h, s] for bshd and sbhd, [h, t] for thd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cp_fast.compile.chosen_schedule import Folding
from cp_ref.contract.scores import ScoreTensors

__all__ = ["Packing"]


@dataclass(frozen=True)
class Packing(Folding):
    """One problem's tensors as packed rows, and back."""

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
