"""What is wrong on one rank alone raises on all of them, over gloo: kernels, groups, gradients, devices."""

from __future__ import annotations

import gc
import importlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import combinations
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import cp_fast
import cp_fast.build.builder
from cp_fast.api import fast_context
from cp_fast.build.recipe import BuildError
from cp_fast.movers import select_movers as select
from cp_ref import SimGroup
from tests.dist.workers import Processes

SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}


def call(planned: bool, cp: Any, x: torch.Tensor) -> None:
    if planned:
        cp_fast.make_plan(cp=cp, batch_size=1, seqlen_q=4 * cp.size, **SIZES)
    else:
        cp_fast.attention(x, x, x, cp=cp)


def bad_kernels(planned: bool, how: str) -> None:
    """Rank 1 has a wrong choice of kernels, or its build fails."""
    cp, x = cp_fast.ContextParallel(dist.group.WORLD), torch.zeros(1, 4, 2, 8)
    found, before = cp_fast.build.builder.library, os.environ.get(select.VARIABLE)

    def fails(device: str) -> Any:
        raise BuildError("the compiler says no")

    if cp.rank == 1:
        os.environ[select.VARIABLE] = "native" if how == "build" else how
        cp_fast.build.builder.library = fails
        select._choice.cache_clear()
        select._loaded.cache_clear()
        importlib.import_module("cp_fast.movers.native_movers").load.cache_clear()
    try:
        call(planned, cp, x)
    finally:
        cp_fast.build.builder.library = found
        os.environ.pop(select.VARIABLE, None)
        if before is not None:
            os.environ[select.VARIABLE] = before
        select._choice.cache_clear()


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cutlass", "CP_FAST_KERNELS is 'cutlass'; it must be one of"),
        ("numba", "CP_FAST_KERNELS=numba asks for the kernels 'numba', which cannot be had"),
        ("build", "the compiler says no"),
    ],
)
def test_kernels_that_cannot_be_had_on_one_rank(four: Processes, planned: bool, how: str, said: str) -> None:
    for rank, error in enumerate(four.run(bad_kernels, planned, how)):
        assert isinstance(error, RuntimeError | ValueError), (rank, error)
        assert said in str(error)
        assert rank == 1 or "rank 1 refused its arguments" in str(error)


def bad_messages(planned: bool) -> None:
    """Rank 1 has a wrong choice of the transport, which a CPU does not use."""
    cp, x = cp_fast.ContextParallel(dist.group.WORLD), torch.zeros(1, 6, 2, 8)
    with patch.dict(os.environ, {"CP_FAST_MESSAGES": "pigeons"} if cp.rank == 1 else {}):
        if planned:
            cp_fast.make_plan(cp=cp, batch_size=1, seqlen_q=6 * cp.size, **SIZES)
        else:
            cp_fast.attention(x, x, x, cp=cp)


@pytest.mark.parametrize("planned", [True, False])
def test_a_wrong_transport_on_one_rank(four: Processes, planned: bool) -> None:
    for rank, error in enumerate(four.run(bad_messages, planned)):
        assert isinstance(error, ValueError), (rank, error)
        assert "CP_FAST_MESSAGES is 'pigeons'; it must be one of 'auto', 'peer_memory', 'group'" in str(error)
        assert rank == 1 or "rank 1 refused its arguments" in str(error)


def gradient_on_one() -> None:
    cp = cp_fast.ContextParallel(dist.group.WORLD)
    x = torch.zeros(1, 4, 2, 8, requires_grad=cp.rank == 1)
    cp_fast.attention(x, x, x, cp=cp)


def test_requires_grad_on_one_rank_without_a_plan(four: Processes) -> None:
    for rank, error in enumerate(four.run(gradient_on_one)):
        text = str(error)
        assert isinstance(error, ValueError), (rank, error)
        assert "requires_grad=True" in text
        assert "requires_grad=False" in text


def compiled_on_one() -> None:
    """Rank 1 calls a linear layer under torch.compile."""
    cp, x, weight = cp_fast.ContextParallel(dist.group.WORLD), torch.ones(4, 3, requires_grad=True), torch.ones(3, 2)
    lengths = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 4 * cp.size])}
    plan = cp_fast.make_plan(cp=cp, linear=True, **lengths, **SIZES)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return cp_fast.causal_conv1d(x, weight, cp=cp, plan=plan)

    (torch.compile(layer, fullgraph=True, backend="eager") if cp.rank == 1 else layer)(x)


