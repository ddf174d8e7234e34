"""Calls with scores that depend on positions: seeds, recomputation, updated plans, traces, and nothing at all."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cp_fast
import cp_ref
from conformance.case import SCORE_MODS, Case
from conformance.checks.values import check_logic
from cp_ref import SimGroup, dense_attention
from cp_ref.schedules.problem import Problem, Sequence

PACKAGES: dict[str, Any] = {"cp_ref": cp_ref, "cp_fast": cp_fast}
both_packages = pytest.mark.parametrize("package", PACKAGES)

Q, K, V = (torch.randn(2, 16, 4, 8, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3))
SLOPES = torch.linspace(0.1, 0.9, 4)


def squared(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score - 0.1 * table[h] * score**2


EVERYTHING: dict[str, Any] = {
    "alibi_slopes": SLOPES,
    "score_mod": squared,
    "aux_tensors": {"table": torch.linspace(-1.0, 1.0, 4)},
    "dropout_p": 0.3,
    "dropout_seed": 17,
}


def both_passes(package: str, member: Any, *, again: bool = False, **arguments: Any) -> list[torch.Tensor]:
    side = PACKAGES[package]
    cp = side.ContextParallel(member)
    leaves = [side.shard(x, cp=cp).clone().requires_grad_() for x in (Q, K, V)]

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        return side.attention(*tensors, cp=cp, **arguments)

    out = checkpoint(layer, *leaves, use_reentrant=False) if again else layer(*leaves)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == 4 and all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@both_packages
def test_without_them_nothing_changes_by_a_bit(package: str) -> None:
    plain = SimGroup(2).run(lambda member: both_passes(package, member))
    nothing: list[dict[str, Any]] = [
        {"dropout_p": 0.0, "dropout_seed": None},
        {"alibi_slopes": None, "score_mod": None, "aux_tensors": {}},
    ]
    for arguments in nothing:
        found = SimGroup(2).run(lambda member, given=arguments: both_passes(package, member, **given))
        assert all(map(same, plain, found))


@both_packages
def test_a_seed_in_a_tensor(package: str) -> None:
    seeds = 17, torch.tensor(17), torch.tensor([17])
    runs = [
        SimGroup(2).run(lambda member, seed=seed: both_passes(package, member, **{**EVERYTHING, "dropout_seed": seed}))
        for seed in (*seeds, 18)
    ]
    assert all(same(x, y) for run in runs[1:3] for x, y in zip(runs[0], run, strict=True))
    assert not same(runs[0][0], runs[3][0])


@both_packages
@pytest.mark.parametrize("name", ["dropout_seed", "alibi_slopes", "table"])
def test_a_tensor_must_stay_as_it_is_until_the_backward_pass(name: str, package: str) -> None:
    given = {**EVERYTHING, "dropout_seed": torch.tensor(17), "alibi_slopes": SLOPES.clone()}
    given["aux_tensors"] = {"table": torch.ones(4)}

    def one(member: Any) -> str:
        cp = PACKAGES[package].ContextParallel(member)
        q = Q.clone().requires_grad_()
        out = PACKAGES[package].attention(q, q, q, cp=cp, **given)
        ({**given, **given["aux_tensors"]})[name].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        return "refused"

    assert SimGroup(1).run(one) == ["refused"]


@both_packages
def test_recomputation_draws_the_same_mask(package: str) -> None:
    once = SimGroup(2).run(lambda member: both_passes(package, member, **EVERYTHING))
    twice = SimGroup(2).run(lambda member: both_passes(package, member, again=True, **EVERYTHING))
    assert all(map(same, once, twice))


@both_packages
def test_a_function_that_changes_its_arguments(package: str) -> None:
    def in_place(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_idx += 1
        score.mul_(0.5)
        return score.add_(0.1 * q_idx)

    def pure(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 0.5 * score + 0.1 * (q_idx + 1)

    runs = [
        SimGroup(2).run(lambda member, f=f: both_passes(package, member, score_mod=f, dropout_p=0.5, dropout_seed=1))
        for f in (in_place, pure)
    ]
    for x, y in zip(runs[0][0], runs[1][0], strict=True):
        assert (x - y).abs().max() < 1e-14


@both_packages
def test_a_plan_that_is_updated(package: str) -> None:
    """Slopes have a row for each of max_sequences; positions and masks are those of the new batch."""
    slopes = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    sizes = {"heads_q": 4, "heads_kv": 4, "d_qk": 8, "d_v": 8, "dtype": torch.float64, "device": "cpu"}
    rows = {n: x.flatten(0, 1) for n, x in {"q": Q, "k": K, "v": V}.items()}
    batches = [torch.tensor(cu) for cu in ([0, 32], [0, 9, 20, 32], [0, 0, 16])]
    of_call = {name: EVERYTHING[name] for name in ("aux_tensors", "dropout_seed")} | {"alibi_slopes": slopes}
    of_plan: dict[str, Any] = {name: EVERYTHING[name] for name in ("score_mod", "dropout_p")}

    def one(member: Any) -> list[torch.Tensor]:
        cp, found = PACKAGES[package].ContextParallel(member), []
        room = {"max_sequences": 3, "max_tokens_q": 32}
        plan = PACKAGES[package].make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=batches[0], **room, **of_plan, **sizes)
        for cu in batches:
            plan.update(cp=cp, cu_seqlens_q=cu)
            local = [torch.zeros(16, 4, 8, dtype=torch.float64) for _ in range(3)]
            for here, x in zip(local, rows.values(), strict=True):
                part = PACKAGES[package].shard(x[: int(cu[-1])], cp=cp, plan=plan)
                here[: len(part)] = part
            out = PACKAGES[package].attention(*local, cp=cp, plan=plan, **of_call)
            found.append(PACKAGES[package].unshard(out, cp=cp, plan=plan))
        return found

    for found, cu in zip(SimGroup(2).run(one)[0], batches, strict=True):
        total, documents = int(cu[-1]), len(cu) - 1
        given = {**of_call, **of_plan, "alibi_slopes": slopes[:documents]}
        q, k, v = (x[:total] for x in rows.values())
        wanted, _, _ = dense_attention(q, k, v, qkv_format="thd", cu_seqlens_q=cu, **given)
        assert (found[:total] - wanted).abs().max() < 1e-12


def test_the_page_is_a_program() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "scores.md").read_text()
    program = "\n\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    exec(compile(program, "scores.md", "exec"), {})


def test_a_trace_sees_them() -> None:
    with cp_ref.trace() as traced:
        SimGroup(2).run(lambda member: both_passes("cp_ref", member, **EVERYTHING))
    with cp_ref.trace() as other:
        SimGroup(2).run(lambda member: both_passes("cp_ref", member, **{**EVERYTHING, "dropout_seed": 18}))
    assert traced.select(name="dk")
    assert "out" in str(cp_ref.compare(traced, other))
    assert cp_ref.compare(traced, traced).differences == ()


# ---- pairs that are hidden, and rows that see nothing


def roots(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """NaN, with a derivative of NaN, where the key comes after its query."""
    return score * torch.sqrt((q_idx - kv_idx).to(score.dtype))


def with_holes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hides pairs; some queries see nothing."""
    return torch.where(((q_idx + kv_idx + h) % 3 == 0) | (q_idx % 5 == 2), float("-inf"), score)


