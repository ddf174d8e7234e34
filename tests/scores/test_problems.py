"""ALiBi, score_mod and dropout of random problems against the oracle, in float64 to 1e-10."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
import cp_ref
from conformance.case import Case
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Schedule
from tests.marks import examples
from tests.meta.mutants import MUTANTS
from tests.meta.mutants.model import read_mutants
from tests.scores.scored_problems import KINDS, SCORE_MODS, Scores, check, in_one_document, scored_cases
from tests.spec.random_schedules import backward_ring, ring_of_rings, scheduled_problems

PACKAGES: dict[str, Any] = {"cp_ref": cp_ref, "cp_fast": cp_fast}
MANY = int(os.environ.get("CP_SCORES", "30"))  # problems of each kind; 3,000 once in a while
PACKED = Problem(
    4,
    (Sequence(11, 7, 12, 12), Sequence(0, 0, 0, 0), Sequence(6, 6, 6, 6), Sequence(24, 30, 24, 32)),
    qkv_format="thd",
    heads_q=8,
    heads_kv=4,
    d_qk=4,
    d_v=3,
    dtype="float64",
)
BATCHED = replace(PACKED, qkv_format="sbhd", sequences=(Sequence(16, 16, 16, 16),) * 2, softcap=2.0)
ALL = Scores("bh", "relative", 0.3, 5)


def whole(problem: Problem, **fields: Any) -> Case:
    return Case(replace(problem, **fields), return_lse=True, return_max_logit=True, loss="out+lse")


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("layout", ["dual_chunk", pytest.param("contiguous", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize(
    "mask", ["causal_bottom_right", *(pytest.param(mask, marks=pytest.mark.thorough) for mask in ("causal", "no_mask"))]
)
@pytest.mark.one_in(3)
def test_every_schedule(mask: str, comm: str, layout: str, package: str) -> None:
    sizes = {"cp_comm_type": comm, "a2a_size": {"a2a": 4, "a2a+p2p": 2}.get(comm, 1), "layout": layout}
    for problem in (PACKED, BATCHED):
        case = whole(problem, attn_mask_type=mask, softmax_type="learnable", **sizes)
        assert check(PACKAGES[package], case, ALL) == []


WINDOW = replace(PACKED, window_size=(5, 2), attn_mask_type="no_mask", cp_size=3)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", SCORE_MODS)
@pytest.mark.parametrize(
    "problem",
    [PACKED, *(pytest.param(problem, marks=pytest.mark.thorough) for problem in (BATCHED, WINDOW))],
    ids=["packed", "batched", "window"],
)
@pytest.mark.one_in(3)
def test_every_score_mod(problem: Problem, name: str, package: str) -> None:
    assert check(PACKAGES[package], whole(problem), Scores(score_mod=name)) == []
    assert check(PACKAGES[package], replace(whole(problem), use_plan=True), Scores("h", name, 0.5, 1)) == []


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(MANY))
@given(data=st.data())
@pytest.mark.one_in(3)
def test_random_problems(kind: str, package: str, data: st.DataObject) -> None:
    case, scores = data.draw(scored_cases(kind))
    assert check(PACKAGES[package], case, scores) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_rings_that_no_planner_has(package: str) -> None:
    for schedule in (backward_ring(PACKED.workload), ring_of_rings(PACKED.workload, 2)):
        case = replace(whole(PACKED), use_plan=True)
        assert check(PACKAGES[package], case, ALL, Schedule.parse(str(schedule))) == []


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(20))
@given(drawn=scheduled_problems())
def test_random_schedules(package: str, drawn: tuple[Problem, Schedule]) -> None:
    problem, schedule = drawn
    if in_one_document(problem) == problem:
        case = replace(whole(problem, dtype="float64", d_qk=3, d_v=2), use_plan=True)
        scores = ALL if problem.sequences else ALL._replace(slopes="h")  # there are no slopes of no document
        assert check(PACKAGES[package], case, scores, schedule) == []


def roots(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """NaN, with a derivative of NaN, where the key comes after its query."""
    return score * torch.sqrt((q_idx - kv_idx).to(score.dtype))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_hidden_pair_may_be_nan(package: str) -> None:
    with patch.dict(SCORE_MODS, {"roots": roots}):
        for problem in (PACKED, BATCHED):
            assert check(PACKAGES[package], whole(problem), Scores(score_mod="roots")) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes(dtype: str) -> None:
    for problem in (PACKED, BATCHED):
        assert check(cp_ref, whole(problem, dtype=dtype), ALL) == []


BLIND: dict[str, dict[str, Any]] = {  # some rows see nothing
    "score_mod": {"score_mod": SCORE_MODS["with_holes"]},
    "mask": {"attn_mask_type": "causal_bottom_right"},
}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
@pytest.mark.parametrize("hidden_by", BLIND)
def test_a_row_that_sees_nothing_passes_no_gradient_on(hidden_by: str, softmax_type: str, package: str) -> None:
    """Whatever comes to its out, NaN included, or to an lse of -inf."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 16, 2, 4, generator=generator, dtype=torch.float64)
    module = PACKAGES[package]

    def one(member: Any) -> list[list[torch.Tensor]]:
        cp, found = module.ContextParallel(member), []
        for spoilt in (0.0, torch.nan):
            leaves = [module.shard(x, cp=cp).requires_grad_() for x in (q, q[:, :8], q[:, 8:])]
            sink = torch.ones(2, dtype=torch.float64, requires_grad=True)
            more = {} if softmax_type == "vanilla" else {"softmax_type": softmax_type, "softmax_offset": sink}
            out, lse = module.attention(*leaves, cp=cp, return_lse=True, **BLIND[hidden_by], **more)
            blind = (out == 0).all(-1, keepdim=True)
            assert blind.any() or hidden_by == "mask"  # there, all rows of a rank may see some
            dlse = torch.ones_like(lse).masked_fill(lse == float("-inf"), spoilt)
            torch.autograd.backward([out, lse], [torch.ones_like(out).masked_fill(blind, spoilt), dlse])
            found.append([x.grad for x in (*leaves, sink) if x.grad is not None])
        return found

    for clean, spoilt in module.SimGroup(2).run(one):
        assert len(clean) == (3 if softmax_type == "vanilla" else 4)
        for got, want in zip(spoilt, clean, strict=True):
            torch.testing.assert_close(got, want)