@pytest.mark.thorough
def test_a_layer_that_one_rank_compiles(four: Processes) -> None:
    for rank, error in enumerate(four.run(compiled_on_one)):
        assert isinstance(error, ValueError), (rank, error)
        assert "requires_grad=False" in str(error)
        assert str(error).endswith("compile it on all ranks, or on none")


FUNCTIONS = [
    "select_keys",
    "sparse_attention",
    "index_loss",
    "causal_conv1d",
    "linear_attention",
    "unshard",
    "attention",
]


def one_function(names: tuple[str, str], under: tuple[bool, bool], member: Any = None) -> None:
    """Each rank calls another function, of rows that fit."""
    cp = cp_fast.ContextParallel(dist.group.WORLD if member is None else member, "all_gather")
    plan = cp_fast.make_plan(cp=cp, batch_size=1, seqlen_q=8, linear=True, **SIZES)
    x, how = torch.randn(1, 4, 2, 8), {"cp": cp, "plan": plan}
    one, chosen = x[..., 0], torch.zeros(1, 4, 1, dtype=torch.int32)
    calls: dict[str, Any] = {
        "select_keys": lambda: cp_fast.select_keys(x, x[:, :, 0], one, top_k=1, **how),
        "sparse_attention": lambda: cp_fast.sparse_attention(x, x, x, chosen, **how),
        "index_loss": lambda: cp_fast.index_loss(x, x[:, :, 0], one, one.transpose(1, 2), x, x, chosen, **how),
        "causal_conv1d": lambda: cp_fast.causal_conv1d(one, torch.ones(2, 3), **how),
        "linear_attention": lambda: cp_fast.linear_attention(x, x, x, -one.abs(), kind="mamba2", **how),
        "unshard": lambda: cp_fast.unshard(x, cp=cp),
        "attention": lambda: cp_fast.attention(x, x, x, cp=cp, softmax_scale=0.5),
    }
    with cp_fast.checked() if under[cp.rank] else nullcontext():
        calls[names[cp.rank]]()


