"""Results of DTensors are DTensors, placed as q is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cp_ref.spec import AXES

__all__ = ["placed_like"]

_LSE = {"bshd": ("batch", "heads", "sequence"), "sbhd": ("batch", "heads", "sequence"), "thd": ("heads", "sequence")}


def placed_like(q: Any, qkv_format: str, results: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """This rank's (out, lse, max_logit) as DTensors on the mesh of q, where q is one; else unchanged.

    Args:
        q: the argument of `attention`, with its placement checked.
        results: max_logit may be None. Where a mesh dimension shards the batch it is Partial("max").
    """
    if not hasattr(q, "placements"):
        return results
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    axes = AXES[qkv_format]
    sizes = dict(zip(axes, q.shape, strict=False))
    placements: list[Any] = list(q.placements)
    sharded: list[str] = [axes[p.dim] if p.is_shard() else "" for p in placements]  # the axis, by mesh dimension

    def placed(x: torch.Tensor | None, names: Sequence[str], *more: int) -> Any:
        if x is None:
            return None
        elsewhere = {name: Replicate() for name in ("", "sequence")} | {"batch": Partial("max")}
        its = [Shard(names.index(a)) if a in names else elsewhere[a] for a in sharded]
        shape = torch.Size([*(sizes[name] for name in names), *more])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, q.device_mesh, its, run_check=False, shape=shape, stride=stride)

    out, lse, max_logit = results
    return placed(out, axes, out.shape[-1]), placed(lse, _LSE[qkv_format]), placed(max_logit, ("heads",))
