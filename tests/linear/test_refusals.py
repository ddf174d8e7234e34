"""What linear layers refuse: on every rank where one is wrong, by name, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_ref import SimGroup
from cp_ref.simulator import SimMember

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}
SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 4, "d_v": 4, "dtype": torch.float32, "device": "cpu"}
CU = torch.tensor([0, 5, 8])
THD: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": CU}


def tensors(**changes: Any) -> dict[str, Any]:
    """One rank's slices of the problem `THD` on two ranks: h 2, h_v 4, d_k 3, d_v 5."""
    found = {"q": torch.ones(4, 2, 3), "k": torch.ones(4, 2, 3), "v": torch.ones(4, 4, 5), "g": torch.zeros(4, 4)}
    return found | {"beta": torch.ones(4, 4)} | changes


ONES = torch.ones
LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "gla"}, "kind is 'gla'; it must be one of 'gated_delta_rule', 'kda', 'mamba2'"),
    "beta missing": ({"beta": None}, "beta is None, but kind is 'gated_delta_rule'"),
    "beta refused": ({"kind": "mamba2"}, "beta is given, but kind is 'mamba2'"),
    "flag": ({"output_final_state": 1}, "output_final_state is 1; it must be True or False"),
    "scale": ({"scale": float("nan")}, "scale is nan; it must be finite"),
    "scale infinite": ({"scale": float("inf")}, "scale is inf; it must be finite"),
    "scale is a word": ({"scale": "1"}, "scale is '1'; it must be a number"),
    "scale is a flag": ({"scale": True}, "scale is True; it must be a number"),
    "few rows": ({n: x[:3] for n, x in tensors().items()}, "q has 3 tokens; by the plan's lengths rank"),
    "local lengths": (
        {n: torch.cat([x, x]) for n, x in tensors().items()},
        "q has 8 rows on this rank alone, as many as the plan's lengths have on all 2 ranks",
    ),
    "rows of k": ({"k": ONES(5, 2, 3)}, r"k has shape \[5, 2, 3\], and q \[4, 2, 3\]"),
    "axes of q": ({"q": ONES(1, 4, 2, 3)}, r"q has shape \[1, 4, 2, 3\]; qkv_format 'thd' needs \[t, h, d_k\]"),
    "axes of g": ({"g": ONES(4, 4, 3)}, r"g has shape \[4, 4, 3\]; qkv_format 'thd' needs \[t, h_v\]"),
    "axes of g of kda": ({"kind": "kda"}, r"g has shape \[4, 4\]; qkv_format 'thd' needs \[t, h_v, d_k\]"),
    "heads of k": ({"k": ONES(4, 1, 3)}, r"k has shape \[4, 1, 3\] and q \[4, 2, 3\]; they must be equal"),
    "heads of v": (
        {"v": ONES(4, 3, 5), "g": ONES(4, 3), "beta": ONES(4, 3)},
        "h_v is 3 and h is 2; h_v must be a multiple of h",
    ),
    "heads of g": ({"g": ONES(4, 2)}, r"g has shape \[4, 2\]; its last sizes must be \[4\]"),
    "heads of beta": ({"beta": ONES(4, 2)}, r"beta has shape \[4, 2\]; its last sizes must be \[4\]"),
    "no heads": ({"q": ONES(4, 0, 3), "k": ONES(4, 0, 3)}, "h is 0; it must be at least 1"),
    "no dims": ({"v": ONES(4, 4, 0)}, "d_v is 0; it must be at least 1"),
    "dtype of k": ({"k": ONES(4, 2, 3).double()}, "k has dtype torch.float64; it must be float32"),
    "dtype of g": ({"g": ONES(4, 4).bfloat16()}, "g has dtype torch.bfloat16; it must be float32"),
    "dtype of q": ({"q": ONES(4, 2, 3, dtype=torch.int64)}, "q has dtype torch.int64; it must be one of float16"),
    "no tensor": ({"q": [1.0]}, "q is of type list; it must be a tensor"),
    "no g": ({"g": None}, "g is None; it must be a tensor"),
    "sparse": ({"v": ONES(4, 4, 5).to_sparse()}, "v is a nested or sparse tensor"),
    "meta": ({"q": ONES(4, 2, 3, device="meta")}, "q is on meta"),
    "device": ({"g": ONES(4, 4, device="meta")}, "g is on meta"),
    "states": (
        {"initial_state": ONES(1, 4, 3, 5)},
        r"initial_state has shape \[1, 4, 3, 5\]; it must be \[b, h_v, d_k, d_v\] = \[2, 4, 3, 5\]",
    ),
    "dtype of states": (
        {"initial_state": ONES(2, 4, 3, 5).half()},
        "initial_state has dtype torch.float16; it must be float32 or float64",
    ),
    "no plan": ({"plan": None}, "plan is None; it must be a cp_ref.Plan, made with linear=True"),
}
CONVOLUTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "axes of x": ({"x": ONES(4, 3, 1)}, r"x has shape \[4, 3, 1\]; qkv_format 'thd' needs \[t, channels\]"),
    "rows": ({"x": ONES(3, 3)}, "x has 3 tokens; by the plan's lengths"),
    "weight": ({"weight": ONES(2, 4)}, r"weight has shape \[2, 4\], and x has 3 channels; it must be \[channels, ker"),
    "weight of a module": ({"weight": ONES(3, 1, 4)}, r"weight has shape \[3, 1, 4\]"),
    "kernel_size": ({"weight": ONES(3, 0)}, "kernel_size is 0; it must be at least 1"),
    "bias": ({"bias": ONES(4)}, r"bias has shape \[4\], and x has 3 channels"),
    "dtype": ({"weight": ONES(3, 4).half()}, "weight has dtype torch.float16; it must be float32"),
    "activation": ({"activation": "gelu"}, "activation is 'gelu'; it must be one of 'silu', 'swish'"),
    "no tensor": ({"weight": None}, "weight is None; it must be a tensor"),
}


