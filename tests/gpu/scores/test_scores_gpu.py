"""FlashAttention 4 with ALiBi, score_mod and dropout: launches against dense matrices, dropout's mask bit for bit, and
calls over the simulated group against the oracle.
"""

from __future__ import annotations

import pytest

from cp_fast.kernels.attention.choose_backend import by_name
from tests.gpu.scores.call_cases import CALLS, wrong_call
from tests.gpu.scores.launch_cases import CASES, run_case

if (_reason := by_name("fa4").why_not()) is not None:
    pytest.skip(f"needs the backend 'fa4': {_reason}", allow_module_level=True)


@pytest.mark.parametrize("name", CASES)
def test_launch(name: str) -> None:
    assert run_case(CASES[name]) == []


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    assert wrong_call(name) == []
