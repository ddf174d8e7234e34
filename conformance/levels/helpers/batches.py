"""Helpers for a batch and its lengths, and for the head dimension of v and out."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from conformance.levels.helpers.helper_record import Arguments, Built, HelperRecord
from conformance.levels.helpers.length_rules import check_fits, check_tail, chunk_lengths, lengths_of, require
from conformance.levels.helpers.row_numbers import rank_rows, row_index
from conformance.levels.helpers.values import Lengths, any_bits, chunk_unit, generator_of

if TYPE_CHECKING:
    from conformance.levels.helpers.helper_case import Helper

__all__ = ["HELPERS"]


def _build_pad_sequences(case: Helper, device: str) -> Built:
    lengths, generator = Lengths(case, 1, device), generator_of(case)
    shape = (lengths.tokens,) if case.packed else (1, lengths.tokens)
    ids, labels = (torch.randint(1, 9, shape, generator=generator).to(device) for _ in range(2))
    arguments = {"input_ids": ids, "labels": labels, "cu_seqlens": lengths.padded}
    factor = 2 * case.cp_size
    arguments |= {"divisibility_factor": factor, "padding_token_id": case.choices[0]}
    if device != "cpu":  # The host would have to wait for the sum of the lengths.
        arguments["padded_tokens"] = sum(-(-n // factor) * factor for n in lengths.slots) + lengths.tail
    return Built(arguments | {"padding_label_id": -100 + case.choices[1]}, lengths="cu_seqlens")


def _pad_sequences(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int,
    padding_label_id: int,
    padded_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    sequences = list(pairwise(cu_seqlens.tolist()))
    slots = [-(-(stop - start) // divisibility_factor) * divisibility_factor for start, stop in sequences]

    def padded(x: Tensor, fill: int) -> Tensor:
        values, result = x.flatten().tolist(), []
        for (start, stop), room in zip(sequences, slots, strict=True):
            result += values[start:stop] + [fill] * (room - (stop - start))
        result += values[int(cu_seqlens[-1]) :]
        size = len(result) if padded_tokens is None else padded_tokens
        result = (result + [fill] * (size - len(result)))[:size]
        return torch.tensor(result, dtype=x.dtype, device=x.device).view(*x.shape[:-1], size)

    lengths = torch.tensor([0, *accumulate(slots)], dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return padded(input_ids, padding_token_id), padded(labels, padding_label_id), lengths


def _pad_sequences_rule(a: Arguments) -> None:
    sizes, factor = lengths_of(a, "cu_seqlens"), a["divisibility_factor"]
    check_tail(a, a["input_ids"].shape[-1], 1, "cu_seqlens")
    needed = sum(-(-n // factor) * factor for n in sizes)
    require(a.get("padded_tokens", needed) >= needed, f"padded_tokens must be at least {needed}")


def _build_batch(case: Helper, device: str) -> Built:
    lengths, generator = Lengths(case, chunk_unit(case), device), generator_of(case)
    qkv_format = ("thd", "bshd", "sbhd")[case.choices[0]]
    tokens = lengths.tokens if qkv_format == "thd" else 2 * case.cp_size * (1 + case.tail)
    packed = (tokens,) if case.packed or tokens < 2 else (1, tokens)
    shape = {"thd": packed, "bshd": (2, tokens), "sbhd": (tokens, 2)}[qkv_format]
    batch: dict[str, Any] = {
        name: torch.randint(0, 99, shape, generator=generator).to(device) for name in ("tokens", "labels")
    }
    batch |= {"loss_mask": torch.rand(shape, generator=generator).to(device), "epoch": 3, "attention_mask": None}
    batch |= {"position_ids": batch["tokens"].clone()}
    padded = lengths.padded if qkv_format == "thd" else None
    return Built({"batch": batch, "qkv_format": qkv_format, "cu_seqlens_padded": padded})


def _batch_of_rank(
    batch: dict[str, Any], qkv_format: str, cu_seqlens_padded: Tensor | None, cp_size: int, rank: int
) -> dict[str, Any]:
    """One rank's part of a batch whose tensors all have the format's sequence axis."""

    def cut(x: Tensor) -> Tensor:
        axis = 1 if qkv_format == "bshd" or (qkv_format == "thd" and x.ndim == 2) else 0
        lengths = [0, x.shape[axis]] if cu_seqlens_padded is None else cu_seqlens_padded.tolist()
        return x.index_select(axis, row_index(rank_rows(lengths, x.shape[axis], cp_size, rank), x))

    return {name: cut(x) if isinstance(x, Tensor) else x for name, x in batch.items()}


def _build_rank_lengths(case: Helper, device: str) -> Built:
    one_half = case.choices[0] > 0
    lengths = Lengths(case, 2 * case.cp_size if one_half else chunk_unit(case), device)
    arguments = {"cu_seqlens": lengths.cumulative(lengths.real), "cu_seqlens_padded": lengths.padded}
    arguments |= {"cp_size": case.cp_size, "cp_rank": case.rank}
    return Built(arguments | {"first_half": case.choices[0] != 1, "second_half": case.choices[0] != 2})


def _rank_lengths(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int, first_half: bool, second_half: bool
) -> Tensor:
    chunks = [cp_rank] * first_half + [2 * cp_size - 1 - cp_rank] * second_half
    held = []
    for (a, b), (start, stop) in zip(pairwise(cu_seqlens.tolist()), pairwise(cu_seqlens_padded.tolist()), strict=True):
        size = (stop - start) // (2 * cp_size)
        whole = cp_size == 1 and first_half and second_half
        held.append(b - a if whole else sum(min(max(b - a - number * size, 0), size) for number in chunks))
    return torch.tensor([0, *accumulate(held)], dtype=cu_seqlens.dtype, device=cu_seqlens.device)


def _rank_lengths_rule(a: Arguments) -> None:
    one_half = a["first_half"] != a["second_half"]
    slots = lengths_of(a, "cu_seqlens_padded", 2 * a["cp_size"]) if one_half else chunk_lengths(a)
    check_fits(lengths_of(a, "cu_seqlens"), slots)


def _build_pad_v(case: Helper, device: str) -> Built:
    v = any_bits(case, (3, *case.dims, 4), device)
    return Built({"v": v, "d_qk": 4 + case.spare})


def _pad_v(v: Tensor, d_qk: int) -> Tensor:
    result = torch.zeros(*v.shape[:-1], d_qk, dtype=v.dtype, device=v.device)
    result[..., : v.shape[-1]] = v
    return result


def _build_trim_out(case: Helper, device: str) -> Built:
    out = any_bits(case, (3, *case.dims, 4 + case.spare), device)
    return Built({"out": out, "d_v": 4})


def _trim_out(out: Tensor, d_v: int) -> Tensor:
    return out.narrow(-1, 0, d_v)


HELPERS = {
    "pad_thd_sequences_for_cp": HelperRecord(_build_pad_sequences, _pad_sequences, _pad_sequences_rule),
    "get_batch_on_this_cp_rank": HelperRecord(_build_batch, _batch_of_rank),
    "get_cu_seqlens_on_cp_rank": HelperRecord(_build_rank_lengths, _rank_lengths, _rank_lengths_rule),
    "pad_v": HelperRecord(_build_pad_v, _pad_v),
    "trim_out": HelperRecord(_build_trim_out, _trim_out),
}
