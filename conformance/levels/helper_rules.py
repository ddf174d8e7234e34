"""Which calls of a THD helper have an answer: the rules for lengths, and for buffers that must have room for them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

__all__ = ["broken_rule"]

Arguments = dict[str, Any]


class _Broken(Exception):
    """A rule that a call breaks."""


def broken_rule(name: str, arguments: Arguments) -> str | None:
    """The rule that a helper's call breaks, in words; None if the call has an answer.

    >>> broken_rule("thd_read_half_tensor", {"x": torch.zeros(6), "cu_seqlens_padded": torch.tensor([0, 3]), "half": 0})
    'every length of cu_seqlens_padded must be a multiple of 2: [3]'
    """
    try:
        _RULES[name](arguments)
    except _Broken as broken:
        return str(broken)
    return None


def _require(right: bool, rule: str) -> None:
    if not right:
        raise _Broken(rule)


def _sizes(arguments: Arguments, name: str, divisor: int = 1, first: int | None = 0) -> list[int]:
    """The lengths that a cumulative tensor gives; first: what it begins with, None for anything from 0 on."""
    x = arguments[name]
    _require(x.dtype in (torch.int32, torch.int64), f"{name} must be int32 or int64: {x.dtype}")
    _require(x.ndim == 1 and len(x) > 0, f"{name} must be [b + 1]: {list(x.shape)}")
    values = x.tolist()
    _require(values[0] == first if first is not None else values[0] >= 0, f"{name} must begin at 0: {values[:3]}")
    sizes = [b - a for a, b in pairwise(values)]
    _require(min(sizes, default=0) >= 0, f"{name} must not decrease: {values[-3:]}")
    wrong = [n for n in sizes if n % divisor]
    _require(not wrong, f"every length of {name} must be a multiple of {divisor}: {wrong[:3]}")
    return sizes


def _tail(arguments: Arguments, tokens: int, divisor: int, name: str = "cu_seqlens_padded") -> None:
    """The tail behind the last sequence has its share for everyone."""
    tail = tokens - int(arguments[name][-1])
    _require(tail >= 0, f"{name} ends {-tail} rows behind the buffer of {tokens}")
    _require(tail % divisor == 0, f"the tail must be a multiple of {divisor}: {tail}")


def _fits(real: list[int], slots: list[int]) -> None:
    _require(len(real) == len(slots), f"there are {len(real)} real lengths and {len(slots)} padded ones")
    _require(all(a <= b for a, b in zip(real, slots, strict=True)), "a sequence has more tokens than slots")


def _lse(lse: torch.Tensor, packed: bool, sizes: list[int], tokens: int | None = None) -> None:
    """An LSE has room for every sequence: [h, t] (of `tokens` rows, if given), or [b, h, s]."""
    if not packed:
        right = lse.ndim == 3 and len(lse) == len(sizes) and lse.shape[2] >= max(sizes, default=0)
    else:
        right = lse.ndim == 2 and (lse.shape[1] >= sum(sizes) if tokens is None else lse.shape[1] == tokens)
    _require(right, f"an LSE of shape {list(lse.shape)} has no room for the lengths {sizes[:8]}")


def _chunks(a: Arguments) -> list[int]:
    return _sizes(a, "cu_seqlens_padded", 2 * a["cp_size"])


def _partition(a: Arguments) -> None:
    _chunks(a)
    _tail(a, a["total_tokens"], a["cp_size"])


def _reorder(a: Arguments) -> None:
    _chunks(a)
    _tail(a, len(a["x"]), a["cp_size"])


def _copy_valid(a: Arguments) -> None:
    _fits(_sizes(a, "cu_seqlens"), _sizes(a, "cu_seqlens_padded", first=None))
    _tail(a, len(a["out"]), 1)


def _read_half(a: Arguments) -> None:
    _sizes(a, "cu_seqlens_padded", 2)
    _tail(a, a["x"].shape[1 if a["x"].ndim == 4 else 0], 2)


def _read_lse(a: Arguments) -> None:
    sizes = _sizes(a, "cu_seqlens_padded", 2)
    _lse(a["lse"], a["lse_packed"], sizes)
    needed = (sum(sizes) if a["lse_packed"] else max(sizes, default=0)) // 2
    _require(a["max_seqlen"] >= needed, f"max_seqlen must be at least {needed}: {a['max_seqlen']}")


def _correct_lse(a: Arguments) -> None:
    sizes, packed = _sizes(a, "cu_seqlens_padded", 2), a["lse_packed"]
    _lse(a["lse"], packed, sizes)
    _lse(a["lse_step"], packed, [n // 2 for n in sizes], a["lse"].shape[-1] // 2)


def _correct_out(a: Arguments) -> None:
    half = 2 if a["only_second_half"] else 1
    sizes, packed, tokens = _sizes(a, "cu_seqlens_padded", half), a["lse_packed"], len(a["out"])
    _tail(a, tokens, half)
    _lse(a["lse"], packed, sizes, tokens)
    _lse(a["lse_step"], packed, [n // half for n in sizes], tokens // half)


def _correct_grad(a: Arguments) -> None:
    _sizes(a, "cu_seqlens_padded", 2)
    _tail(a, a["grad"].shape[1 if a["grad"].ndim == 4 else 0], 2)


def _pad_sequences(a: Arguments) -> None:
    sizes, factor = _sizes(a, "cu_seqlens"), a["divisibility_factor"]
    _tail(a, len(a["input_ids"]), 1, "cu_seqlens")
    needed = sum(-(-n // factor) * factor for n in sizes)
    _require(a.get("padded_tokens", needed) >= needed, f"padded_tokens must be at least {needed}")


def _rank_lengths(a: Arguments) -> None:
    _fits(_sizes(a, "cu_seqlens"), _chunks(a))


_RULES: dict[str, Callable[[Arguments], None]] = {
    "thd_get_partitioned_indices": _partition,
    "thd_sequence_order_to_cp_rank_order": _reorder,
    "thd_cp_rank_order_to_sequence_order": _reorder,
    "thd_copy_valid_tokens_from_per_split_to_rank_local": _copy_valid,
    "thd_read_half_tensor": _read_half,
    "thd_read_second_half_lse": _read_lse,
    "thd_second_half_lse_correction": _correct_lse,
    "thd_out_correction": _correct_out,
    "thd_grad_correction": _correct_grad,
    "pad_thd_sequences_for_cp": _pad_sequences,
    "get_cu_seqlens_on_cp_rank": _rank_lengths,
}
