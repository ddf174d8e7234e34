"""From a call's arguments to a `Problem`: everything that can be wrong with them is found here, before anything is
sent.

Nothing here imports torch. A tensor is anything with a shape, a dtype and a device, and lengths are read with `tolist`.
Every refusal is a ValueError (or a TypeError, for a wrong type) that names the argument, its value and the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from operator import gt
from typing import Any

import numpy as np

from cp_ref.problems.arguments import ARGUMENTS, OF_PLACES, SCORE_OPTIONS
from cp_ref.schedules.areas import read_areas
from cp_ref.schedules.ownership import (
    LAYOUTS_OF_LENGTHS,
    LayoutTable,
    read_layout,
)
from cp_ref.schedules.planners.make_schedule import SCHEDULES
from cp_ref.schedules.problem import Problem, Sequence, Sequences, row_positions
from cp_ref.schedules.values import (
    check_choice,
    check_dtype,
    check_one_device,
    check_tensor,
    differences,
    dtype_of,
    read_count,
    read_lengths,
)
from cp_ref.schedules.words import QKV_FORMATS

__all__ = [
    "DTYPES",
    "ROW_AXES",
    "Sizes",
    "check_axes",
    "check_heads",
    "check_layout",
    "check_offset",
    "check_one_document",
    "counted",
    "read_problem",
    "read_sequences",
    "read_sizes",
]


def check_layout(problem: Problem) -> None:
    """Raise ValueError where the problem cannot have its layout.

    "balanced" and tables are for self-attention, because keys then lie where their queries do. In bshd and sbhd they
    are for padding masks, because the rows of a slice are then no longer one sequence each. A table holds every slot
    once.
    """
    layout, lengths = problem.layout, problem.lengths
    if layout in LAYOUTS_OF_LENGTHS:
        return
    if lengths.slots_q != lengths.slots_kv:
        raise ValueError(
            f"layout is {problem.layout_name!r}, which needs keys and queries in the same places, but their lengths "
            "differ (cu_seqlens_kv, cu_seqlens_kv_padded or seqlen_kv); use 'dual_chunk' or 'contiguous'"
        )
    if problem.qkv_format != "thd" and not problem.attn_mask_type.startswith("padding"):
        raise ValueError(
            f"layout is {problem.layout_name!r}, which in {problem.qkv_format!r} needs a padding mask, but "
            f"attn_mask_type is {problem.attn_mask_type!r}; use 'dual_chunk' or 'contiguous'"
        )
    if not isinstance(layout, str):
        _check_table(layout, lengths.slots_q, problem.cp_size)


def _check_table(table: LayoutTable, slots: Seq[int], cp_size: int) -> None:
    for n, (rank, sequence, start, stop) in enumerate(table):
        if not 0 <= rank < cp_size:
            raise ValueError(f"layout has rank {rank} (row {n}, sorted by rank); ranks go from 0 to {cp_size - 1}")
        if not 0 <= sequence < len(slots):
            raise ValueError(f"layout has sequence {sequence} (row {n}, sorted by rank), but there are {len(slots)}")
        if not 0 <= start < stop <= slots[sequence]:
            raise ValueError(
                f"layout gives rank {rank} rows {start} to {stop} of sequence {sequence}, which has {slots[sequence]}; "
                "start < stop must lie inside"
            )
    held = [0] * len(slots)  # up to which row each sequence is held
    for _, sequence, start, stop in sorted(table, key=lambda row: row[1:]):
        if start != held[sequence]:
            what = "nobody" if start > held[sequence] else "two ranks"
            row = min(start, held[sequence])
            raise ValueError(f"layout gives row {row} of sequence {sequence} to {what}; every row needs one rank")
        held[sequence] = stop
    for sequence, (stop, length) in enumerate(zip(held, slots, strict=True)):
        if stop < length:
            raise ValueError(f"layout gives row {stop} of sequence {sequence} to nobody; every row needs one rank")


def check_one_document(problem: Problem, name: str) -> None:
    """Raise ValueError if areas connect documents: a score that depends on positions, by the argument of this name, has
    none there.
    """
    if problem.areas is None:
        return
    areas = problem.workload.areas
    edges = (("q", areas.q_start), ("q", areas.q_stop - 1), ("kv", areas.k_start), ("kv", areas.k_stop - 1))
    documents = np.stack([row_positions(problem, side, rows)[0] for side, rows in edges])
    crossing = np.flatnonzero((documents != documents[0]).any(axis=0))
    if len(crossing):
        one = areas.take(crossing[:1])
        raise ValueError(
            f"{name} is given, and areas connect documents {documents[:, crossing[0]].min()} and "
            f"{documents[:, crossing[0]].max()}: {str(one).strip()}. Positions belong to one document; give "
            "cu_seqlens_q and cu_seqlens_kv of one document, [0, total]"
        )


def read_sequences(cu_seqlens: Mapping[str, Any], qkv_format: str, mask: str, sizes: Sizes) -> Seq[Sequence]:
    """The sequences of a call.

    Args:
        cu_seqlens: the four arguments of this name, each a tensor or None.

    Raises:
        ValueError, TypeError: one of them is wrong, or does not belong to the format or the mask.
    """
    given = {name: read_lengths(name, value) for name, value in cu_seqlens.items()}
    return _packed(given, sizes) if qkv_format == "thd" else _batched(given, qkv_format, mask, sizes)


def _packed(given: dict[str, list[int] | None], sizes: Sizes) -> Seq[Sequence]:
    """The sequences of thd: lengths and slots from the cumulative lengths; kv defaults to q, slots to lengths."""
    for name in ("batch_size", "seqlen_q", "seqlen_kv"):
        if getattr(sizes, name) is not None:
            raise ValueError(
                f"{name} is {getattr(sizes, name)}, but qkv_format 'thd' takes its lengths from cu_seqlens_q"
            )
    cu_q, cu_kv = given["cu_seqlens_q"], given["cu_seqlens_kv"]
    if cu_q is None:
        raise ValueError("cu_seqlens_q is None; qkv_format 'thd' needs the cumulative lengths")
    slots_q = given["cu_seqlens_q_padded"] or cu_q
    slots_kv = given["cu_seqlens_kv_padded"] or (slots_q if cu_kv is None else cu_kv)
    cu_kv = cu_q if cu_kv is None else cu_kv
    for name, values in (
        ("cu_seqlens_kv", cu_kv),
        ("cu_seqlens_q_padded", slots_q),
        ("cu_seqlens_kv_padded", slots_kv),
    ):
        if len(values) != len(cu_q):
            raise ValueError(f"{name} has {len(values)} entries and cu_seqlens_q has {len(cu_q)}; they must be equal")
    given_once = {id(cu): cu for cu in (cu_q, cu_kv, slots_q, slots_kv)}  # often the same, and ten thousand long
    lengths = {which: differences(cu) for which, cu in given_once.items()}
    len_q, len_kv, room_q, room_kv = (lengths[id(cu)] for cu in (cu_q, cu_kv, slots_q, slots_kv))
    sides = [("q", len_q, room_q), *([("kv", len_kv, room_kv)] if (len_kv, room_kv) != (len_q, room_q) else [])]
    for side, real, padded in sides:
        if real is not padded and any(map(gt, real, padded)):
            n = next(n for n, (length, slots) in enumerate(zip(real, padded, strict=True)) if length > slots)
            raise ValueError(
                f"cu_seqlens_{side}_padded gives sequence {n} {padded[n]} slots, but it has {real[n]} tokens by "
                f"cu_seqlens_{side}; padding must not be negative"
            )
    return Sequences(len_q, len_kv, room_q, room_kv)


def _batched(given: dict[str, list[int] | None], qkv_format: str, mask: str, sizes: Sizes) -> Seq[Sequence]:
    """The sequences of bshd and sbhd: the slots are the tensor's, the lengths too unless the mask is a padding mask."""
    for side in ("q", "kv"):
        if given[f"cu_seqlens_{side}_padded"] is not None:
            raise ValueError(
                f"cu_seqlens_{side}_padded is given, but qkv_format is {qkv_format!r}; it belongs to 'thd'"
            )
    if sizes.seqlen_q is None:
        raise ValueError(f"seqlen_q is None; qkv_format {qkv_format!r} needs the global sequence length")
    slots_q = sizes.seqlen_q
    slots_kv = slots_q if sizes.seqlen_kv is None else sizes.seqlen_kv
    cu_q, cu_kv = given["cu_seqlens_q"], given["cu_seqlens_kv"]
    if not mask.startswith("padding"):
        for name, values in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
            if values is not None:
                raise ValueError(
                    f"{name} is given, but attn_mask_type {mask!r} in {qkv_format!r} takes no lengths; "
                    "use a padding mask"
                )
        if sizes.batch_size is None:
            raise ValueError(f"batch_size is None; qkv_format {qkv_format!r} with attn_mask_type {mask!r} needs it")
        return (Sequence(slots_q, slots_kv, slots_q, slots_kv),) * sizes.batch_size
    if cu_q is None:
        raise ValueError(f"cu_seqlens_q is None; attn_mask_type {mask!r} needs the cumulative lengths")
    cu_kv = cu_q if cu_kv is None else cu_kv
    sequences: list[Sequence] = []
    for name, values, slots in (("cu_seqlens_q", cu_q, slots_q), ("cu_seqlens_kv", cu_kv, slots_kv)):
        if sizes.batch_size is not None and len(values) != sizes.batch_size + 1:
            raise ValueError(
                f"{name} has {len(values)} entries; a batch of {sizes.batch_size} needs {sizes.batch_size + 1}"
            )
        for n, length in enumerate(differences(values)):
            if length > slots:
                raise ValueError(
                    f"{name} gives sequence {n} {length} tokens, but the tensor's sequence length is {slots}"
                )
    if len(cu_kv) != len(cu_q):
        raise ValueError(f"cu_seqlens_kv has {len(cu_kv)} entries and cu_seqlens_q has {len(cu_q)}; they must be equal")
    for len_q, len_kv in zip(differences(cu_q), differences(cu_kv), strict=True):
        sequences.append(Sequence(len_q, len_kv, slots_q, slots_kv))
    return tuple(sequences)


