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

import cp_fast
from conformance.adapters import cp_fast as adapter
from conformance.case import Case
from conformance.implementation import Implementation, load
from conformance.problems.capabilities import Capabilities, probe
from conformance.problems.strategies import cases
from conformance.runner.tiers import TIERS
from cp_fast import masks
from cp_fast.compile import chosen_schedule
from cp_fast.compile.chosen_head_chunks import choose_head_chunks
from cp_fast.compile.instruction_passes import low_precision_grads, of_one_launch
from cp_fast.compile.lower import Draft
from cp_fast.compile.pipeline import compiled
from cp_fast.compile.program import OWN, Copy, Free, Launch, Programs, Recv, Send
from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, Gradients
from cp_fast.movers.mover_protocol import Rows
from cp_fast.movers.select_movers import use
from cp_fast.passes import PASSES, switched_off
from cp_fast.tools.cost.counts import LIBRARY
from cp_ref import SimGroup
from cp_ref.calls.declared import replaced
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.planners.make_schedule import make_rank_schedule
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import CPCommType
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


def programs_of(problem: Problem, off: tuple[str, ...] = ()) -> Iterator[Any]:
    """The ranks' programs and tables without these passes, but for what programs say of passes."""
    for rank in range(problem.cp_size):
        with switched_off(*off):
            draft = compiled(problem, rank, LIBRARY)
        yield (
            str(replace(draft.programs, skipped={})),
            draft.programs.saved,
            draft.tables.on_host(pinned=False).tolist(),
        )


def check_each(case: Case) -> None:
    """With every pass off that changes a plan of this problem, and with all of them off."""
    whole = list(programs_of(case.problem))
    for name in ALL:
        if any(programs != before for programs, before in zip(programs_of(case.problem, (name,)), whole, strict=True)):
            check(case, (name,))
    check(case, ALL)


@settings(max_examples=examples(int(os.environ.get("CP_PASSES", "25")), fast=3))
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
    return [compiled(example, rank, LIBRARY) for example in EXAMPLES for rank in range(example.cp_size)]


def makers(off: tuple[str, ...] = ()) -> set[str]:
    """The passes that made instructions of the examples' plans."""
    with switched_off(*off):
        passes = [program for draft in drafts() for program in (draft.programs.forward, draft.programs.backward)]
    return {name for program in passes for one in program.instructions for name in one.made_by.split(", ")}


MAKERS = [one.name for one in PASSES if one.on in ("tiles", "instructions") and one.name != "low_precision_grads"]


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.pairs < 1e6], ids=lambda one: one.cp_comm_type)
@pytest.mark.one_in(3)
def test_examples(example: Problem) -> None:
    check_each(Case(example))


def test_an_instruction_says_which_passes_made_it() -> None:
    assert makers() == {"lower", *MAKERS}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.one_in(2)
def test_a_pass_that_is_switched_off_makes_nothing(name: str) -> None:
    assert name not in makers((name,))


def test_without_passes_a_plan_is_as_it_was_lowered() -> None:
    """Every launch has one segment, and nothing is freed."""
    assert makers(ALL) == {"lower"}
    with switched_off(*ALL):
        found = drafts()
    for draft in found:
        for program in (draft.programs.forward, draft.programs.backward):
            assert not any(program.of(Free))
            assert all(len(draft.tables.cumulative(one.batch.cu_q)) == 2 for one in program.of(Launch))


def test_heads_are_split_by_a_pass() -> None:
    sizes: dict[str, Any] = {"d_qk": 128, "d_v": 128, "dtype": "bfloat16"}
    large = replace(problem((32_768,), "a2a", **sizes), heads_q=32, heads_kv=32)
    assert choose_head_chunks(large) == (1, 14, 1)
    with switched_off("split_heads"):
        assert choose_head_chunks(large) == ()


def test_keys_are_delayed_by_a_pass() -> None:
    ring, choices = of_areas(masks.block_causal(24, 4), 24, 2), chosen_schedule.Choices()
    with patch.object(chosen_schedule, "own_keys_wait", lambda *_: "delayed"):
        assert chosen_schedule.chosen_rank_schedule(ring, 0, choices) == "delayed"
        with switched_off("delay_keys"):
            assert str(chosen_schedule.chosen_rank_schedule(ring, 0, choices)) == str(make_rank_schedule(ring, 0, ()))


def test_a_batch_is_folded_into_heads_by_a_pass() -> None:
    batch = replace(problem((16, 16)), qkv_format="sbhd")
    heads = {}
    for off in ((), ("fold_batch",)):
        with switched_off(*off):
            heads[off] = compiled(batch, 0, LIBRARY).programs.forward.buffers[OWN["q"]].heads
    assert heads == {(): (0, 8), ("fold_batch",): (0, 4)}


def test_a_plan_says_which_passes_were_skipped_and_why() -> None:
    with switched_off("free_early"), patch.object(Problem, "position_free_scores", new=False):
        programs = compiled(EXAMPLES[0], 0, LIBRARY).programs
    reasons = {one.name: "scores depend on positions" for one in PASSES if one.needs_position_free_scores}
    assert programs.skipped == reasons | {"free_early": "it is switched off"}
    assert "skipped fold_batch: scores depend on positions\n" in str(programs)
    assert "skipped" not in str(compiled(EXAMPLES[0], 0, LIBRARY).programs)


@settings(max_examples=examples(60, fast=4))
@given(case=drawn_cases())
def test_problems_whose_scores_depend_on_positions(case: Case) -> None:
    with patch.object(Problem, "position_free_scores", new=False):
        check(case, ())


def test_names_that_are_no_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="which are no compiler passes"), switched_off("free_late"):
        pass


