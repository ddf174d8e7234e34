"""Head chunks on one GPU over the simulated group: exact counts and errors within budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.case import Case
from conformance.checks.probes import check_probes
from conformance.checks.values import check_budget
from cp_fast.compile.chosen_schedule import choose_head_chunks
from cp_ref.schedules.problem import Problem
from tests.cp_fast.compile.planned_at import ALWAYS_CHUNKS, planned_at
from tests.gpu.test_attention_gpu import BACKENDS, HEADS, implementation, packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = {"a2a": (2, 2), "a2a+p2p": (4, 2)}  # cp_size and a2a_size


@pytest.mark.parametrize("window", [-1, 90])
@pytest.mark.parametrize("comm", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_and_budgets(backend: str, comm: str, window: int) -> None:
    check(backend, comm, window, "cuda")


def check(backend: str, comm: str, window: int, device: str) -> None:
    """With a plan and a tail, a sink where there is a window."""
    cp_size, a2a_size = SIZES[comm]
    sizes = {**HEADS, "heads_q": 16, "heads_kv": 8}
    problem = Problem(cp_size, packed(cp_size), comm, a2a_size, qkv_format="thd", window_size=(window, 0), **sizes)
    case = Case(
        replace(problem, softmax_type="vanilla" if window < 0 else "learnable"), cp_size, cp_size, use_plan=True
    )
    with planned_at(ALWAYS_CHUNKS):
        assert len(choose_head_chunks(problem)) > 1
        assert check_budget(implementation(backend), case, device) == []
        assert check_probes(implementation(backend), case, device) == []
