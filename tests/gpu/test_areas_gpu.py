"""Areas on one GPU, all ranks over the simulated group: named and random masks, counted exactly and within budget."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from conformance.adapters.cp_fast import OneBackend
from conformance.case import Case
from conformance.checks.probes import check_probes
from conformance.checks.reference import UnsupportedCase
from conformance.checks.values import check_budget, check_logic
from cp_fast import masks
from cp_fast.backends import by_name
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import CP_COMM_TYPES
from tests.cp_fast.compile.planned_at import ALWAYS_WAIT, planned_at
from tests.cp_fast.compile.test_sharing import always as always_spread
from tests.masks.problems import problems

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (300, 200, 140)  # tokens, each document with some padding behind it
SLOTS = (320, 200, 160)
HEADS: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "d_qk": 64, "d_v": 64, "dtype": "bfloat16", "qkv_format": "thd"}
MASKS = {
    "prefix_lm": [masks.prefix_lm(n // 2, n) for n in LENGTHS],
    "shared_prefix": [masks.shared_prefix(n // 5, [n // 5] * 4) for n in LENGTHS],
    "tree": [masks.tree([n // 4] * 4, [-1, 0, 1, 0]) for n in LENGTHS],
    "block_causal": [masks.block_causal(n, 48) for n in LENGTHS],
    "chunked": [masks.chunked(n, 64) for n in LENGTHS],
    "first_tokens_and_window": [masks.first_tokens_and_window(n, 9, 50) for n in LENGTHS],
    "dilated_blocks": [masks.dilated_blocks(n, 20, 2) for n in LENGTHS],
}
SEQUENCES = tuple(Sequence(n, n, s, s) for n, s in zip(LENGTHS, SLOTS, strict=True))


def implementation(backend: str) -> OneBackend:
    if (reason := by_name(backend).why_not()) is not None:
        pytest.skip(f"needs backend {backend}: {reason}")
    return OneBackend(backend)


@pytest.mark.parametrize("comm", CP_COMM_TYPES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", ["fa4", "torch"])
def test_named_masks(backend: str, name: str, comm: str) -> None:
    rows = masks.packed(MASKS[name], [0, *accumulate(SLOTS)])
    size = {"a2a": 4, "a2a+p2p": 2}.get(comm, 1)
    areas = tuple(map(tuple, rows.tolist()))
    problem = replace(Problem(4, SEQUENCES, comm, size, **HEADS), areas=areas)
    impl: Any = implementation(backend)
    case = Case(problem, use_plan=True, return_lse=True, loss="out+lse")
    assert check_probes(impl, case, "cuda") == []
    assert check_budget(impl, case, "cuda") == []


@pytest.mark.parametrize("comm", ["p2p", "all_gather"])
@pytest.mark.parametrize("name", MASKS)
def test_keys_that_wait_and_keys_that_are_spread(name: str, comm: str) -> None:
    """As with many rows, of which these have too few."""
    with always_spread(), planned_at(ALWAYS_WAIT):
        test_named_masks("fa4", name, comm)


@pytest.mark.parametrize("backend", ["fa4", "torch"])
@settings(
    max_examples=int(os.environ.get("CP_AREAS", "10")), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(problem=problems())
def test_random_areas(backend: str, problem: Problem) -> None:
    """Every pair is counted; `torch` in float64 meets the oracle besides. `benchmarks.conformance_gpu` draws many."""
    impl: Any = implementation(backend)
    dims = {"d_qk": 64, "d_v": 64, "dtype": "bfloat16"} if backend == "fa4" else {}
    case = Case(replace(problem, **dims), return_lse=True, loss="out+lse")
    try:
        assert check_probes(impl, case, "cuda") == []
        if backend == "torch":
            assert check_logic(impl, case, "cuda") == []
    except UnsupportedCase as refusal:
        pytest.fail(str(refusal))
