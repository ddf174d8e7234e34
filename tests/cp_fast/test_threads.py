"""Calls beside others: threads that plan and compute together, and neighbours in a batch that change no bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

import cp_fast
from conformance.adapters.cp_fast import auto
from conformance.case import Case
from conformance.checks.metamorphic import check_metamorphic
from conformance.implementation import Implementation
from cp_fast.api.fast_context import HoldLocks, locks_of
from cp_ref import SimGroup
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.problem import Problem, Sequence

SIZES: dict[str, Any] = {"heads_q": 1, "heads_kv": 1, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
X = torch.randn(1, 4, 1, 8)


def make_plan(cp: cp_fast.ContextParallel) -> cp_fast.Plan:
    return cp_fast.make_plan(cp=cp, batch_size=1, seqlen_q=4 * cp.size, **SIZES)


class Slow:
    """A member whose messages wait until another thread has tried its call."""

    def __init__(self, member: SimMember, tried: Callable[[], None]) -> None:
        self._member, self._tried = member, tried
        self.rank, self.size = member.rank, member.size
        self.all_gather_object = member.all_gather_object

    def exchange(self, sends: Any, recvs: Any) -> Any:
        self._tried()
        return self._member.exchange(sends, recvs)


CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "attention": (lambda cp, plan: cp_fast.attention(X, X, X, cp=cp, plan=plan), "attention, forward"),
    "without a plan": (lambda cp, plan: cp_fast.attention(X, X, X, cp=cp), "an agreement on a plan"),
    "make_plan": (lambda cp, plan: make_plan(cp), "an agreement on a plan"),
    "unshard": (lambda cp, plan: cp_fast.unshard(X, cp=cp), "unshard"),
    "another context": (
        lambda cp, plan: cp_fast.attention(X, X, X, cp=cp_fast.ContextParallel(cp.group), plan=plan),
        "attention, forward",
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_a_call_that_begins_inside_another_one_raises(inside: str, call: str) -> None:
    second, what = CALLS[call]
    said: list[str] = []

    def one(member: SimMember) -> None:
        plans: list[Any] = []
        armed = [False]

        def begin() -> None:
            try:
                second(cp, plans[0])
            except RuntimeError as error:
                said.append(str(error))

        def tried() -> None:
            if armed and armed.pop():
                thread = threading.Thread(target=begin, name="another thread")
                thread.start()
                thread.join()

        cp = cp_fast.ContextParallel(Slow(member, tried))
        plans.append(make_plan(cp))
        x = X.clone().requires_grad_()
        armed[:] = [inside == "forward"]
        out = cp_fast.attention(x, x, x, cp=cp, plan=plans[0])
        armed[:] = [inside == "backward"]
        out.sum().backward()
        cp_fast.attention(x, x, x, cp=cp, plan=plans[0])  # the next call works

    SimGroup(2).run(one)
    assert len(said) == 2
    for text in said:
        assert text.startswith(f"{what} begins in thread 'another thread' while attention, {inside} runs in thread ")
        assert "on the same group: their messages would mix" in text


def test_threads_that_take_turns_are_served() -> None:
    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member)
        x = X.clone().requires_grad_()
        cp_fast.attention(x, x, x, cp=cp).sum().backward()

        thread = threading.Thread(target=lambda: cp_fast.attention(x, x, x, cp=cp))
        thread.start()
        thread.join()

    SimGroup(1).run(one)


def test_an_error_gives_the_lock_back() -> None:
    locks = locks_of(object_with_references())
    with pytest.raises(KeyError), HoldLocks(locks, "one"):
        raise KeyError
    with HoldLocks(locks, "two"), HoldLocks(locks, "two again"):
        pass
    with HoldLocks(locks, "three"):
        assert locks[0].lock.locked()
    assert not locks[0].lock.locked()


def object_with_references() -> Any:
    class Thing:
        pass

    return Thing()


RESULTS = ("out", "dq", "dk", "dv")


def results(
    cp_size: int, comm: Any, first: list[torch.Tensor], others: list[int], window: tuple[int, int] = (-1, -1)
) -> dict[str, torch.Tensor]:
    """Those of the first sequence, beside others of these lengths."""
    lengths = [len(first[0]), *others]
    generator = torch.Generator().manual_seed(sum(others))
    whole = [torch.cat([x, torch.randn(sum(others), *x.shape[1:], generator=generator)]) for x in first]
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    def one_rank(member: Any) -> dict[str, torch.Tensor]:
        cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
        how: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": cu}
        q, k, v, dout = (cp_fast.shard(x, **how) for x in whole)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        call: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_q": cu, "window_size": window}
        out = cp_fast.attention(*inputs, **call, deterministic=True)
        out.backward(dout)
        local = [out.detach(), *(x.grad for x in inputs)]
        return {name: cp_fast.unshard(x, **how)[: lengths[0]] for name, x in zip(RESULTS, local, strict=True)}

    return SimGroup(cp_size).run(one_rank)[0]


@pytest.mark.parametrize(
    ("cp_size", "comm", "lengths_divide", "same"),
    [
        (2, "p2p", False, RESULTS),
        (3, "p2p", True, RESULTS),
        (3, "p2p", False, RESULTS),
        (4, "p2p", False, RESULTS),
        pytest.param(8, "p2p", False, RESULTS, marks=pytest.mark.thorough),
        (3, "all_gather", False, RESULTS),
        (4, "a2a+p2p", False, RESULTS),
    ],
)
def test_bits_beside_others(cp_size: int, comm: str, lengths_divide: bool, same: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(4 * cp_size, 2, 8, generator=generator) for _ in range(4)]
    alone = results(cp_size, comm, first, [])
    for others in ([8, 2, 6], [4, 4, 2, 6]):
        less = 0 if lengths_divide else 1
        found = results(cp_size, comm, first, [n * cp_size - less for n in others])
        assert [name for name in same if not torch.equal(found[name], alone[name])] == []


@pytest.mark.parametrize("comm", ["all_gather", "p2p"])
@pytest.mark.parametrize(("length", "others"), [(30, [48]), (48, [30]), (30, [48, 7])])
def test_bits_where_neighbours_have_other_windows(length: int, others: list[int], comm: str) -> None:
    """A tile of 48 tokens has two windows on a rank, and one of 30 tokens has one. So the plan has another launch."""
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(length, 2, 8, generator=generator) for _ in range(4)]
    alone, found = (results(3, comm, first, more, (20, 0)) for more in ([], others))
    assert [name for name in RESULTS if not torch.equal(found[name], alone[name])] == []


def test_bits_of_a_padded_batch() -> None:
    """The first sequence has one launch, and its neighbours two: dk of a head that all ranks compute."""
    problem = Problem(
        cp_size=3,
        sequences=(Sequence(6, 12, 12, 12), Sequence(10, 4, 12, 12), Sequence(4, 12, 12, 12)),
        cp_comm_type="a2a+p2p",
        a2a_size=3,
        attn_mask_type="padding",
        window_size=(2, -1),
        heads_q=12,
        dtype="float64",
    )
    case = Case(problem, seed=10, grads="k", use_plan=True, deterministic=True)
    assert check_metamorphic(Implementation(auto), case) == []