@pytest.mark.parametrize("under", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.one_in(3)
def test_ranks_that_call_different_functions(two: Processes, under: tuple[bool, bool], processes: bool) -> None:
    """Both calls are named, on both ranks."""

    def all_errors(names: tuple[str, str]) -> list[Any]:
        def one(member: Any) -> Any:
            try:
                return one_function(names, under, member)
            except Exception as error:
                return error

        return two.run(one_function, names, under) if processes else SimGroup(2).run(one)

    for names in combinations(FUNCTIONS, 2):
        for rank, error in enumerate(all_errors(names)):
            assert isinstance(error, ValueError), (rank, error)
            assert "the ranks call different functions" in str(error)
            for one, name in enumerate(names):
                assert re.search(rf"rank {one} calls (.* or )?{name}", str(error)), (names, error)


def swapped(package: str, member: Any = None) -> None:
    """Rank 1 gives the pair the other way round."""
    impl, rank = importlib.import_module(package), dist.get_rank() if member is None else member.rank
    if member is None:
        rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        pair = rows[rank // 2], columns[rank % 2]
    else:
        pair = member.split(2)
    cp = impl.ContextParallel(pair[::-1] if rank == 1 else pair, "a2a+p2p")
    impl.make_plan(cp=cp, batch_size=1, seqlen_q=16, **SIZES)


@pytest.mark.parametrize("package", ["cp_ref", "cp_fast"])
def test_a_pair_that_one_rank_gives_the_other_way_round(four: Processes, package: str) -> None:
    def one(member: Any) -> Any:
        try:
            return swapped(package, member)
        except Exception as error:
            return error

    for error in (*four.run(swapped, package), *SimGroup(4).run(one)):
        assert isinstance(error, ValueError), error
        assert "a rank has it the other way round: a group is the a2a group of its rank 0, p2p group of" in str(error)


def left_out(package: str) -> list[str]:
    impl, said = importlib.import_module(package), []
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        for given, comm in ((group, "p2p"), (dist.GroupMember.NON_GROUP_MEMBER, "a2a"), ((group, group), "a2a+p2p")):
            with pytest.raises(ValueError, match="no member of") as caught:
                impl.ContextParallel(given, comm)
            said.append(str(caught.value))
    return said


@pytest.mark.parametrize("package", ["cp_ref", "cp_fast"])
def test_a_group_that_the_process_is_no_member_of(four: Processes, package: str) -> None:
    for rank, said in enumerate(four.run(left_out, package)):
        assert not isinstance(said, Exception), said
        assert len(said) == (3 if rank > 1 else 0)
        assert all(f"which this process (rank {rank}) is no member of" in text for text in said)


@pytest.mark.parametrize("device", ["mps", "meta", "xla"])
def test_a_device_that_nothing_runs_on(device: str) -> None:
    sizes: dict[str, Any] = SIZES | {"device": device}

    def one(member: Any) -> None:
        for ask in (cp_fast.make_plan, cp_fast.supports):
            with pytest.raises(ValueError, match=f"device is '{device}'; it must be 'cpu' or 'cuda'"):
                ask(cp=cp_fast.ContextParallel(member), batch_size=1, seqlen_q=8, **sizes)

    SimGroup(1).run(one)


def layers() -> tuple[list[int], list[bool], int]:
    """Agreements after each layer of two batches in a group of their own; whether results are those with a plan; and
    groups with plans after it is gone. Rank 1 writes its calls otherwise, with a new context each.
    """
    group: Any = dist.new_group([0, 1])
    cp = cp_fast.ContextParallel(group)
    gathered = [0]
    member: Any = type(cp.comm)
    gather = member.all_gather_object

    def count(self: Any, value: Any) -> Any:
        gathered[0] += 1
        return gather(self, value)

    member.all_gather_object = count
    other = dist.get_rank() == 1
    cu, x = torch.tensor([0, 8, 24, 48], dtype=torch.int64 if other else torch.int32), torch.randn(24, 2, 8)
    found: list[int] = []
    same: list[bool] = []
    plan = None
    try:
        for batch in range(2):
            cu[1] = 8 + 8 * batch
            sizes: dict[str, Any] = {
                "heads_q": 2,
                "heads_kv": 2,
                "d_qk": 8,
                "d_v": 8,
                "dtype": x.dtype,
                "device": "cpu",
            }
            plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, **sizes)
            for _ in range(3):
                cp = cp_fast.ContextParallel(group) if other else cp
                more: dict[str, Any] = {"cu_seqlens_kv": cu.clone(), "deterministic": True} if other else {}
                out = cp_fast.attention(x, x, x, cp=cp, qkv_format="thd", cu_seqlens_q=cu, **more)
                found.append(gathered[0])
                same.append(torch.equal(out, cp_fast.attention(x, x, x, cp=cp, plan=plan)))
    finally:
        member.all_gather_object = gather
    kept = len(fast_context._caches)
    dist.destroy_process_group(group)
    del cp, group, plan
    gc.collect()
    return found, same, kept - len(fast_context._caches)


def test_layers_of_a_batch_agree_once(two: Processes) -> None:
    for result in two.run(layers):
        assert result == ([2, 2, 2, 4, 4, 4], [True] * 6, 1), result


BATCHES = [[16, 8], [40], [8, 8, 24], [48, 16]]
COMMS = ["p2p", "all_gather", "a2a"]


def plan_of(cp: cp_fast.ContextParallel, lengths: list[int]) -> cp_fast.Plan:
    cumulative = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    sizes: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float64, "device": "cpu"}
    return cp_fast.make_plan(cp=cp, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=cumulative, **sizes)


def results(cp: cp_fast.ContextParallel, plan: cp_fast.Plan) -> list[torch.Tensor]:
    """out and all gradients."""
    generator = torch.Generator().manual_seed(cp.rank)
    rows = plan.problem.starts_q[-1] // cp.size
    q, k, v, dout = (
        torch.randn(rows, heads, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (4, 2, 2, 4)
    )
    out = cp_fast.attention(q, k, v, cp=cp, plan=plan)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def train(comm: Any) -> int:
    """Every batch is computed several times while the thread makes the plan of the next one; how often in all."""
    cp = cp_fast.ContextParallel(dist.group.WORLD, comm)
    meanwhile = cp_fast.ContextParallel(dist.new_group(backend="gloo"), comm)
    wanted = [results(cp, plan_of(cp, lengths)) for lengths in BATCHES]
    calls = 0
    with ThreadPoolExecutor(max_workers=1) as planner:
        plan = plan_of(cp, BATCHES[0])
        for number, want in enumerate(wanted):
            coming = [planner.submit(plan_of, meanwhile, BATCHES[number + 1])] if number + 1 < len(BATCHES) else []
            for _ in range(5):  # as often on every rank: attention is collective
                for mine, theirs in zip(results(cp, plan), want, strict=True):
                    assert torch.equal(mine, theirs)
                calls += 1
            plan = coming[0].result() if coming else plan
    return calls


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.one_in(3)
def test_the_next_plan_is_made_while_this_batch_is_computed(two: Processes, comm: str) -> None:
    """And gives the same bits as one that was made between batches."""
    assert two.run(train, comm) == [5 * len(BATCHES)] * 2
