"""Calls of `cp_fast` with scores that depend on places: its other ways to call, its caches, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cp_fast
import cp_ref
from cp_fast.api import call_scores, calls
from cp_fast.checkpoint import save_attention
from cp_fast.kernels.attention.backend_protocol import (
    Backend,
    BackwardOperands,
    Gradients,
    LaunchOptions,
    LaunchPositions,
    LaunchScores,
)
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.largest_logit import largest_logit
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref import SimGroup, Unsupported
from cp_ref.calls.scores import ScoreTensors, read_scores
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature

SIZES: dict[str, Any] = {"batch_size": 2, "seqlen_q": 16, "heads_q": 4, "heads_kv": 2, "d_qk": 4, "d_v": 4}
SIZES |= {"dtype": torch.float64, "device": "cpu"}
SLOPES, TABLE = torch.linspace(0.1, 0.9, 4), torch.linspace(-1.0, 1.0, 4)


def squared(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score - 0.1 * table[h] * score**2 + 0.01 * b * kv_idx


OF_PLAN: dict[str, Any] = {"score_mod": squared, "dropout_p": 0.3}
OF_CALL: dict[str, Any] = {"alibi_slopes": SLOPES, "aux_tensors": {"table": TABLE}, "dropout_seed": torch.tensor(7)}


def leaves(member: SimMember, local: int = 8) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(member.rank)
    return [torch.randn(2, local, h, 4, generator=draw, dtype=torch.float64).requires_grad_() for h in (4, 2, 2)]


def saves_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


SELECTIVE = partial(create_selective_checkpoint_contexts, saves_all)
WAYS: dict[str, Any] = {
    "compiled": lambda f, *x: torch.compile(f, backend="aot_eager", fullgraph=True)(*x),
    "recomputed": lambda f, *x: checkpoint(f, *x, use_reentrant=False),
    "selective": lambda f, *x: checkpoint(f, *x, use_reentrant=False, context_fn=SELECTIVE),
    "saved": lambda f, *x: checkpoint(f, *x, use_reentrant=False, context_fn=save_attention()),
    "offloaded": lambda f, *x: checkpoint(f, *x, use_reentrant=False, context_fn=save_attention(offload=True)),
    "compiled, with the function": lambda f, *x: torch.compile(partial(f, **OF_PLAN), backend="aot_eager")(*x),
    "known": lambda f, *x: (f(*x), f(*x))[1],
}


@pytest.mark.parametrize("comm", ["p2p", "a2a"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_gives_the_same_bits(way: str, comm: Any) -> None:
    def one(member: SimMember, way: str = "") -> list[torch.Tensor]:
        cp = cp_fast.ContextParallel(member, comm)
        plan, given = cp_fast.make_plan(cp=cp, return_max_logit=True, **OF_PLAN, **SIZES), leaves(member)
        call = partial(cp_fast.attention, cp=cp, plan=plan, return_lse=True, return_max_logit=True, **OF_CALL)
        out, lse, largest = WAYS[way](call, *given) if way else call(*given)
        (out.sin().sum() + (lse * lse).sum()).backward()
        return [out.detach(), lse.detach(), largest, *(x.grad for x in given if x.grad is not None)]

    with torch.autograd.set_multithreading_enabled(False):
        wanted, found = SimGroup(2).run(one), SimGroup(2).run(partial(one, way=way))
    for x, y in zip(wanted, found, strict=True):
        assert len(x) == 6
        assert all(map(torch.equal, x, y))


def test_a_seed_is_no_new_plan_and_no_new_graph() -> None:
    """Only the first call is checked, tries score_mod, and agrees on a plan."""

    def one(member: SimMember) -> list[int]:
        cp, found = cp_fast.ContextParallel(member), []
        q, k, v = leaves(member, 16)
        plan = cp_fast.make_plan(cp=cp, return_max_logit=True, **OF_PLAN, **SIZES)
        hows: list[dict[str, Any]] = [{"plan": plan}, OF_PLAN]
        for how in hows:
            for seed in (1, 2, 3):
                call: dict[str, Any] = {**OF_CALL, "dropout_seed": seed}
                read = Mock(wraps=read_scores)
                with patch.object(calls, "read_scores", read), patch.object(call_scores, "read_scores", read):
                    cp_fast.attention(q, k, v, cp=cp, **how, **call)
                found.append(read.call_count)
        return found

    assert SimGroup(1).run(one)[0] == [1, 0, 0, 1, 0, 0]


def test_a_call_without_its_tensors_is_refused_after_one_with_them() -> None:
    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member)
        q, k, v = leaves(member)
        plan = cp_fast.make_plan(cp=cp, return_max_logit=True, **OF_PLAN, **SIZES)
        cp_fast.attention(q, k, v, cp=cp, plan=plan, **OF_CALL)
        for name in ("aux_tensors", "dropout_seed"):
            rest: dict[str, Any] = {key: x for key, x in OF_CALL.items() if key != name}
            with pytest.raises(ValueError, match=name):
                cp_fast.attention(q, k, v, cp=cp, plan=plan, **rest)
        two: dict[str, Any] = {**OF_CALL, "dropout_seed": torch.tensor([1, 2])}
        with pytest.raises(ValueError, match=r"dropout_seed is a tensor \[2\]"):
            cp_fast.attention(q, k, v, cp=cp, plan=plan, **two)

    SimGroup(2).run(one)


@pytest.mark.parametrize("slopes", [SLOPES, torch.stack([SLOPES, 1 - SLOPES])])
def test_a_batch_that_is_folded_into_heads(slopes: torch.Tensor) -> None:
    """sbhd without padding: each packed head has the slope of its sequence and its head."""

    def one(member: SimMember, package: Any) -> list[torch.Tensor]:
        cp, given = package.ContextParallel(member), [x.transpose(0, 1) for x in leaves(member)]
        out, largest = package.attention(*given, cp=cp, qkv_format="sbhd", alibi_slopes=slopes, return_max_logit=True)
        return [*torch.autograd.grad(out.sin().sum(), given), out.detach(), largest]

    wanted, found = (SimGroup(2).run(partial(one, package=package)) for package in (cp_ref, cp_fast))
    for x, y in zip(wanted, found, strict=True):
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(x[:-1], y[:-1], strict=True))
        assert (x[-1] - y[-1]).abs().max() < 1e-6  # a separate pass finds it in float32


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_the_largest_logit_of_a_separate_pass(scale: float, softcap: float) -> None:
    """It is that of the scores after ALiBi and score_mod, without dropout: what the library "cpu" finds itself."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 4, generator=draw) for n, h in ((9, 4), (12, 2), (12, 2)))
    positions = LaunchPositions(
        torch.tensor([1] * 4 + [0] * 5).int(),
        torch.arange(9).int(),
        torch.arange(2, 11).int(),
        torch.randperm(12, generator=draw).int(),
    )
    segments = VarlenBatch.pack([4, 5], [7, 5], 3, 0)
    for inputs in (
        ScoreTensors(SLOPES),
        ScoreTensors(SLOPES, squared, {"table": TABLE}, 0.5, torch.tensor(3)),
        ScoreTensors(dropout_p=0.5, dropout_seed=torch.tensor(3)),
    ):
        options = LaunchOptions(ScoreSpec(scale, softcap), False, LaunchScores(positions, 0, inputs))
        wanted = by_name("cpu").forward(q, k, v, segments, options).max_logit
        assert wanted is not None
        assert (largest_logit(q, k, segments, options) - wanted).abs().max() < 1e-5


