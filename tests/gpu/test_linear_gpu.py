"""Linear layers on a GPU, over the simulated group, against the oracle."""

from __future__ import annotations

import pytest
import torch

import cp_fast
from cp_fast.linear.choose_kernels import LIBRARIES
from cp_ref.common.linear.linear_calls import KINDS
from cp_ref.spec import Problem
from cp_ref.spec import Sequence as Lengths
from tests.linear.errors import relative_errors
from tests.linear.played import Layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LIMITS = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4, "float64": 1e-9}
PROBLEMS = {
    "dual_chunk": Problem(2, (Lengths(300, 300, 300, 300),), qkv_format="thd"),
    "contiguous": Problem(
        4, tuple(Lengths(n, n, n, n) for n in (150, 1, 0, 217)), layout="contiguous", qkv_format="thd"
    ),
    "padding": Problem(4, tuple(Lengths(n, n, 160, 160) for n in (160, 33)), attn_mask_type="padding_causal"),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", KINDS)
def test_linear_attention(kind: str, dtype: str, name: str) -> None:
    reason = LIBRARIES[0].why_not()
    if dtype in ("bfloat16", "float16") and reason is not None:
        pytest.skip(f"needs flash-linear-attention: {reason}")
    layer = Layer(kind=kind, heads=2, shared=2, d_k=64, d_v=128, initial_state=True, output_final_state=True)
    found = relative_errors(cp_fast, PROBLEMS[name], layer, getattr(torch, dtype), "cuda")
    assert {name: error for name, error in found.items() if not error <= LIMITS[dtype]} == {}
