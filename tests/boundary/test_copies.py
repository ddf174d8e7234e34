"""Copies of plans and contexts: each a plan of its own, or an error; never another plan under the same handle."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

import cp_fast
import cp_ref
from cp_fast.dispatch.opaque import object_of
from cp_ref import SimGroup
from cp_ref.contract.declared import replaced

SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
FIRST, SECOND = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 8], [0, 4, 8]))


def plan_of(impl: Any, cp: Any, **more: Any) -> Any:
    return impl.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=FIRST, **SIZES, **more)


def alone(fn: Callable[[Any], None]) -> None:
    SimGroup(1).run(fn)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, replaced])
def test_a_copy_is_a_plan_of_its_own(way: Callable[[Any], Any]) -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        plan, x = plan_of(cp_fast, cp), torch.randn(8, 2, 8)
        expected = cp_fast.attention(x, x, x, cp=cp, plan=plan)
        made = way(plan)
        assert made is not plan
        assert object_of(made.handle) is made
        assert object_of(plan.handle) is plan
        del plan
        torch._dynamo.reset()
        call = torch.compile(lambda x, plan: cp_fast.attention(x, x, x, cp=cp, plan=plan), backend="aot_eager")
        torch.testing.assert_close(call(x, made), expected)

    alone(one)


class Layer(torch.nn.Module):
    """A layer that keeps what it needs, as users' do."""

    def __init__(self, cp: Any, plan: Any) -> None:
        super().__init__()
        self.cp, self.plan, self.weight = cp, plan, torch.nn.Parameter(torch.ones(8))


def test_a_model_that_holds_a_plan_and_a_context_can_be_copied() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        layer = Layer(cp, plan_of(cp_fast, cp))
        twin = copy.deepcopy(layer)
        assert twin.cp is cp
        assert copy.copy(cp) is cp
        assert twin.plan is not layer.plan
        assert twin.weight is not layer.weight
        x = torch.randn(8, 2, 8)
        both = [cp_fast.attention(x, x, x, cp=one.cp, plan=one.plan) for one in (layer, twin)]
        assert torch.equal(*both)

    alone(one)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, replaced])
def test_a_plan_that_is_updated_is_not_copied(way: Callable[[Any], Any]) -> None:
    def one(member: Any) -> None:
        plan = plan_of(cp_fast, cp_fast.ContextParallel(member), max_sequences=2)
        with pytest.raises(
            TypeError, match=r"^a cp_fast.Plan that is updated in place cannot be copied, as both would"
        ):
            way(plan)

    alone(one)


@pytest.mark.parametrize(
    "changes",
    [
        lambda plan, other: replaced(plan, room=None),
        lambda plan, other: replaced(plan, fixed=None),
        lambda plan, other: replaced(plan, room=None, fixed=None),
        lambda plan, other: replaced(other, instructions=plan.instructions),
        lambda plan, other: replaced(other, room=plan.room),
        lambda plan, other: replaced(other, fixed=plan.fixed),
        lambda plan, other: replaced(other, room=plan.room, fixed=plan.fixed),
    ],
)
def test_no_second_plan_gets_the_tables_of_one_that_is_updated(changes: Callable[[Any, Any], Any]) -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        plan, other = plan_of(cp_fast, cp, max_sequences=2), plan_of(cp_fast, cp)
        with pytest.raises(TypeError, match=r"^room, fixed and instructions of a cp_fast\.Plan that is updated"):
            changes(plan, other)

    alone(one)


@pytest.mark.parametrize("impl", [cp_fast, cp_ref])
def test_pytorch_hands_plans_and_contexts_on_as_they_are(impl: Any) -> None:
    """fully_shard casts the floating tensors among a module's arguments, also those of dataclasses."""

    def one(member: Any) -> None:
        cp = impl.ContextParallel(member, layout="balanced")
        plan = plan_of(impl, cp)
        given = {"plans": [plan], "cp": cp, "x": torch.ones(2)}
        found: Any = _apply_to_tensors(lambda x: x.bfloat16(), given)
        assert found["plans"][0] is plan
        assert found["cp"] is cp
        assert found["x"].dtype == torch.bfloat16

    alone(one)


def test_nothing_of_a_process_is_pickled() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        for thing in (plan_of(cp_fast, cp), plan_of(cp_fast, cp, max_sequences=2), cp):
            rule = rf"a cp_fast\.{type(thing).__name__} belongs to its process and cannot be pickled; make one in every"
            with pytest.raises(TypeError, match=rule):
                pickle.dumps(thing)

    alone(one)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, replaced, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_the_references_copies_are_plans_of_their_own(way: Callable[[Any], Any]) -> None:
    def one(member: Any) -> None:
        cp = cp_ref.ContextParallel(member)
        plan = plan_of(cp_ref, cp, max_sequences=2)
        assert plan.position_ids.tolist() == [*range(8)]
        made = way(plan)
        made.update(cp=cp, cu_seqlens_q=SECOND)
        assert made.position_ids.tolist() == [0, 1, 2, 3] * 2
        assert plan.position_ids.tolist() == [*range(8)]
        assert plan.problem != made.problem

    alone(one)
