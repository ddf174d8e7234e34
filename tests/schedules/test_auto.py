"""`cp_comm_type="auto"` in both packages: what it chooses is computed as if it had been named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_ref import SimGroup
from cp_ref.calls import plan_arguments
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.planners.choose_schedule import choose_schedule
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.words import AUTO

PACKAGES = pytest.mark.parametrize("package", [cp_ref, cp_fast], ids=lambda package: package.__name__)
LARGE: dict[str, Any] = {
    "heads_q": 32,
    "heads_kv": 8,
    "d_qk": 128,
    "d_v": 128,
    "dtype": torch.bfloat16,
    "device": "cpu",
}
SMALL: dict[str, Any] = LARGE | {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32}
BATCH = {"batch_size": 1, "seqlen_q": 16}


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[tuple[str, ...]]]:
    """Let every choice be this schedule; small problems would all take the first one. The result gets the names that
    were to choose from.
    """

    def choose(name: str) -> list[tuple[str, ...]]:
        asked: list[tuple[str, ...]] = []

        def chosen(problem: Problem, names: Sequence[str]) -> Problem:
            asked.append(tuple(names))
            return choose_schedule(problem, (name,))

        monkeypatch.setattr(plan_arguments, "choose_schedule", chosen)
        return asked

    return choose


def trained(package: Any, cp: Any, *, planned: bool) -> list[Any]:
    """Results and gradients of a small layer, through out and lse."""
    generator = torch.Generator().manual_seed(cp.rank)
    q, k, v = (torch.randn(1, 8, h, 8, generator=generator).requires_grad_() for h in (4, 2, 2))
    plan = package.make_plan(cp=cp, **BATCH, **SMALL) if planned else None
    out, lse = package.attention(q, k, v, cp=cp, plan=plan, return_lse=True)
    (out.square().sum() + lse.sum()).backward()
    return [out, lse, *(x.grad for x in (q, k, v))]


@PACKAGES
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", AUTO)
def test_a_choice_is_computed_as_if_it_were_named(
    choosing: Callable[[str], Any], package: Any, name: str, planned: bool
) -> None:
    asked = choosing(name)

    def run(member: SimMember) -> bool:
        named, auto = (package.ContextParallel(member, word) for word in (name, "auto"))
        want, got = (trained(package, cp, planned=planned) for cp in (named, auto))
        return all(map(torch.equal, want, got))

    assert SimGroup(2).run(run) == [True, True]
    assert set(asked) == {AUTO}


def test_both_packages_and_all_ranks_choose_the_same() -> None:
    def run(member: SimMember) -> set[str]:
        plans = [p.make_plan(cp=p.ContextParallel(member, "auto"), **LARGE, **large) for p in (cp_ref, cp_fast)]
        return {str(plan.problem) for plan in plans}

    large = {"batch_size": 1, "seqlen_q": 1 << 16}
    (found,) = set.union(*SimGroup(4).run(run))
    assert Problem.parse(found).cp_comm_type == "a2a"


@PACKAGES
def test_a_plan_says_what_was_chosen_and_why(package: Any) -> None:
    def run(member: SimMember) -> list[str]:
        contexts = [package.ContextParallel(member, word) for word in ("auto", "a2a")]
        return [str(package.make_plan(cp=cp, batch_size=1, seqlen_q=1 << 16, **LARGE)) for cp in contexts]

    auto, named = SimGroup(4).run(run)[0]
    (line,) = set(auto.splitlines()) - set(named.splitlines())
    assert line.startswith("  'auto' took a2a by estimates for H200s, both passes: a2a ")
    assert " ms, all_gather " in line
    assert " GiB more, p2p " in line


@PACKAGES
def test_an_updated_plan_keeps_its_first_choice(choosing: Callable[[str], Any], package: Any) -> None:
    def run(member: SimMember) -> list[str]:
        cp = package.ContextParallel(member, "auto")
        choosing("a2a")
        lengths = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "max_sequences": 3}
        plan = package.make_plan(cp=cp, cu_seqlens_q=torch.tensor([0, 32]), **lengths, **SMALL)
        choosing("p2p")
        plan.update(cp=cp, cu_seqlens_q=torch.tensor([0, 12, 32]))
        return [plan.problem.cp_comm_type, str(plan)]

    name, text = SimGroup(2).run(run)[0]
    assert name == "a2a"
    assert "'auto' took a2a by estimates" in text
    assert "the choice is that for the first batch" in text


@PACKAGES
def test_a_pair_of_groups_has_one_schedule(package: Any) -> None:
    def run(member: SimMember) -> tuple[Any, ...]:
        pair = member.split(2)
        named, auto = (package.ContextParallel(pair, word) for word in ("a2a+p2p", "auto"))
        plans = [package.make_plan(cp=cp, **BATCH, **SMALL) for cp in (named, auto)]
        assert auto.a2a_size == 2
        return auto.schedules, plans[0].problem == plans[1].problem, str(plans[0]) == str(plans[1])

    assert SimGroup(4).run(run)[3] == (("a2a+p2p",), True, True)


@PACKAGES
def test_a_context_that_chooses_takes_every_plan_that_it_could_have_made(package: Any) -> None:
    def run(member: SimMember) -> str:
        auto, ring, heads = (package.ContextParallel(member, word) for word in ("auto", "p2p", "a2a"))
        grouped = package.ContextParallel(member.split(1), "a2a+p2p")
        q = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 2, 8), torch.zeros(1, 8, 2, 8)
        for cp in (ring, heads):
            package.attention(*q, cp=auto, plan=package.make_plan(cp=cp, **BATCH, **SMALL))
        with pytest.raises(ValueError, match="made for cp_comm_type 'a2a', but cp has cp_comm_type 'p2p'"):
            package.attention(*q, cp=ring, plan=package.make_plan(cp=heads, **BATCH, **SMALL))
        with pytest.raises(ValueError, match=r"made for cp_comm_type 'a2a\+p2p', but cp has cp_comm_type 'auto'"):
            package.attention(*q, cp=auto, plan=package.make_plan(cp=grouped, **BATCH, **SMALL))
        return repr(auto)

    assert "cp_comm_type='auto'" in SimGroup(2).run(run)[1]


@PACKAGES
def test_sparse_attention_never_gets_a_ring(choosing: Callable[[str], Any], package: Any) -> None:
    asked = choosing("all_gather")

    def run(member: SimMember) -> None:
        cp = package.ContextParallel(member, "auto")
        plan = package.make_plan(cp=cp, sparse=True, **BATCH, **SMALL)
        assert plan.chosen_from == ("all_gather", "a2a")
        q, k = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 2, 8)
        indices = torch.zeros(1, 8, 2, dtype=torch.int32)
        package.sparse_attention(q, k, k, indices, cp=cp, plan=plan)
        choosing("p2p")
        with pytest.raises(cp_ref.Unsupported, match="or with 'auto' the plan with sparse=True"):
            package.sparse_attention(q, k, k, indices, cp=cp, plan=package.make_plan(cp=cp, **BATCH, **SMALL))

    SimGroup(2).run(run)
    assert set(asked) == {("all_gather", "a2a")}


@PACKAGES
def test_linear_layers_do_not_ask_what_was_chosen(choosing: Callable[[str], Any], package: Any) -> None:
    choosing("a2a")

    def run(member: SimMember) -> bool:
        auto, ring = (package.ContextParallel(member, word) for word in ("auto", "p2p"))
        x, weight = torch.arange(32.0).view(1, 8, 4) + member.rank, torch.ones(4, 3)
        got, want = (
            package.causal_conv1d(x, weight, cp=cp, plan=package.make_plan(cp=cp, linear=True, **BATCH, **SMALL))
            for cp in (auto, ring)
        )
        return torch.equal(got, want)

    assert SimGroup(2).run(run) == [True, True]


@PACKAGES
def test_a_schedule_of_the_users_leaves_nothing_to_choose(choosing: Callable[[str], Any], package: Any) -> None:
    asked = choosing("p2p")

    def run(member: SimMember) -> tuple[Any, ...]:
        ring, auto = (package.ContextParallel(member, word) for word in ("p2p", "auto"))
        given = make_schedule(package.make_plan(cp=ring, **BATCH, **SMALL).problem)
        plan = package.make_plan(cp=auto, schedule=given, **BATCH, **SMALL)
        return plan.schedule is given, plan.chosen_from

    assert SimGroup(2).run(run)[0] == (True, ())
    assert asked == []


@PACKAGES
def test_heads_that_are_not_shared_are_supported(package: Any) -> None:
    def run(member: SimMember) -> tuple[Any, ...]:
        odd = {**SMALL, "heads_q": 3, "heads_kv": 3}
        with pytest.raises(ValueError, match="h_q is 3"):
            package.supports(cp=package.ContextParallel(member, "a2a"), **BATCH, **odd)
        return package.supports(cp=package.ContextParallel(member, "auto"), **BATCH, **odd)

    assert SimGroup(2).run(run)[0] == (True, "")


@PACKAGES
def test_other_words_and_groups_are_refused(package: Any) -> None:
    def run(member: SimMember) -> None:
        with pytest.raises(ValueError, match=r"cp_comm_type is 'fastest'; it must be .*'auto'"):
            package.ContextParallel(member, "fastest")
        with pytest.raises(TypeError, match="'auto' needs a pair"):
            package.ContextParallel((member, member, member), "auto")

    SimGroup(1).run(run)


def test_a_compiled_layer_is_one_graph(choosing: Callable[[str], Any]) -> None:
    choosing("a2a")

    def run(member: SimMember) -> bool:
        cp = cp_fast.ContextParallel(member, "auto")
        plan = cp_fast.make_plan(cp=cp, **BATCH, **SMALL)
        q, k = torch.randn(1, 8, 4, 8), torch.randn(1, 8, 2, 8)

        def layer(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return cp_fast.attention(q, k, k, cp=cp, plan=plan)

        return torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(q, k), layer(q, k))

    assert SimGroup(2).run(run) == [True, True]