def test_seeds_are_compared_where_the_ranks_agree() -> None:
    """A first call without a plan is one of these; later ones compare nothing, and need no agreement for a new seed."""

    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member)
        q, k, v = leaves(member)
        with pytest.raises(ValueError, match=r"rank 0 has dropout_seed=3 where rank 1|rank 1 has dropout_seed=4 where"):
            cp_fast.attention(q, k, v, cp=cp, dropout_p=0.5, dropout_seed=3 + member.rank)
        for seed in (3, 4):
            cp_fast.attention(q, k, v, cp=cp, dropout_p=0.5, dropout_seed=seed)
        assert len(cp.agreements.fingerprints) == 1

    SimGroup(2).run(one)


class WithoutPlaces(Backend):
    """The library "cpu" without these features."""

    def __init__(self) -> None:
        self.library = by_name("cpu")
        self.name, self.features = "plain", self.library.features - {Feature.ALIBI, Feature.SCORE_MOD, Feature.DROPOUT}

    def why_not(self) -> str | None:
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Any, options: LaunchOptions) -> Any:
        assert options.score_inputs is None
        return self.library.forward(q, k, v, segments, options)

    def backward(self, given: list[BackwardOperands], segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        return self.library.backward(given, segments, options)


def test_a_library_without_them_is_never_asked() -> None:
    seed = {"dropout_p": 0.5, "dropout_seed": 1}

    def one(member: SimMember) -> list[str]:
        cp, found = cp_fast.ContextParallel(member), []
        q, k, v = leaves(member)
        plan = cp_fast.make_plan(cp=cp, **SIZES)
        cp_fast.attention(q, k, v, cp=cp, plan=plan)
        calls: list[dict[str, Any]] = [{"plan": plan, "alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}, seed]
        for given in calls:
            with pytest.raises(Unsupported) as caught:
                cp_fast.attention(q, k, v, cp=cp, **given)
            found.append(str(caught.value))
        plans: list[dict[str, Any]] = [{"dropout_p": 0.5}, {"score_mod": squared}]
        for more in plans:
            supported, why = cp_fast.supports(cp=cp, **SIZES, **more)
            assert not supported
            found.append(why)
        return found

    with patch("cp_fast.kernels.attention.choose_backend.BACKENDS", (WithoutPlaces(),)):
        planned, *others = SimGroup(2).run(one)[0]
    assert "the plan's backend 'plain'" in planned
    assert "backend='fa4' or backend='cpu' or backend='torch'" in planned
    for name, text in zip(("alibi_slopes", "dropout", "dropout", "score_mod"), others, strict=True):
        assert name in text
