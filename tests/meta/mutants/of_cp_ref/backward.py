"""Bugs of the backward pass: what is added up, for which heads, with which operands."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]


def _no_slope(scores: Any, *arguments: Any) -> Any:
    return scores(*arguments)[0], 1.0


def _no_delta(tile_backward: Any, q: Any, k: Any, v: Any, dout: Any, lse: Any, delta: Any, *rest: Any) -> Any:
    return tile_backward(q, k, v, dout, lse, torch.zeros_like(delta), *rest)


def _no_scale(tile_backward: Any, *arguments: Any) -> Any:
    part = tile_backward(*arguments)
    return part._replace(dk=part.dk / arguments[7].scale)


def _own_lse(tile_backward: Any, q: Any, k: Any, v: Any, dout: Any, lse: Any, *rest: Any) -> Any:
    """Weights normalised over the tile's own keys, and not over all of them."""
    visible = rest[1]
    scores = rest[2].scale * torch.einsum("nhd,mhd->nhm", q, k)
    own = scores.masked_fill(~visible[:, None, :], -torch.inf).logsumexp(-1)
    return tile_backward(q, k, v, dout, own, *rest)


def _stale_kv(tile_backward: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    """Every later tile of a shape uses the first one's K and V. (A rank's thread lives as long as one call.)"""
    kept = threading.current_thread().__dict__.setdefault("stale_kv", {})
    k, v = kept.setdefault((k.shape, v.shape), (k, v))
    return tile_backward(q, k, v, *rest)


def _copied(kind: str) -> Any:
    """What should be added to a result overwrites it."""

    def add(original: Any, self: Any, what: str, rows: slice, heads: slice, *values: torch.Tensor) -> None:
        if what == kind:
            for x, value in zip(self.tensors[what], values, strict=True):
                x[rows, heads] = value
        else:
            original(self, what, rows, heads, *values)

    return wrap(add)


def _dkv_twice(unpack: Any, self: Any, message: Any, parcels: Any) -> None:
    unpack(self, message, parcels)
    if message.kind == "dkv":
        unpack(self, message, parcels)


def _replicas_not_summed(unpack: Any, self: Any, message: Any, parcels: Any) -> None:
    """The gradients of a replicated kv head are those of the rank that came last."""
    if message.kind == "dkv":
        for start, stop, first, last in message.pieces.rows():
            if (first, last) != (0, self.work.heads_kv):
                for x in self.tensors[message.kind]:
                    x[start:stop, first:last] = 0.0
    unpack(self, message, parcels)


def _wrong_kv_head(slices: Any, world: Any, tile: Any) -> Any:
    rows, columns, heads, kv_heads = slices(world, tile)
    return rows, columns, heads, kv_heads.flip(0)


def _interleaved_groups(slices: Any, world: Any, tile: Any) -> Any:
    """Query head h uses kv head h % h_kv, and not h // group_size."""
    rows, columns, heads, _ = slices(world, tile)
    return rows, columns, heads, torch.arange(heads.start, heads.stop, device=world.device) % world.work.heads_kv


def _heads_rotated(by_kv_head: Any, *arguments: Any) -> torch.Tensor:
    return by_kv_head(*arguments).roll(1, 1)


def _mean_of_group(by_kv_head: Any, grads: torch.Tensor, kv_heads: torch.Tensor, heads_kv: int) -> torch.Tensor:
    sizes = torch.bincount(kv_heads, minlength=heads_kv).clamp(min=1)
    return by_kv_head(grads, kv_heads, heads_kv) / sizes[:, None]


def _only_first_of_group(by_kv_head: Any, grads: torch.Tensor, kv_heads: torch.Tensor, heads_kv: int) -> torch.Tensor:
    first = torch.ones_like(kv_heads, dtype=torch.bool)
    first[1:] = kv_heads[1:] != kv_heads[:-1]
    return by_kv_head(grads[:, first], kv_heads[first], heads_kv)


_TILE = "cp_ref.executor.play_schedule.tile_backward"
_HEADS = "cp_ref.executor.play_schedule._by_kv_head"

MUTANTS: dict[str, Mutant] = {
    "softcap-slope-lost": Mutant(
        "the softcap has slope 1", "cp_ref.executor.tile_attention._capped", wrap(_no_slope), "logic"
    ),
    "delta-lost": Mutant("ds is p * dp", _TILE, wrap(_no_delta), "logic"),
    "scale-of-dk-lost": Mutant("dk is not scaled", _TILE, wrap(_no_scale), "logic"),
    "weights-of-the-tile-alone": Mutant("p is normalised over one tile", _TILE, wrap(_own_lse), "probes"),
    "stale-kv-in-the-backward": Mutant("the first step's K and V in every step", _TILE, wrap(_stale_kv), "logic"),
    "dq-of-the-last-step-lost": Mutant(
        "dq is copied, not added", "cp_ref.executor.rank_tensors.World.add", _copied("dq"), "logic"
    ),
    "dkv-copied-not-added": Mutant(
        "dk and dv are copied, not added", "cp_ref.executor.rank_tensors.World.add", _copied("dkv"), "probes"
    ),
    "dkv-added-twice": Mutant(
        "dk and dv arrive twice", "cp_ref.executor.rank_tensors.World.unpack", wrap(_dkv_twice), "probes"
    ),
    "replicated-kv-heads-not-summed": Mutant(
        "of a kv head on several ranks one gradient is kept",
        "cp_ref.executor.rank_tensors.World.unpack",
        wrap(_replicas_not_summed),
        "probes",
    ),
    "wrong-kv-head": Mutant(
        "kv heads in reverse order", "cp_ref.executor.play_schedule._slices", wrap(_wrong_kv_head), "probes"
    ),
    "groups-interleaved": Mutant(
        "kv head h % h_kv", "cp_ref.executor.play_schedule._slices", wrap(_interleaved_groups), "probes"
    ),
    "dk-heads-rotated": Mutant("gradients of the next kv head", _HEADS, wrap(_heads_rotated), "probes"),
    "group-gradients-averaged": Mutant("dk and dv are means over a group", _HEADS, wrap(_mean_of_group), "probes"),
    "one-gradient-of-a-group": Mutant("one query head of a group counts", _HEADS, wrap(_only_first_of_group), "probes"),
    "lse-gradient-lost": Mutant(
        "dlse is ignored",
        "cp_ref.reference_attention.lse_to_packed",
        wrap(lambda lse_to_packed, *a: 0.0 * lse_to_packed(*a).nan_to_num()),
        "logic",
    ),
    "sink-gradient-of-all-ranks": Mutant(
        "d_offset is the total where a share is asked for",
        "cp_ref.reference_attention.offset_grad",
        lambda grad: lambda cp, share: grad(SimpleNamespace(comm=cp.comm, softmax_offset_grad="total"), share),
        "logic",
    ),
}
