"""Compressed keys on a GPU, over the simulated group, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

import cp_fast
from conformance.implementation import Implementation
from tests.sparse.compressed_problems import random_problems

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("part", range(8))
def test_random_problems(part: int) -> None:
    """Two hundred in bfloat16, with gradients; `benchmarks.compressed check` plays them too."""
    for problem in random_problems(200, part, 8):
        assert problem.check(Implementation(cp_fast), "cuda") == [], str(problem)


def test_other_dtypes() -> None:
    for dtype in ("float16", "float32", "float64"):
        for problem in random_problems(16, dtype=dtype):
            assert problem.check(Implementation(cp_fast), "cuda") == [], str(problem)
