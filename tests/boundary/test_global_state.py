"""PyTorch's global state, a default device or dtype, changes nothing: what is made inside says where and of what."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

import cp_fast
import cp_ref
from cp_fast.movers.select_movers import use
from cp_fast.runtime.handles import object_of
from cp_ref import SimGroup
from cp_ref.calls.declared import replaced
from cp_ref.reference.simulator import SimMember
from tests.marks import needs_cxx

CU = torch.tensor([0, 13, 13, 28], dtype=torch.int32)
PADDED = torch.tensor([0, 16, 16, 32], dtype=torch.int32)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES: dict[str, Any] = {
    "with torch.device": lambda: torch.device("meta"),
    "set_default_device": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


def play(impl: Any, comm: str, state: Any) -> list[list[torch.Tensor]]:
    """Every rank's results of all that a training step calls."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(40, h, 8, generator=draw) for h in (4, 2, 2, 4))
    offset = torch.randn(4, generator=draw)

    def one(member: SimMember) -> list[torch.Tensor]:
        with state():
            cp = impl.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
            where = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": PADDED}
            mine = [impl.shard(x, **where).requires_grad_() for x in (q, k, v)]
            sink = offset.clone().requires_grad_()
            problem = {"qkv_format": "thd", "cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED}
            problem["softmax_type"] = "learnable"
            sizes = {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
            plan = impl.make_plan(cp=cp, return_max_logit=True, **sizes, **problem)
            room = impl.make_plan(cp=cp, max_sequences=4, max_tokens_q=40, **sizes, **problem)
            room.update(cp=cp, cu_seqlens_q=PADDED)
            how = {"return_lse": True, "return_max_logit": True, "softmax_offset": sink, "plan": plan}
            out, lse, max_logit = impl.attention(*mine, cp=cp, **how)
            (out * impl.shard(dout, **where)).sum().add(lse[torch.isfinite(lse)].sum()).backward()
            unplanned = impl.attention(*(x.detach() for x in mine), cp=cp, softmax_offset=sink.detach(), **problem)
            grads = [x.grad for x in (*mine, sink) if x.grad is not None]
            assert len(grads) == 4
            ids = [plan.position_ids, room.position_ids, impl.position_ids(**where)]
            return [out.detach(), lse.detach(), max_logit, unplanned, *grads, *ids, impl.unshard(out.detach(), **where)]

    with state():  # the dtype is of the process, the device of each thread
        return SimGroup(4).run(one)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "comm", ["a2a+p2p", *(pytest.param(comm, marks=pytest.mark.thorough) for comm in ("p2p", "all_gather"))]
)
@pytest.mark.parametrize("impl", [cp_fast, cp_ref])
@pytest.mark.one_in(3)
def test_attention_is_as_without_it(impl: Any, comm: str, state: str) -> None:
    plainly, changed = play(impl, comm, nullcontext), play(impl, comm, STATES[state])
    for one, other in zip(plainly, changed, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


X, IDS = torch.arange(64, dtype=torch.float32).reshape(32, 2), torch.arange(28)


def helpers(impl: Any) -> list[torch.Tensor]:
    thd, cu, x, lse = impl.thd, PADDED, X, X.t().contiguous()
    acc, half = x.clone(), thd.thd_read_half_tensor(x, cu, 1)
    thd.thd_grad_correction(acc, half, cu, "none", "add")
    merged, step = lse.clone(), lse[:, :16].clone()
    thd.thd_second_half_lse_correction(merged, step, cu, True)
    return [
        thd.thd_get_partitioned_indices(cu, 32, 2, 0),
        thd.thd_sequence_order_to_cp_rank_order(x, cu, 2),
        thd.thd_cp_rank_order_to_sequence_order(x, cu, 2),
        thd.thd_read_second_half_lse(lse, cu, True, 16),
        thd.get_cu_seqlens_on_cp_rank(CU, cu, 2, 0, True, True),
        *thd.pad_thd_sequences_for_cp(IDS, IDS, CU, 4, 0, -100),
        *(half, acc, merged),
    ]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kernels", [pytest.param("native", marks=needs_cxx), "torch"])
@pytest.mark.parametrize("impl", [cp_fast, cp_ref])
def test_helpers_are_as_without_it(impl: Any, kernels: str, state: str) -> None:
    with use(kernels):
        plainly = helpers(impl)
        with STATES[state]():
            changed = helpers(impl)
    for a, b in zip(plainly, changed, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
FIRST, SECOND = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 8], [0, 4, 8]))


def plan_of(impl: Any, cp: Any, **more: Any) -> Any:
    return impl.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=FIRST, **SIZES, **more)


def alone(fn: Callable[[Any], None]) -> None:
    SimGroup(1).run(fn)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, replaced])
@pytest.mark.one_in(3)
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


def test_no_second_plan_gets_the_tables_of_one_that_is_updated() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        plan, other = plan_of(cp_fast, cp, max_sequences=2), plan_of(cp_fast, cp)
        with pytest.raises(TypeError, match=r"^a cp_fast.Plan that is updated in place cannot be copied"):
            replaced(other, batch=plan.batch)

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
