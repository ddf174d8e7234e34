"""A lowered program with its tables on the device: every key becomes the rows that it stands for."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch

from cp_fast.backends import Segments
from cp_fast.planning.groups import SegmentKeys
from cp_fast.planning.lower import Draft
from cp_fast.planning.tables import Key, Uploaded
from cp_fast.program import LoweredProgram
from cp_fast.rows import Rows

__all__ = ["linked", "upload"]


def upload(draft: Draft, device: torch.device) -> LoweredProgram[Rows]:
    """The program with its tables on the device, by one copy."""
    host = draft.tables.on_host(pinned=device.type == "cuda")
    return linked(draft.program, draft.tables.on_device(host.to(device, non_blocking=True)))


def linked(program: LoweredProgram[Any], tables: Uploaded) -> LoweredProgram[Rows]:
    """The program with its tables as they lie on the device."""
    found = _linked(program, tables, {})
    if found.position_ids is not None:
        found = replace(found, position_ids=tables.rows(program.position_ids))
    real = found.real_q_rows
    if isinstance(real, slice) or real.dtype == torch.bool:
        return found
    return replace(found, real_q_rows=real.long())  # for PyTorch's own operators


def _linked(x: Any, tables: Uploaded, segments: dict[SegmentKeys, Segments]) -> Any:
    """x with rows for keys, in the dataclasses and tuples that a program is made of."""
    kind = type(x)
    if kind is slice or x is None or (kind is tuple and not x):
        return x
    if kind is Key:
        return tables.rows(x)
    if kind is SegmentKeys:
        if x not in segments:  # both passes have the same
            segments[x] = _segments(x, tables)
        return segments[x]
    if kind is tuple:
        return tuple([_linked(item, tables, segments) for item in x])
    if not is_dataclass(kind):
        return x
    values = [
        _linked(getattr(x, name), tables, segments) if has_rows else getattr(x, name)
        for name, has_rows in _fields_of(kind)
    ]
    return kind(*values)


@cache
def _fields_of(kind: Any) -> list[tuple[str, bool]]:
    """The fields of a program's dataclass, and whether they have rows: those whose type has the variable R.

    >>> from cp_fast.program import Operand
    >>> _fields_of(Operand)
    [('buffer', False), ('rows', True), ('heads', False)]
    """
    return [(f.name, re.search(r"\bR\b|Segments", str(f.type)) is not None) for f in fields(kind)]


def _segments(keys: SegmentKeys, tables: Uploaded) -> Segments:
    bound_q, bound_kv = keys.bounds or (None, None)
    (cu_q, device_q), (cu_kv, device_kv) = tables.lengths(keys.cu_q, bound_q), tables.lengths(keys.cu_kv, bound_kv)
    return Segments(cu_q, cu_kv, keys.left, keys.right, device_q, device_kv)
