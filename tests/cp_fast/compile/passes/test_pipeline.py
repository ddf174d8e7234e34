"""Every compiler pass can be switched off, alone and with all others: attention stays right.

A problem is played without each pass that changes its plans; without the others its instructions are the same.
CP_PASSES in the environment draws more of them.

The same holds if scores depend on positions: the batch is then not folded into heads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.adapters import cp_fast as adapter
from conformance.case import Case
from conformance.implementation import Implementation, load
from conformance.problems.capabilities import Capabilities, probe
from conformance.problems.strategies import cases
from conformance.runner.tiers import TIERS
from cp_fast import masks
from cp_fast.compile import chosen_schedule
from cp_fast.compile.chosen_schedule import choose_head_chunks
from cp_fast.compile.lower import Draft
from cp_fast.compile.pipeline import compiled
from cp_fast.compile.program import OWN, Free, Launch
from cp_fast.movers.select_movers import use
from cp_fast.passes import PASSES, switched_off
from cp_ref.schedules.planners.make_schedule import make_rank_schedule
from cp_ref.schedules.problem import Problem, Sequence
from tests.marks import examples

ALL = tuple(one.name for one in PASSES)


@cache
def implementation() -> tuple[Implementation, Capabilities]:
    impl = load(f"{adapter.__name__}:cpu")
    return impl, probe(impl)


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    return draw(cases(implementation()[1], dtypes=TIERS["logic"].dtypes))


@contextmanager
def without(off: tuple[str, ...]) -> Iterator[None]:
    with use("torch"), switched_off(*off):
        yield


def check(case: Case, off: tuple[str, ...]) -> None:
    impl, capabilities = implementation()
    with without(off):
        assert TIERS["logic"].check(impl, case, capabilities.device) == [], off


def plans_of(problem: Problem, off: tuple[str, ...] = ()) -> Iterator[Any]:
    """The ranks' plans and tables without these passes, but for what plans say of passes."""
    for rank in range(problem.cp_size):
        with switched_off(*off):
            draft = compiled(problem, rank)
        yield str(replace(draft.plan, skipped={})), draft.plan.saved, draft.tables.on_host(pinned=False).tolist()


def check_each(case: Case) -> None:
    """With every pass off that changes a plan of this problem, and with all of them off."""
    whole = list(plans_of(case.problem))
    for name in ALL:
        if any(plan != before for plan, before in zip(plans_of(case.problem, (name,)), whole, strict=True)):
            check(case, (name,))
    check(case, ALL)


@settings(max_examples=examples(int(os.environ.get("CP_PASSES", "40")), fast=5))
@given(case=drawn_cases())
def test_problems(case: Case) -> None:
    check_each(case)


def problem(lengths: tuple[int, ...], comm: str = "p2p", cp_size: int = 2, **more: Any) -> Problem:
    """A problem of documents of these lengths."""
    sequences = tuple(Sequence(n, n, n, n) for n in lengths)
    a2a_size = cp_size if comm == "a2a" else 1
    return Problem(cp_size, sequences, comm, a2a_size, qkv_format="thd", heads_q=4, heads_kv=2, **more)


def of_areas(areas: torch.Tensor, length: int, cp_size: int = 1) -> Problem:
    return problem((length,), cp_size=cp_size, areas=tuple(map(tuple, areas.tolist())))


PREFIXES = torch.tensor([(8, 16, 0, 4, -1, -1), (8, 16, 6, 8, -1, -1), (8, 16, 8, 16, -1, 0), (0, 8, 0, 8, -1, 0)])
EXAMPLES = (  # Every pass on tiles or instructions has something to do in one of them.
    problem((16, 8)),
    problem((16, 8), window_size=(3, 0)),
    problem((16, 8), "a2a"),
    problem((24,), "all_gather", 3, attn_mask_type="no_mask"),
    of_areas(masks.block_causal(24, 4), 24, 2),
    of_areas(masks.first_tokens_and_window(8192, 64, 512), 8192),
    of_areas(torch.tensor([(0, 16, 0, 4, -1, -1), (0, 8, 4, 8, -1, -1), (4, 16, 8, 12, -1, -1)]), 16),
    of_areas(PREFIXES, 16),
)


