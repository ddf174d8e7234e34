"""Bugs between the user's formats and packed rows."""

from __future__ import annotations

from typing import Any

import torch

from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]

Tensor = torch.Tensor


def _bshd_for_sbhd(pack: Any, self: Any, x: Tensor) -> Tensor:
    if self.problem.qkv_format == "sbhd" and not self.folded:
        return x.reshape(-1, *x.shape[2:]).contiguous()
    return pack(self, x)


def _strides_ignored(pack: Any, self: Any, x: Tensor) -> Tensor:
    """Memory is read as if x were contiguous."""
    if not x.is_contiguous():
        x = torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())
    return pack(self, x)


def _sequences_of_a_head(unpack: Any, self: Any, x: Tensor) -> Tensor:
    """A folded batch is unfolded as if a head's sequences lay together."""
    return x.unflatten(1, (-1, self.batch)).transpose(1, 2) if self.folded else unpack(self, x)


def _rows_for_heads(unpack_lse: Any, self: Any, lse: Tensor) -> Tensor:
    """[t, h] taken for [h, t]."""
    return lse.t().reshape(unpack_lse(self, lse).shape)


def _batch_before_heads(pack_lse: Any, self: Any, lse: Tensor) -> Tensor:
    return lse.reshape(pack_lse(self, lse).shape)


def _interleaved(heads_in: Any, self: Any, per_head: Tensor) -> Tensor:
    return per_head.repeat_interleave(self.batch) if self.folded else heads_in(self, per_head)


def _first_sequence(heads_out: Any, self: Any, per_packed_head: Tensor) -> Tensor:
    return heads_out(self, per_packed_head)[:1]


def _folded_with_padding(folded: Any) -> property:
    """Lengths of a padding mask are those of the first sequence."""
    return property(lambda self: self.problem.qkv_format == "sbhd" and self.problem.a2a_size == 1)


_PACKING = "cp_fast.runtime.packed_tensors.Packing"
_FOLDED = "sbhd-of-equal-lengths"


def _packing(text: str, method: str, change: Any, tier: str = "logic", where: str = "") -> Mutant:
    return Mutant(text, f"{_PACKING}.{method}", wrap(change), tier, where=where)


MUTANTS: dict[str, Mutant] = {
    "packing-bshd-for-sbhd": _packing("padded sbhd is read as bshd", "pack", _bshd_for_sbhd),
    "packing-strides-ignored": _packing("tensors are read as contiguous", "pack", _strides_ignored, "hygiene"),
    "folded-heads-exchanged": _packing(
        "heads and sequences exchanged on the way out", "unpack", _sequences_of_a_head, "special", _FOLDED
    ),
    "unpacked-lse-transposed": _packing("lse [t, h] is taken for [h, t]", "unpack_lse", _rows_for_heads),
    "packed-dlse-transposed": _packing("dlse [b, h, s] is taken for [h, b, s]", "pack_lse", _batch_before_heads),
    "folded-sinks-interleaved": _packing(
        "a folded head has another's sink", "heads_in", _interleaved, "special", _FOLDED
    ),
    "folded-sums-of-one-sequence": _packing(
        "of a folded batch one sequence counts", "heads_out", _first_sequence, "special", _FOLDED
    ),
    "folded-with-padding": Mutant(
        "a padded batch is folded too",
        f"{_PACKING}.folded",
        _folded_with_padding,
        "special",
        where="padding-mask-in-sbhd",
    ),
}
