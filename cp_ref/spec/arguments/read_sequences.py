"""The sequences of a problem, from cumulative lengths as a call has them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from operator import gt
from typing import TYPE_CHECKING, Any

from cp_ref.spec.arguments.single_values import differences, read_lengths
from cp_ref.spec.tables.problem import Sequence, Sequences

if TYPE_CHECKING:
    from cp_ref.spec.arguments.read_problem import Sizes

__all__ = ["read_sequences"]


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
