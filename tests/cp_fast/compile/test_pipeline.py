"""Every compiler pass can be switched off, alone and with all others: attention stays right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
from conformance.adapters import cp_fast as adapter
from conformance.case import Case
from conformance.draw.capabilities import Capabilities, probe
from conformance.draw.strategies import cases
from conformance.implementation import Implementation, load
from conformance.tiers import CASE_TIERS
from cp_fast.compile.instructions import ExecutablePlan, Free
from cp_fast.compile.pipeline import PASSES, switched_off
from cp_fast.movers.select import use
from cp_fast.runtime.row_selection import Rows
from cp_ref import SimGroup

ALL = tuple(one.name for one in PASSES)
OFF = [*((name,) for name in ALL), ALL]


@cache
def implementation() -> tuple[Implementation, Capabilities]:
    impl = load(f"{adapter.__name__}:cpu")
    return impl, probe(impl)


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    return draw(cases(implementation()[1], dtypes=CASE_TIERS["logic"].dtypes))


@contextmanager
def without(off: tuple[str, ...]) -> Iterator[None]:
    with use("torch"), switched_off(*off):
        yield


def check(case: Case, off: tuple[str, ...]) -> None:
    impl, capabilities = implementation()
    with without(off):
        assert CASE_TIERS["logic"].check(impl, case, capabilities.device) == []


@pytest.mark.parametrize("off", OFF, ids="+".join)
@settings(max_examples=15)
@given(case=drawn_cases())
def test_a_few_problems(off: tuple[str, ...], case: Case) -> None:
    check(case, off)


@pytest.mark.thorough
@pytest.mark.parametrize("off", OFF, ids="+".join)
@settings(max_examples=300)
@given(case=drawn_cases())
def test_problems(off: tuple[str, ...], case: Case) -> None:
    check(case, off)


def plans(comm: Any, off: tuple[str, ...] = ()) -> list[ExecutablePlan[Rows]]:
    """The plans of two ranks, of two causal documents in bfloat16."""
    ends = torch.tensor([0, 16, 24], dtype=torch.int32)
    how: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": ends, "device": "cpu", "dtype": torch.bfloat16}
    how |= {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8}
    with without(off):
        made = SimGroup(2).run(lambda member: cp_fast.make_plan(cp=cp_fast.ContextParallel(member, comm), **how))
    return [plan.instructions for plan in made]


def makers(plan: ExecutablePlan[Rows]) -> set[str]:
    """The passes that made instructions of a plan."""
    return {one.made_by for one in (*plan.forward.instructions, *plan.backward.instructions)}


@pytest.mark.parametrize("name", [one.name for one in PASSES if one.on == "instructions"][:-1])
def test_an_instruction_says_which_pass_made_it(name: str) -> None:
    comms = "p2p", "a2a", "all_gather"
    assert any(name in makers(plan) for comm in comms for plan in plans(comm))
    assert not any(name in makers(plan) for comm in comms for plan in plans(comm, (name,)))


def test_without_passes_a_plan_is_as_it_was_lowered() -> None:
    for plan in plans("a2a", ALL):
        assert makers(plan) == {"lower"}
        assert not any(plan.forward.of(Free))


def test_names_that_are_no_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="which are no compiler passes"), switched_off("free_late"):
        pass