DTYPES = ("float16", "bfloat16", "float32", "float64")


_NEEDED = ("heads_q", "heads_kv", "d_qk", "d_v")
_LEAST = dict.fromkeys(_NEEDED, 1) | {"batch_size": 1, "seqlen_q": 0, "seqlen_kv": 0}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that q, k and v have. Sequence lengths are global; None in thd, where `cu_seqlens_*` have them."""

    heads_q: int
    heads_kv: int
    d_qk: int
    d_v: int
    dtype: str
    batch_size: int | None = None
    seqlen_q: int | None = None
    seqlen_kv: int | None = None


ROW_AXES = {"thd": "t", "bshd": "b, s", "sbhd": "s, b"}


def check_axes(name: str, x: Any, qkv_format: str, last: str) -> None:
    """Raise unless a slice has the axes of its format, and then these.

    >>> import torch
    >>> check_axes("q", torch.zeros(2, 3), "thd", "h, d")
    Traceback (most recent call last):
        ...
    ValueError: q has shape [2, 3]; qkv_format 'thd' needs [t, h, d]
    """
    axes = f"{ROW_AXES[qkv_format]}, {last}"
    if len(x.shape) != len(axes.split(", ")):
        raise ValueError(f"{name} has shape {list(x.shape)}; qkv_format {qkv_format!r} needs [{axes}]")


def read_sizes(q: Any, k: Any, v: Any, qkv_format: str, cp_size: int) -> Sizes:
    """The sizes of one rank's q, k, v (pass cp_size 1 for global tensors); they must agree in rank, dtype, device
    and heads.
    """
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        check_axes(name, x, qkv_format, "h, d")
        check_dtype(name, x, *(DTYPES if x is q else [dtype_of(q)]), why="" if x is q else ", as q is")
        check_one_device(name, x, "q", q)
    if tuple(k.shape[:-1]) != tuple(v.shape[:-1]):
        raise ValueError(f"k has shape {list(k.shape)} and v {list(v.shape)}; all but the last size must be equal")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head dim {q.shape[-1]} and k has {k.shape[-1]}; they must be equal (d_qk)")
    heads = Sizes(q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], dtype_of(q))
    if qkv_format == "thd":
        return heads
    batch, seq = (0, 1) if qkv_format == "bshd" else (1, 0)
    if q.shape[batch] != k.shape[batch]:
        raise ValueError(f"q has batch size {q.shape[batch]} and k has {k.shape[batch]}; they must be equal")
    lengths = {"seqlen_q": q.shape[seq] * cp_size, "seqlen_kv": k.shape[seq] * cp_size}
    return replace(heads, batch_size=q.shape[batch], **lengths)


def read_problem(
    *, cp_size: int, cp_comm_type: str, layout: Any, sizes: Sizes, a2a_size: int = 1, **given: Any
) -> Problem:
    """The problem of a call: see `cp_ref.attention`.

    Args:
        sizes: from the tensors, or from `make_plan`.
        given: all `ARGUMENTS`, with score_mod's digest in the place of the function (`with_digest`).
    """
    check_choice("cp_comm_type", cp_comm_type, tuple(SCHEDULES))
    layout = read_layout(layout)
    areas, mask = given["areas"], given["attn_mask_type"]
    qkv_format: str = _read("qkv_format", given)
    window_size = _read("window_size", given)
    if areas is not None:
        _check_alone(qkv_format, mask, window_size)
    mask = _read("attn_mask_type", given) or "causal"
    scores = {name: _read(name, given) for name in SCORE_OPTIONS}
    check_choice("dtype", sizes.dtype, DTYPES)
    sizes = counted(sizes)
    check_heads(sizes, cp_comm_type, a2a_size)
    cu_seqlens = {name: x for name, x in given.items() if name.startswith("cu_seqlens_")}
    sequences = read_sequences(cu_seqlens, qkv_format, mask, sizes)
    lengths = Sequences.of(sequences)
    problem = Problem(
        cp_size=cp_size,
        sequences=sequences,
        cp_comm_type=cp_comm_type,
        a2a_size=a2a_size,
        layout=layout,
        qkv_format=qkv_format,
        attn_mask_type=mask,
        window_size=window_size,
        areas=None if areas is None else read_areas(areas, sum(lengths.slots_q), sum(lengths.slots_kv)),
        heads_q=sizes.heads_q,
        heads_kv=sizes.heads_kv,
        d_qk=sizes.d_qk,
        d_v=sizes.d_v,
        dtype=sizes.dtype,
        **scores,
    )
    check_layout(problem)
    for name, none in OF_PLACES.items():
        if getattr(problem, name) != none:
            check_one_document(problem, name)
    return problem


def _read(name: str, given: Mapping[str, Any]) -> Any:
    read = ARGUMENTS[name].read
    assert read is not None
    return read(name, given[name])


def check_offset(problem: Problem, softmax_offset: Any, q: Any) -> None:
    """`softmax_offset` is there exactly when softmax_type is "learnable": one value a query head, on q's device."""
    if problem.softmax_type != "learnable":
        if softmax_offset is not None:
            raise ValueError(
                f"softmax_offset is given, but softmax_type is {problem.softmax_type!r}; it needs 'learnable'"
            )
        return
    check_tensor("softmax_offset", softmax_offset, "a tensor [h_q] for softmax_type 'learnable'")
    if tuple(softmax_offset.shape) != (problem.heads_q,):
        raise ValueError(
            f"softmax_offset has shape {list(softmax_offset.shape)}; it must be [h_q] = [{problem.heads_q}], or "
            "[1, h_q, 1, 1]"
        )
    check_dtype("softmax_offset", softmax_offset, *DTYPES)
    check_one_device("softmax_offset", softmax_offset, "q", q)