# ---- recv_in_place
#
# What arrives in a few pieces is received where it is wanted, and own rows are copied meanwhile: the same bits.


COMMS = [("a2a", 2), ("a2a", 4), ("a2a+p2p", 4), ("all_gather", 3), ("p2p", 3)]
DOCUMENTS = {"one": [96], "two": [48, 24], "many": [24, 48, 24, 48, 24, 72]}


def play_in_place(member: SimMember, comm: Any, lengths: list[int], layout: Any) -> tuple[list[torch.Tensor], Any]:
    cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm, layout=layout)
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    how: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": cu, "dtype": torch.float64}
    plan = cp_fast.make_plan(cp=cp, device="cpu", heads_q=8, heads_kv=4, d_qk=6, d_v=4, **how)
    draw = torch.Generator().manual_seed(cp.rank)
    rows = sum(lengths) // cp.size
    sizes = ((8, 6), (4, 6), (4, 4), (8, 4))
    q, k, v, dout = (torch.randn(rows, *size, generator=draw, dtype=torch.float64) for size in sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = cp_fast.attention(*leaves, cp=cp, plan=plan, return_lse=True)
    dlse = torch.randn(lse.shape, generator=draw, dtype=torch.float64)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse))], plan.programs


def in_place(programs: Programs[Rows]) -> int:
    """How many messages are received in rows of a buffer that a launch reads."""
    return sum(one.made_by == "recv_in_place" for its in (programs.forward, programs.backward) for one in its.of(Recv))


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("documents", ["one", pytest.param("two", marks=pytest.mark.thorough), "many"])
@pytest.mark.parametrize(("comm", "size"), COMMS)
@pytest.mark.one_in(3)
def test_the_bits_are_the_same_received_in_place(comm: Any, size: int, documents: str, layout: Any) -> None:
    lengths = DOCUMENTS[documents]
    found = SimGroup(size).run(lambda member: play_in_place(member, comm, lengths, layout))
    with switched_off("recv_in_place"):
        expected = SimGroup(size).run(lambda member: play_in_place(member, comm, lengths, layout))
    for (mine, programs), (its, plain) in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, its))
        assert not in_place(plain)
        assert in_place(programs) == 0 or comm != "p2p"
        if comm == "a2a" and documents == "one":  # of q and of kv, and of do, from every peer
            assert in_place(programs) == 3 * (size - 1)
            assert len([*plain.forward.of(Copy)]) == len([*programs.forward.of(Copy)]) + 2
        if documents == "many":
            assert in_place(programs) == 0 or layout == "contiguous" or comm == "all_gather"


# ---- low_precision_grads
#
# Gradients that are one launch's own travel as it rounded them: fewer bytes, the same bits.


class Rounded(Backend):
    """A kernel library that yields gradients in q's dtype, as those for GPUs do."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.name, self.features = backend, backend.name, backend.features

    def why_not(self) -> str | None:
        return self._backend.why_not()

    def forward(self, *args: Any) -> Any:
        return self._backend.forward(*args)

    def backward(self, given: list[BackwardOperands], *args: Any) -> Gradients:
        dtype = given[0].dout.dtype
        return Gradients(*(x.to(dtype) for x in self._backend.backward(given, *args)))


def play_rounded(
    member: SimMember, comm: CPCommType, window: int, rounded: tuple[bool, ...]
) -> tuple[list[torch.Tensor], int]:
    """Results, and how many messages of gradients are sent as one launch rounded them."""
    cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
    sizes: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.bfloat16}
    cu = torch.tensor([0, 16 * cp.size, 24 * cp.size], dtype=torch.int32)
    how: dict[str, Any] = {"qkv_format": "thd", "window_size": (window, 0), "cu_seqlens_q": cu}
    plan = cp_fast.make_plan(cp=cp, device="cpu", **how, **sizes)
    single, wide = of_one_launch(plan.programs.backward), plan.programs.backward.buffers
    sent = {send.source.buffer for send in plan.programs.backward.of(Send)}
    programs = low_precision_grads(plan.programs, cp.comm, rounded=rounded[cp.rank])
    made = [one for one in programs.backward.instructions if one.made_by == "low_precision_grads"]
    assert all(isinstance(one, Send | Recv) for one in made)
    batch = replace(plan.batch, backend=Rounded(plan.backend), programs=programs)
    plan = replaced(plan, batch=batch)
    draw = torch.Generator().manual_seed(cp.rank)
    q, k, v, dout = (torch.randn(24, h, 8, generator=draw).bfloat16() for h in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cp_fast.attention(*leaves, cp=cp, plan=plan)
    assert {one.source.buffer for one in made if isinstance(one, Send)} == (single if rounded[cp.rank] else set())
    low = sum(wide[number].dtype != programs.backward.buffers[number].dtype for number in sent)
    assert low == (len(single) if rounded[cp.rank] else 0)
    results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    return results, low


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize(("comm", "size"), [("p2p", 2), ("p2p", 3), ("all_gather", 3), ("a2a+p2p", 4)])
@pytest.mark.one_in(3)
def test_the_bits_are_the_same_in_low_precision(comm: Any, size: int, window: int) -> None:
    wide = SimGroup(size).run(lambda member: play_rounded(member, comm, window, (False,) * size))
    for rounded in ((True,) * size, (True, *(False,) * (size - 1))):
        found = SimGroup(size).run(lambda member, rounded=rounded: play_rounded(member, comm, window, rounded))
        for (mine, _), (its, _) in zip(found, wide, strict=True):
            assert all(map(torch.equal, mine, its)), (comm, window, rounded)
        if all(rounded) and window < 0:
            assert sum(low for _, low in found) > 0
