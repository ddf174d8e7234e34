"""Tensors as callers have them: DTensors, whose local part attention takes, and sinks of another shape."""

from __future__ import annotations

from typing import Any

from cp_ref.spec.arguments.argument_words import QKV_FORMATS
from cp_ref.spec.arguments.single_values import check_choice
from cp_ref.spec.groups.pair_group import PairGroup

__all__ = ["AXES", "check_placements", "local_part", "one_a_head"]

AXES = {"bshd": ("batch", "sequence", "heads"), "sbhd": ("sequence", "batch", "heads"), "thd": ("sequence", "heads")}


def local_part(x: Any) -> Any:
    """A DTensor's local tensor, whatever its placement (see `check_placements`); anything else unchanged."""
    return x.to_local() if _is_distributed(x) else x


def one_a_head(softmax_offset: Any) -> Any:
    """[1, h_q, 1, 1], the shape that TransformerEngine has, as [h_q]; anything else unchanged, for `check_offset`."""
    shape = () if getattr(softmax_offset, "is_nested", True) else tuple(softmax_offset.shape)
    return softmax_offset[0, :, 0, 0] if len(shape) == 4 and shape[0] == shape[2] == shape[3] == 1 else softmax_offset


def check_placements(cp: Any, layout: Any, qkv_format: str, softmax_offset: Any, **tensors: Any) -> None:
    """A DTensor's local part is this rank's slice: sharded along the sequence over the context's ranks, in their order.
    A DTensor's shards are equal stretches, so that this is so in layout "contiguous" alone.

    Over other dimensions of its mesh it may be replicated, or sharded along the batch or the heads.

    Raises:
        ValueError: another placement, or another layout (of the plan, or of the context). TypeError: `softmax_offset`
        is a DTensor.
    """
    if _is_distributed(softmax_offset):
        raise TypeError("softmax_offset is a DTensor; give a plain tensor, one value for each of this rank's heads")
    for name, x in tensors.items():
        if not _is_distributed(x):
            continue
        check_choice("qkv_format", qkv_format, QKV_FORMATS)
        axes = AXES[qkv_format]
        if wrong := _misplaced(cp, axes, x):
            raise ValueError(
                f"{name} is a DTensor placed {x.placements} on {x.device_mesh}: {wrong}; its local part is this rank's "
                f"slice only where the context's group shards axis {axes.index('sequence')}, the "
                "sequence. Redistribute it, or give its local tensor"
            )
        if cp.size > 1 and layout != "contiguous":
            shown = repr(layout) if isinstance(layout, str) else "a table"
            raise ValueError(
                f"{name} is a DTensor placed {x.placements}: its shards are equal stretches of the sequence, but "
                f"layout is {shown}, where a rank's slice is another. Make the context with layout='contiguous', or "
                "give plain tensors, as shard cuts them"
            )


def _misplaced(cp: Any, axes: tuple[str, ...], x: Any) -> str:
    """The error of a DTensor's placement, or ""."""
    groups = (cp.comm.p2p, cp.comm.a2a) if isinstance(cp.comm, PairGroup) else (cp.comm,)  # in order of cutting
    wanted = [(getattr(group, "ranks", None), group.rank) for group in groups if group.size > 1]
    found: list[tuple[frozenset[int], int]] = []
    for dim, placement in enumerate(x.placements):
        level = (_ranks(x.device_mesh, dim), x.device_mesh.get_local_rank(dim))
        axis: str = axes[int(placement.dim)] if placement.is_shard() and placement.dim < len(axes) else ""
        if level in wanted and axis == "sequence":
            found.append(level)
        elif level in wanted or (len(level[0]) > 1 and not (placement.is_replicate() or axis in ("batch", "heads"))):
            return f"mesh dimension {dim} has {placement}"
    return "" if found == wanted else "its mesh has no dimension that is the context's group"


def _ranks(mesh: Any, dim: int) -> frozenset[int]:
    """The global ranks along a dimension of a mesh, through this rank."""
    index: list[Any] = list(mesh.get_coordinate())
    index[dim] = slice(None)
    return frozenset(mesh.mesh[tuple(index)].tolist())


def _is_distributed(x: Any) -> bool:
    return hasattr(x, "device_mesh") and hasattr(x, "placements")