ALIBI, DROPPED = Scores("h"), Scores(dropout_p=0.5, seed=3)
KNOWN = {  # which scores find them, and fields of the problem
    "query-positions-of-the-rank": (ALIBI, {}),
    "alibi-without-the-shift": (ALIBI, {}),
    "heads-of-the-rank": (DROPPED, {"cp_comm_type": "a2a", "a2a_size": 4}),
    "another-mask-in-the-backward": (DROPPED, {}),
    "score-mod-has-slope-1": (Scores(score_mod="biased_by_head"), {}),
}
OTHERS = """
keys (alibi): keys one too late
cp_ref.reference.executor.tile_attention.pair_indices
> result = result._replace(kv_idx=result.kv_idx + 1)

dropped-keys (dropout): keys one too late, of dropout
cp_ref.reference.executor.tile_attention.pair_indices
> result = result._replace(kv_idx=result.kv_idx + 1)

document (dropout): always the first document
cp_ref.reference.executor.tile_attention.pair_indices
> result = result._replace(sequence=torch.zeros_like(result.sequence))

slopes (alibi of documents): slopes of another document
cp_ref.reference.executor.tile_attention.pair_indices
> result = result._replace(sequence=(result.sequence - 1).abs())

heads (dropout): one mask for all heads
cp_ref.reference.executor.tile_attention.pair_indices
> result = result._replace(head=torch.zeros_like(result.head))

no-mask (dropout): no mask in the backward pass
cp_ref.reference.executor.play_schedule.run_backward
+ inputs = inputs.without_dropout()

no-alibi (alibi): no ALiBi in the backward pass
cp_ref.reference.executor.play_schedule.run_backward
+ inputs = inputs._replace(alibi_slopes=None)
"""
OF = {"alibi": ALIBI, "dropout": DROPPED}
BUGS = {name: (MUTANTS[name], *how) for name, how in KNOWN.items()}
BUGS |= {
    name: (bug, Scores("bh") if bug.where else OF[bug.tier], {}) for name, bug in read_mutants("cp_ref", OTHERS).items()
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if n % 2 else ()) for n, name in enumerate(BUGS)]
)
@pytest.mark.one_in(2)
def test_a_problem_finds_it(name: str) -> None:
    fields: dict[str, Any]
    bug, scores, fields = BUGS[name]
    case = whole(replace(PACKED, attn_mask_type="no_mask"), **fields)
    assert check(cp_ref, case, scores) == []
    with bug.planted():
        assert check(cp_ref, case, scores) != []