@both_packages
@pytest.mark.parametrize("fmt", ["thd", "sbhd"])
def test_a_hidden_pair_may_be_nan(fmt: str, package: str) -> None:
    sequences = (Sequence(16, 16, 16, 16), Sequence(16, 16, 16, 16)) if fmt == "sbhd" else (Sequence(11, 7, 12, 12),)
    problem = Problem(4, sequences, qkv_format=fmt, heads_q=4, heads_kv=2, dtype="float64")
    with patch.dict(SCORE_MODS, {"roots": roots}):
        case = Case(replace(problem, score_mod="roots"), return_lse=True, return_max_logit=True, loss="out+lse")
        assert check_logic(PACKAGES[package], case) == []


BLIND: dict[str, dict[str, Any]] = {  # some rows see nothing
    "score_mod": {"score_mod": with_holes},
    "mask": {"attn_mask_type": "causal_bottom_right"},
}


@both_packages
@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
@pytest.mark.parametrize("hidden_by", BLIND)
def test_a_row_that_sees_nothing_passes_no_gradient_on(hidden_by: str, softmax_type: str, package: str) -> None:
    """Whatever comes to its out, NaN included, or to an lse of -inf."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 16, 2, 4, generator=generator, dtype=torch.float64)
    module = PACKAGES[package]

    def one(member: Any) -> list[list[torch.Tensor]]:
        cp, found = module.ContextParallel(member), []
        for spoilt in (0.0, torch.nan):
            leaves = [module.shard(x, cp=cp).requires_grad_() for x in (q, q[:, :8], q[:, 8:])]
            sink = torch.ones(2, dtype=torch.float64, requires_grad=True)
            more = {} if softmax_type == "vanilla" else {"softmax_type": softmax_type, "softmax_offset": sink}
            out, lse = module.attention(*leaves, cp=cp, return_lse=True, **BLIND[hidden_by], **more)
            blind = (out == 0).all(-1, keepdim=True)
            assert blind.any() or hidden_by == "mask"  # there, all rows of a rank may see some
            dlse = torch.ones_like(lse).masked_fill(lse == float("-inf"), spoilt)
            torch.autograd.backward([out, lse], [torch.ones_like(out).masked_fill(blind, spoilt), dlse])
            found.append([x.grad for x in (*leaves, sink) if x.grad is not None])
        return found

    for clean, spoilt in module.SimGroup(2).run(one):
        assert len(clean) == (3 if softmax_type == "vanilla" else 4)
        for got, want in zip(spoilt, clean, strict=True):
            torch.testing.assert_close(got, want)