def _check_alone(qkv_format: str, attn_mask_type: str | None, window_size: tuple[int, int]) -> None:
    """Areas are for packed buffers, and have all that a mask and a window say."""
    if qkv_format != "thd":
        raise ValueError(f"areas are given, but qkv_format is {qkv_format!r}; they are rows of packed buffers, 'thd'")
    for name, value, none in (("attn_mask_type", attn_mask_type, None), ("window_size", window_size, (-1, -1))):
        if value != none:
            raise ValueError(f"{name} is {value!r}, but areas are given, which say who sees whom; leave one out")


def counted(sizes: Sizes) -> Sizes:
    """The sizes, checked: every size is an int within bounds."""
    given = {name: getattr(sizes, name) for name in _LEAST if getattr(sizes, name) is not None or name in _NEEDED}
    return replace(sizes, **{name: read_count(name, value, at_least=_LEAST[name]) for name, value in given.items()})


def check_heads(sizes: Sizes, cp_comm_type: str, a2a_size: int) -> None:
    """Raise ValueError unless every kv head serves equally many query heads and every rank gets equally many heads."""
    h_q, h_kv = sizes.heads_q, sizes.heads_kv
    if h_q % h_kv:
        raise ValueError(f"h_q is {h_q} and h_kv is {h_kv}; h_q must be a multiple of h_kv")
    if h_q % a2a_size:
        raise ValueError(f"h_q is {h_q}; cp_comm_type {cp_comm_type!r} needs a multiple of the a2a size {a2a_size}")
    if h_kv % a2a_size and a2a_size % h_kv:
        raise ValueError(
            f"h_kv is {h_kv}; cp_comm_type {cp_comm_type!r} needs a multiple or a divisor of the a2a size {a2a_size}"
        )
