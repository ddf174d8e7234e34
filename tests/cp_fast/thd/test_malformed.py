"""Arguments of the helpers that are no tensors, numbers or lengths at all: named, in both packages, by every kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_fast.movers import use
from tests.marks import needs_cxx

CU = torch.tensor([0, 8, 16])
IDS = torch.arange(13)
HALVES: dict[str, Any] = {"out_step": torch.zeros(8, 2, 4), "lse": torch.zeros(2, 16), "lse_step": torch.zeros(2, 8)}
GOOD: dict[str, dict[str, Any]] = {
    "thd_sequence_order_to_cp_rank_order": {"x": torch.zeros(16, 3), "cu_seqlens_padded": CU, "cp_size": 2},
    "thd_cp_rank_order_to_sequence_order": {"x": torch.zeros(16, 3), "cu_seqlens_padded": CU, "cp_size": 2},
    "thd_get_partitioned_indices": {"cu_seqlens_padded": CU, "total_tokens": 16, "cp_size": 2, "cp_rank": 0},
    "thd_copy_valid_tokens_from_per_split_to_rank_local": {
        "out": torch.zeros(16, 3),
        "inp": torch.zeros(16, 3),
        "cu_seqlens_padded": CU,
        "cu_seqlens": CU,
    },
    "thd_out_correction": HALVES
    | {"out": torch.zeros(16, 2, 4), "cu_seqlens_padded": CU, "only_second_half": True, "lse_packed": True},
    "thd_grad_correction": {
        "grad": torch.zeros(16, 2, 4),
        "grad_step": torch.zeros(8, 2, 4),
        "cu_seqlens_padded": CU,
        "first_half": "none",
        "second_half": "add",
    },
    "pad_thd_sequences_for_cp": {
        "input_ids": IDS,
        "labels": IDS.to(torch.uint8),
        "cu_seqlens": torch.tensor([0, 5, 13]),
        "divisibility_factor": 4,
        "padding_label_id": 0,
    },
    "pad_v": {"v": torch.zeros(3, 2, 4), "d_qk": 6},
    "trim_out": {"out": torch.zeros(3, 2, 6), "d_v": 4},
}
NESTED = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
WRONG: list[tuple[str, str, Any]] = [
    ("thd_sequence_order_to_cp_rank_order", "x", [torch.zeros(16, 3)]),
    ("thd_cp_rank_order_to_sequence_order", "x", None),
    ("thd_cp_rank_order_to_sequence_order", "x", NESTED),
    ("thd_cp_rank_order_to_sequence_order", "cp_size", 2**63),
    ("thd_get_partitioned_indices", "cu_seqlens_padded", CU.to_sparse()),
    ("thd_get_partitioned_indices", "total_tokens", 2**62),
    ("thd_copy_valid_tokens_from_per_split_to_rank_local", "out", torch.zeros(1, 3).expand(16, 3)),
    ("thd_copy_valid_tokens_from_per_split_to_rank_local", "out", torch.zeros(16, 3, requires_grad=True)),
    ("thd_out_correction", "out", torch.zeros(1, 2, 4).expand(16, 2, 4)),
    ("thd_grad_correction", "grad", torch.zeros(16, 1, 4).expand(16, 2, 4)),
    ("pad_thd_sequences_for_cp", "divisibility_factor", 2**62),
    ("pad_thd_sequences_for_cp", "padding_token_id", 0.5),
    ("pad_thd_sequences_for_cp", "padding_token_id", 2**63),
    ("pad_thd_sequences_for_cp", "padding_token_id", True),
    ("pad_thd_sequences_for_cp", "padding_label_id", -100),
    ("pad_thd_sequences_for_cp", "padding_label_id", torch.tensor(0)),
    ("pad_thd_sequences_for_cp", "padded_tokens", 2**62),
    ("pad_v", "d_qk", 2**62),
    ("trim_out", "out", torch.zeros(3, 2, 6).to_sparse()),
]


@pytest.fixture(params=["cp_ref", "torch", pytest.param("native", marks=needs_cxx)])
def helpers(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The reference's helpers, and the fast ones by each implementation."""
    with nullcontext() if request.param == "cp_ref" else use(request.param):
        yield cp_ref.thd if request.param == "cp_ref" else cp_fast.thd


def called(helpers: Any, name: str, **odd: Any) -> None:
    arguments = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in GOOD[name].items()}
    getattr(helpers, name)(**(arguments | odd))


@pytest.mark.parametrize("name", list(GOOD))
def test_the_arguments_are_right_otherwise(helpers: Any, name: str) -> None:
    called(helpers, name)


@pytest.mark.parametrize(
    ("name", "argument", "value"), WRONG, ids=[f"{name}-{argument}" for name, argument, _ in WRONG]
)
def test_it_is_named(helpers: Any, name: str, argument: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{argument} "):
        called(helpers, name, **{argument: value})