def drafts() -> list[Draft]:
    return [compiled(example, rank) for example in EXAMPLES for rank in range(example.cp_size)]


def makers(off: tuple[str, ...] = ()) -> set[str]:
    """The passes that made instructions of the examples' plans."""
    with switched_off(*off):
        plans = [plan for draft in drafts() for plan in (draft.plan.forward, draft.plan.backward)]
    return {name for plan in plans for one in plan.instructions for name in one.made_by.split(", ")}


MAKERS = [one.name for one in PASSES if one.on in ("tiles", "instructions") and one.name != "low_precision_grads"]


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.pairs < 1e6], ids=lambda one: one.cp_comm_type)
def test_examples(example: Problem) -> None:
    check_each(Case(example))


def test_an_instruction_says_which_passes_made_it() -> None:
    assert makers() == {"lower", *MAKERS}


@pytest.mark.parametrize("name", MAKERS)
def test_a_pass_that_is_switched_off_makes_nothing(name: str) -> None:
    assert name not in makers((name,))


def test_without_passes_a_plan_is_as_it_was_lowered() -> None:
    """Every launch has one segment, and nothing is freed."""
    assert makers(ALL) == {"lower"}
    with switched_off(*ALL):
        found = drafts()
    for draft in found:
        for plan in (draft.plan.forward, draft.plan.backward):
            assert not any(plan.of(Free))
            assert all(len(draft.tables.cumulative(one.batch.cu_q)) == 2 for one in plan.of(Launch))


def test_heads_are_split_by_a_pass() -> None:
    sizes: dict[str, Any] = {"d_qk": 128, "d_v": 128, "dtype": "bfloat16"}
    large = replace(problem((32_768,), "a2a", **sizes), heads_q=32, heads_kv=32)
    assert choose_head_chunks(large) == (1, 14, 1)
    with switched_off("split_heads"):
        assert choose_head_chunks(large) == ()


def test_keys_are_delayed_by_a_pass() -> None:
    ring = of_areas(masks.block_causal(24, 4), 24, 2)
    with patch.object(chosen_schedule, "own_keys_wait", lambda *_: "delayed"):
        assert chosen_schedule.chosen_rank_schedule(ring, 0, ()) == "delayed"
        with switched_off("delay_keys"):
            assert str(chosen_schedule.chosen_rank_schedule(ring, 0, ())) == str(make_rank_schedule(ring, 0, ()))


def test_a_batch_is_folded_into_heads_by_a_pass() -> None:
    batch = replace(problem((16, 16)), qkv_format="sbhd")
    heads = {}
    for off in ((), ("fold_batch",)):
        with switched_off(*off):
            heads[off] = compiled(batch, 0).plan.forward.buffers[OWN["q"]].heads
    assert heads == {(): (0, 8), ("fold_batch",): (0, 4)}


def test_a_plan_says_which_passes_were_skipped_and_why() -> None:
    with switched_off("free_early"), patch.object(Problem, "position_free_scores", new=False):
        plan = compiled(EXAMPLES[0], 0).plan
    reasons = {one.name: "scores depend on positions" for one in PASSES if one.needs_position_free_scores}
    assert plan.skipped == reasons | {"free_early": "it is switched off"}
    assert "skipped fold_batch: scores depend on positions\n" in str(plan)
    assert "skipped" not in str(compiled(EXAMPLES[0], 0).plan)


@settings(max_examples=examples(60))
@given(case=drawn_cases())
def test_problems_whose_scores_depend_on_positions(case: Case) -> None:
    with patch.object(Problem, "position_free_scores", new=False):
        check(case, ())


def test_names_that_are_no_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="which are no compiler passes"), switched_off("free_late"):
        pass
