"""An evaluation under torch.inference_mode makes a plan, its tables or its update; training then uses the same plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_ref import SimGroup
from cp_ref.simulator import SimMember

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}
KINDS = ("gated_delta_rule", "kda", "mamba2")
ROWS = 12  # of each of two ranks
SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float64, "device": "cpu"}


def use(module: Any, cp: Any, plan: Any) -> None:
    """One call of each kind of layer, and positions; a backward pass where there are gradients."""
    train = not torch.is_inference_mode_enabled()
    x = torch.randn(ROWS, 2, 8, dtype=torch.float64, requires_grad=train)
    g, beta = -x[..., 0].exp(), x[..., 0].sigmoid()
    total = module.attention(x, x, x, cp=cp, plan=plan).sum()
    total = total + torch.nn.Embedding(24, 1)(plan.position_ids).sum()
    total = total + module.causal_conv1d(x.flatten(1), torch.ones(16, 3).double(), cp=cp, plan=plan).sum()
    for kind in KINDS:
        decay = -x.exp() if kind == "kda" else g
        more = {} if kind == "mamba2" else {"beta": beta}
        total = total + module.linear_attention(x, x, x, decay, **more, cp=cp, plan=plan, kind=kind).sum()
    if train:
        total.backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("making", [False, True], ids=["made in training", "made in evaluation"])
@pytest.mark.parametrize("room", [False, True], ids=["fixed", "updated"])
def test_training_uses_what_an_evaluation_made(room: bool, making: bool, package: str) -> None:
    module = PACKAGES[package]
    lengths = torch.tensor([0, 10, 24])

    def one(member: SimMember) -> None:
        cp = module.ContextParallel(member, layout="contiguous")
        more = {"max_sequences": 2, "max_tokens_q": 2 * ROWS} if room else {}
        with torch.inference_mode(making):
            plan = module.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=lengths, linear=True, **SIZES, **more)
        for evaluating in (True, False, True, False):
            with torch.inference_mode(evaluating):
                if room:
                    plan.update(cp=cp, cu_seqlens_q=lengths)
                use(module, cp, plan)

    SimGroup(2).run(one)


@pytest.mark.parametrize("making", [False, True], ids=["made in training", "made in evaluation"])
def test_a_compiled_layer_takes_a_plan_of_an_evaluation(making: bool) -> None:
    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member)
        with torch.inference_mode(making):
            plan = cp_fast.make_plan(cp=cp, qkv_format="bshd", batch_size=1, seqlen_q=8, **SIZES)
        layer = torch.compile(lambda x: cp_fast.attention(x, x, x, cp=cp, plan=plan) + 1, backend="aot_eager")
        x = torch.randn(1, 8, 2, 8, dtype=torch.float64, requires_grad=True)
        with torch.inference_mode():
            layer(x)
        layer(x).sum().backward()

    SimGroup(1).run(one)
