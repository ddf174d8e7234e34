"""Triton's kernels over chosen keys on a GPU, against PyTorch in float64."""

from __future__ import annotations

import math

import pytest
import torch

from cp_fast.kernels.sparse.sparse_kernels import Visible, choose_sparse
from tests.sparse.kernel_checks import CLASSES, check_workspace, draw, few_kinds, mistakes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", few_kinds())
def test_random_problems(kind: int) -> None:
    """A hundred in bfloat16; those of a kind share the compiled kernels. `benchmarks.conformance_gpu` draws more."""
    kernels = choose_sparse(torch.empty(1, device="cuda", dtype=torch.bfloat16), "auto")
    for seed in range(kind, 200, CLASSES):
        problem = draw(seed)
        assert mistakes(kernels, problem, "cuda") == [], str(problem)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("seed", [3, 8])
def test_other_dtypes(dtype: torch.dtype, seed: int) -> None:
    kernels = choose_sparse(torch.empty(1, device="cuda", dtype=dtype), "auto")
    problem = draw(seed, dtype)
    assert mistakes(kernels, problem, "cuda") == [], str(problem)


def test_scores_have_the_same_bits_beside_any_other_rows_and_keys() -> None:
    """A rank gathers other keys than one process has, and its query rows have other neighbours."""
    kernels = choose_sparse(torch.empty(1, device="cuda", dtype=torch.bfloat16), "auto")
    n, draws = 5000, torch.Generator("cuda").manual_seed(0)
    q = torch.randn(n, 64, 128, generator=draws, device="cuda").bfloat16()
    k = torch.randn(n, 128, generator=draws, device="cuda").bfloat16()
    weights = torch.randn(n, 64, generator=draws, device="cuda")
    stops = torch.arange(1, n + 1, dtype=torch.int32, device="cuda")[:, None]
    whole = kernels.select(q, k, weights, Visible(0 * stops, stops, 0 * stops), 256, 0.1)
    for first, last, behind in ((3, 1001, 1001), (2500, 2507, 3333), (4000, 5000, 5000)):
        some = stops[first:last]
        visible = Visible(0 * some + 37, some + 37, 0 * some)
        keys = torch.cat([torch.full_like(k[:37], math.nan), k[:behind]])
        found = kernels.select(q[first:last], keys, weights[first:last], visible, 256, 0.1)
        assert torch.equal(found, whole[first:last])


def test_a_workspace_with_few_rows() -> None:
    assert check_workspace("cuda") == []
