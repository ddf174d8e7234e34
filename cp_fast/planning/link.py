"""A lowered program with its tables on the device: every key becomes the rows that it stands for."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from cp_fast.backends import Segments
from cp_fast.planning.lower import Draft, SegmentKeys
from cp_fast.planning.tables import Key, Uploaded
from cp_fast.program import Program
from cp_fast.rows import Rows

__all__ = ["link", "upload"]


def upload(draft: Draft, device: torch.device) -> Program[Rows]:
    """The program with its tables on the device, by one copy."""
    host = draft.tables.on_host(pinned=device.type == "cuda")
    return link(draft, draft.tables.on_device(host.to(device, non_blocking=True)))


def link(draft: Draft, tables: Uploaded) -> Program[Rows]:
    """The program with its tables as they lie on the device."""
    linked = _linked(draft.program, tables, {})
    real = linked.real_q_rows
    if isinstance(real, slice) or real.dtype == torch.bool:
        return linked
    return replace(linked, real_q_rows=real.long())  # for PyTorch's own operators


def _linked(x: Any, tables: Uploaded, segments: dict[SegmentKeys, Segments]) -> Any:
    """x with rows for keys, in the dataclasses and tuples that a program is made of."""
    if isinstance(x, Key):
        return tables.rows(x)
    if isinstance(x, SegmentKeys):
        if x not in segments:  # both passes have the same
            segments[x] = _segments(x, tables)
        return segments[x]
    if isinstance(x, tuple):
        return tuple(_linked(item, tables, segments) for item in x)
    if is_dataclass(x) and not isinstance(x, type):
        changed = {f.name: getattr(x, f.name) for f in fields(x)}
        found = {
            name: _linked(value, tables, segments)
            for name, value in changed.items()
            if isinstance(value, Key | tuple) or is_dataclass(value)
        }
        return replace(x, **found)
    return x


def _segments(keys: SegmentKeys, tables: Uploaded) -> Segments:
    bound_q, bound_kv = keys.bounds or (None, None)
    cu_q, cu_kv = tables.cumulative(keys.cu_q, bound_q), tables.cumulative(keys.cu_kv, bound_kv)
    on_device = (tables.lengths(key).device for key in (keys.cu_q, keys.cu_kv))
    return Segments(cu_q, cu_kv, keys.left, keys.right, *on_device)
