"""Calls from several Python threads on one group: the one that begins while another is inside raises, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.dispatch.group_lock import HoldLocks, locks_of
from cp_ref import SimGroup
from cp_ref.simulator import SimMember

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
        assert not locks[0].acquire_for("four")
    assert locks[0].acquire_for("five")


def object_with_references() -> Any:
    class Thing:
        pass

    return Thing()