def refused(package: str, words: str, call: Any, *wrong_on: int) -> None:
    """The call raises its own error on the ranks where it is wrong, and one that quotes it on the others."""

    def one(member: SimMember) -> None:
        cp = PACKAGES[package].ContextParallel(member)
        plan = PACKAGES[package].make_plan(cp=cp, **THD, **SIZES, linear=True)
        here = member.rank in wrong_on
        said = words.replace("cp_ref", package) if here else "rank . refused its arguments"
        with pytest.raises((ValueError, TypeError), match=said):
            call(cp, plan, here)
        call(cp, plan, False)  # the group still works

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", LAYERS)
def test_linear_attention(name: str, package: str) -> None:
    changes, words = LAYERS[name]

    def call(cp: Any, plan: Any, wrong: bool) -> None:
        given = tensors() | {"cp": cp, "plan": plan} | (changes if wrong else {})
        PACKAGES[package].linear_attention(**given)

    refused(package, words, call, 0, 1)
    refused(package, words, call, 1)


@pytest.mark.parametrize("name", LAYERS)
def test_a_known_call_hides_no_wrong_one(name: str) -> None:
    changes, words = LAYERS[name]

    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member)
        plan = cp_fast.make_plan(cp=cp, **THD, **SIZES, linear=True)
        good: dict[str, Any] = tensors() | {"cp": cp, "plan": plan, "scale": 1.0, "output_final_state": True}
        for _ in range(2):
            cp_fast.linear_attention(**good)
        with pytest.raises((ValueError, TypeError), match=words.replace("cp_ref", "cp_fast")):
            cp_fast.linear_attention(**(good | changes))

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_causal_conv1d(name: str, package: str) -> None:
    changes, words = CONVOLUTIONS[name]

    def call(cp: Any, plan: Any, wrong: bool) -> None:
        given = {"x": ONES(4, 3), "weight": ONES(3, 4), "cp": cp, "plan": plan} | (changes if wrong else {})
        PACKAGES[package].causal_conv1d(**given)

    refused(package, words, call, 0, 1)
    refused(package, words, call, 0)


@pytest.mark.parametrize("package", PACKAGES)
def test_other_sizes_on_other_ranks(package: str) -> None:
    def one(member: SimMember) -> None:
        cp = PACKAGES[package].ContextParallel(member)
        plan = PACKAGES[package].make_plan(cp=cp, **THD, **SIZES, linear=True)
        with pytest.raises(ValueError, match=r"rank . has d_v=. where rank . has d_v="):
            PACKAGES[package].linear_attention(**tensors(v=ONES(4, 4, 5 + member.rank)), cp=cp, plan=plan)
        with pytest.raises(ValueError, match=r"rank . has kernel_size=. where rank . has kernel_size="):
            PACKAGES[package].causal_conv1d(ONES(4, 3), ONES(3, 4 + member.rank), cp=cp, plan=plan)

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_plan_that_is_not_for_linear_layers(package: str) -> None:
    def one(member: SimMember) -> None:
        cp = PACKAGES[package].ContextParallel(member)
        plan = PACKAGES[package].make_plan(cp=cp, **THD, **SIZES)
        with pytest.raises(ValueError, match="plan was made without linear=True, so it has no state messages"):
            PACKAGES[package].linear_attention(**tensors(), cp=cp, plan=plan)
        for schedule in (lambda: plan.states, lambda: plan.halo(4)):
            with pytest.raises(ValueError, match="plan was made without linear=True; it has schedules of attention"):
                schedule()

    SimGroup(2).run(one)


PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "a word": ({"linear": "yes"}, "linear is 'yes'; it must be True or False"),
    "areas": ({"areas": torch.tensor([[0, 5, 0, 5, -1, 0]])}, "linear is True, but areas are given"),
    "cross attention": ({"cu_seqlens_kv": torch.tensor([0, 4, 8])}, "the lengths of queries and keys differ"),
    "padding of keys": (
        {"cu_seqlens_kv_padded": torch.tensor([0, 6, 9])},
        "the lengths of queries and keys differ",
    ),
}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str, package: str) -> None:
    changes, words = PLANS[name]

    def one(member: SimMember) -> None:
        cp = PACKAGES[package].ContextParallel(member)
        for call in (PACKAGES[package].make_plan, PACKAGES[package].supports):
            with pytest.raises((ValueError, TypeError), match=words):
                call(cp=cp, **(THD | SIZES | {"linear": True} | changes))

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_ranks_agree_on_linear(package: str) -> None:
    def one(member: SimMember) -> None:
        cp = PACKAGES[package].ContextParallel(member)
        with pytest.raises(ValueError, match=r"the ranks have different problems: .*linear=True"):
            PACKAGES[package].make_plan(cp=cp, **THD, **SIZES, linear=member.rank == 0)

    SimGroup(2).run(one)
