"""The strategies reach every corner of the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from conformance.case import Case
from conformance.checks.probes import digits, visible_pairs
from conformance.implementation import load
from conformance.problems.capabilities import AXES, EVERYTHING, Capabilities
from conformance.problems.strategies import CP_SIZES, cases
from conformance.runner.run_tiers import PROFILES, run_tier
from conformance.tensors import assemble, build, global_rows, take_slice, where
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS, MASKS, QKV_FORMATS, SOFTMAX_TYPES
from tests.meta.mutants import MUTANTS

_QUIET = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": tuple(HealthCheck)}


def drawn_problems(count: int, capabilities: Capabilities = EVERYTHING) -> list[Case]:
    found: list[Case] = []

    @settings(max_examples=count, phases=[Phase.generate], **_QUIET)
    @given(cases(capabilities))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return drawn_problems(500)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("cp_size", CP_SIZES),
        ("cp_comm_type", CP_COMM_TYPES),
        ("layout", LAYOUTS),
        ("qkv_format", QKV_FORMATS),
        ("attn_mask_type", MASKS),
        ("softmax_type", SOFTMAX_TYPES),
    ],
)
def test_every_choice_is_drawn(field: str, values: tuple[object, ...], drawn: list[Case]) -> None:
    for value in values:
        count = sum(getattr(case.problem, field) == value for case in drawn)
        assert count >= len(drawn) // (5 * len(values)), f"{field} {value!r} comes {count} times in {len(drawn)}"


def _any_sequence(test: Callable[[Sequence], bool]) -> Callable[[Case], bool]:
    return lambda case: any(test(s) for s in case.problem.sequences)


CORNERS: dict[str, Callable[[Case], bool]] = {
    "no sequence": lambda case: not case.problem.sequences,
    "several sequences": lambda case: len(case.problem.sequences) > 1,
    "no slots": _any_sequence(lambda s: s.slots_q == 0),
    "zero-length queries": _any_sequence(lambda s: s.len_q == 0 < s.len_kv),
    "zero-length keys": _any_sequence(lambda s: s.len_kv == 0 < s.len_q),
    "one token": _any_sequence(lambda s: s.len_q == 1),
    "cross attention": _any_sequence(lambda s: s.len_q != s.len_kv),
    "more queries than keys": _any_sequence(lambda s: s.len_q > s.len_kv > 0),
    "padding of queries": _any_sequence(lambda s: s.len_q < s.slots_q),
    "padding of keys": _any_sequence(lambda s: s.len_kv < s.slots_kv),
    "uneven sequences": lambda case: len({s.slots_q for s in case.problem.sequences}) > 1,
    "tail of queries": lambda case: case.tail_q > 0,
    "tail of keys": lambda case: case.tail_kv > 0,
    "window on the left": lambda case: case.problem.window_size[0] >= 0 > case.problem.window_size[1],
    "window on the right": lambda case: not case.problem.causal and case.problem.window_size[1] >= 0,
    "window on both sides": lambda case: not case.problem.causal and min(case.problem.window_size) >= 0,
    "window of nothing": lambda case: case.problem.window_size[0] == 0,
    "window larger than everything": lambda case: case.problem.window_size[0] == 200,
    "dozens of sequences": lambda case: len(case.problem.sequences) >= 40,
    "a sequence of hundreds": _any_sequence(lambda s: s.slots_q >= 250),
    "at the border of a kernel's tile": _any_sequence(lambda s: s.len_q in (63, 64, 65, 95, 96, 97, 127, 128, 129)),
    "fewer kv heads than a2a ranks": lambda case: case.problem.heads_kv < case.problem.a2a_size,
    "groups of four or more": lambda case: case.problem.heads_per_kv >= 4,
    "a head dim of models": lambda case: case.problem.d_qk in (64, 96, 128, 192, 256),
    "192 and 128": lambda case: {case.problem.d_qk, case.problem.d_v} == {192, 128},
    "an odd multiple of 8": lambda case: case.problem.d_qk > 8 and case.problem.d_qk % 16 == 8,
    "no multiple of 8": lambda case: case.problem.d_qk % 8 > 0,
    "bottom right with a window": lambda case: case.problem.bottom_right and case.problem.window_size[0] >= 0,
    "rows that see nothing": lambda case: (
        bool((visible_pairs(case).sum(1)[build(case).real_q.flatten()] == 0).any())
        if case.problem.qkv_format == "thd"
        else False
    ),
    "grouped heads": lambda case: case.problem.heads_q > case.problem.heads_kv > 1,
    "multi-query heads": lambda case: case.problem.heads_q > case.problem.heads_kv == 1,
    "d_v smaller": lambda case: case.problem.d_v < case.problem.d_qk,
    "d_v larger": lambda case: case.problem.d_v > case.problem.d_qk,
    "softcap": lambda case: case.problem.softcap > 0,
    "scale": lambda case: case.problem.softmax_scale is not None,
    "large scores": lambda case: case.magnitude > 1,
    "lse gradient": lambda case: "lse" in case.loss,
    "lse gradient alone": lambda case: case.loss == "lse",
    "max_logit": lambda case: case.return_max_logit,
    "no backward": lambda case: not case.wanted,
    "some gradients only": lambda case: 0 < len(set("qkv") & set(case.wanted)) < 3,
    "odd strides": lambda case: case.strided,
    "plan": lambda case: case.use_plan,
    "deterministic": lambda case: case.deterministic,
    "a2a inside a2a+p2p": lambda case: 1 < case.problem.a2a_size < case.problem.cp_size,
}


@pytest.mark.parametrize("corner", CORNERS)
def test_every_corner_is_drawn(corner: str, drawn: list[Case]) -> None:
    count = sum(CORNERS[corner](case) for case in drawn)
    rare = ("dozens of sequences", "a sequence of hundreds")
    assert count >= (1 if corner in rare else 4), f"{corner!r} comes {count} times in {len(drawn)} cases"


def test_cases_are_small_and_mostly_not_trivial(drawn: list[Case]) -> None:
    tokens = sorted(max(c.problem.starts_q[-1], c.problem.starts_kv[-1]) for c in drawn)
    assert tokens[len(tokens) * 80 // 100] <= 112
    assert tokens[-1] <= 60_000  # 600 sequences of at most 99 tokens
    assert sum(case.problem.pairs > 20 for case in drawn) > len(drawn) / 2


@pytest.mark.parametrize(
    ("mutant", "tier"),
    [
        ("dkv-copied-not-added", "logic"),
        pytest.param("documents-joined", "probes", marks=pytest.mark.thorough),
    ],
)
def test_a_planted_bug_shrinks_to_a_few_tokens(mutant: str, tier: str) -> None:
    torch.set_num_threads(1)
    profile = replace(PROFILES["quick"], max_examples=200)  # Hypothesis draws other problems beside other modules.
    with MUTANTS[mutant].planted():
        (failure,) = run_tier(load("cp_ref"), tier, EVERYTHING, profile).smallest
    case = Case.parse(failure.text)
    assert sum(s.len_q for s in case.problem.sequences) <= 8, failure.text
    assert case.problem.cp_size <= 3
    assert (case.problem.d_qk, case.problem.d_v, case.tail_q, case.seed) == (8, 8, 0, 0)


def test_only_what_is_supported_is_drawn() -> None:
    narrow = {axis: tuple(choices)[:1] for axis, choices in AXES.items()} | {"window": ()}
    narrow |= {"lengths": (), "heads": (), "dims": ()}
    for case in drawn_problems(60, Capabilities(narrow)):
        p = case.problem
        assert (p.cp_comm_type, p.layout, p.qkv_format, p.softmax_type) == ("p2p", "dual_chunk", "bshd", "vanilla")
        assert (p.window_size[0], p.softcap, p.heads_q, p.d_qk) == (-1, 0.0, p.heads_kv, p.d_v)
        assert all(s.len_q == s.len_kv for s in p.sequences)


def test_tensors_are_deterministic_and_padded_with_nan(drawn: list[Case]) -> None:
    for case in drawn[:60]:
        one, two = build(case), build(case)
        for name in ("q", "k", "v", "dout", "dlse"):
            a, b = getattr(one, name), getattr(two, name)
            assert torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9))
        assert torch.equal(one.q[..., 0, 0].isnan(), ~one.real_q)
        assert torch.equal(one.v[..., 0, 0].isnan(), ~one.real_kv)


def test_slices_put_together_are_the_whole(drawn: list[Case]) -> None:
    for case in drawn[:60]:
        p, tensors = case.problem, build(replace(case, seed=1))
        for x, side in ((tensors.q, "q"), (tensors.k, "kv")):
            whole = assemble(case, [take_slice(case, x, side, rank) for rank in range(p.cp_size)], side)
            assert torch.equal(whole.nan_to_num(), x.nan_to_num())


def test_placement_agrees_with_the_specification_by_hand() -> None:
    p = Problem(2, (Sequence(7, 7, 8, 8), Sequence(4, 4, 4, 4)), qkv_format="thd", attn_mask_type="padding_causal")
    case = Case(p, tail_q=4)
    assert global_rows(case, "q", 0) == (0, 1, 6, 7, 8, 11, 12, 13)
    assert global_rows(case, "q", 1) == (2, 3, 4, 5, 9, 10, 14, 15)
    assert len(p.slots.q.of(0)) == 4
    assert where(case, "q", None, 7) == "sequence 0 padding slot 7 (rank 0)"
    assert where(case, "q", None, 9) == "sequence 1 query 1 (rank 1)"
    assert where(case, "q", None, 14) == "tail slot 2 (rank 1)"


def test_digits_are_all_different_and_never_zero() -> None:
    for dims in (1, 2, 3, 8, 16):
        spelled = digits(100, dims)
        assert len({tuple(row) for row in spelled.tolist()}) == 100
        assert spelled.any(1).all()
