"""Helpers that give every rank its rows, or put rows in another order."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from conformance.levels.helpers.helper_record import Arguments, Built, HelperRecord
from conformance.levels.helpers.length_rules import check_fits, check_tail, chunk_lengths, lengths_of
from conformance.levels.helpers.row_numbers import rank_rows, row_index
from conformance.levels.helpers.values import Lengths, any_bits, chunk_unit, generator_of

if TYPE_CHECKING:
    from conformance.levels.helpers.helper_case import Helper

__all__ = ["HELPERS"]


def _build_partition(case: Helper, device: str) -> Built:
    lengths = Lengths(case, chunk_unit(case), device)
    arguments = {"cu_seqlens_padded": lengths.padded, "total_tokens": lengths.tokens}
    return Built(arguments | {"cp_size": case.cp_size, "cp_rank": case.rank})


def _partition(cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    rows = rank_rows(cu_seqlens_padded.tolist(), total_tokens, cp_size, cp_rank)
    return torch.tensor(rows, dtype=cu_seqlens_padded.dtype, device=cu_seqlens_padded.device)


def _partition_rule(a: Arguments) -> None:
    chunk_lengths(a)
    check_tail(a, a["total_tokens"], a["cp_size"])


def _build_reorder(case: Helper, device: str) -> Built:
    lengths = Lengths(case, chunk_unit(case), device)
    x = any_bits(case, (lengths.tokens, *case.dims), device)
    return Built({"x": x, "cu_seqlens_padded": lengths.padded, "cp_size": case.cp_size})


def _rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int) -> Tensor:
    lengths = cu_seqlens_padded.tolist()
    rows = [row for rank in range(cp_size) for row in rank_rows(lengths, len(x), cp_size, rank)]
    return row_index(rows, x)


def _to_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int) -> Tensor:
    return x[_rank_order(x, cu_seqlens_padded, cp_size)]


def _to_sequence_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int) -> Tensor:
    result = torch.empty_like(x)
    result[_rank_order(x, cu_seqlens_padded, cp_size)] = x
    return result


def _reorder_rule(a: Arguments) -> None:
    chunk_lengths(a)
    check_tail(a, len(a["x"]), a["cp_size"])


def _build_copy_valid(case: Helper, device: str) -> Built:
    lengths, generator = Lengths(case, 2, device), generator_of(case)
    shape = (lengths.tokens, *case.dims)
    out, inp = (any_bits(case, shape, device, generator) for _ in range(2))
    arguments = {"out": out, "inp": inp, "cu_seqlens_padded": lengths.padded}
    return Built(arguments | {"cu_seqlens": lengths.cumulative(lengths.real)}, target="out", lengths="cu_seqlens")


def _copy_valid(out: Tensor, inp: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor) -> None:
    rows: list[int] = []
    for start, (first, last) in zip(cu_seqlens_padded.tolist()[:-1], pairwise(cu_seqlens.tolist()), strict=True):
        rows += range(start, start + last - first)
    index = row_index(rows, out)
    out[index] = inp[index].to(out.dtype)


def _copy_valid_rule(a: Arguments) -> None:
    check_fits(lengths_of(a, "cu_seqlens"), lengths_of(a, "cu_seqlens_padded", first=None))
    check_tail(a, len(a["out"]), 1)


HELPERS = {
    "thd_get_partitioned_indices": HelperRecord(_build_partition, _partition, _partition_rule),
    "thd_sequence_order_to_cp_rank_order": HelperRecord(_build_reorder, _to_rank_order, _reorder_rule),
    "thd_cp_rank_order_to_sequence_order": HelperRecord(_build_reorder, _to_sequence_order, _reorder_rule),
    "thd_copy_valid_tokens_from_per_split_to_rank_local": HelperRecord(
        _build_copy_valid, _copy_valid, _copy_valid_rule
    ),
}
