"""ALiBi, score_mod and dropout in the suite: drawn where they are offered, judged by formulas of the suite's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cp_ref
from conformance.case import SCORE_MODS, Case
from conformance.checks.reference import UnsupportedCase, exact_results
from conformance.implementation import Implementation, load
from conformance.problems.capabilities import probe
from conformance.runner.tiers import TIERS
from conformance.scores import dropout_seed, kept_pairs
from conformance.tensors import build
from cp_ref.calls.scores import kept_by_dropout
from cp_ref.schedules.problem import Problem, Sequence

_TWO = (Sequence(7, 5, 8, 8), Sequence(3, 3, 4, 4))
PACKED = Problem(2, _TWO, qkv_format="thd", attn_mask_type="padding_causal", heads_q=4, heads_kv=2, dtype="float64")
SCORED = Case(replace(PACKED, score_mod="near", dropout_p=0.25), seed=3, alibi="document", return_lse=True)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_two_implementations_of_the_hash_keep_the_same_pairs(seed: int) -> None:
    q_idx, kv_idx = np.arange(40), np.arange(3, 51)
    for document, head, p in ((0, 0, 0.5), (5, 31, 2.0**-32), (70_000, 3, 0.9)):
        mine = kept_pairs(document, head, q_idx, kv_idx, seed, p)
        places = (
            torch.tensor(document),
            torch.tensor(head),
            torch.from_numpy(q_idx)[:, None],
            torch.from_numpy(kv_idx),
        )
        assert np.array_equal(mine, kept_by_dropout(*places, torch.tensor(seed), p).numpy())


def test_seeds_differ_in_both_halves() -> None:
    seeds = [dropout_seed(replace(SCORED, seed=n)) for n in range(100)]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len({seed >> 32 for seed in seeds}) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    "tier", ["plan", "logic", "probes", "budget", "metamorphic", "spellings", "hygiene", "determinism"]
)
def test_every_tier_plays_scores_of_places(tier: str) -> None:
    case = SCORED if tier != "budget" else replace(SCORED, problem=replace(SCORED.problem, dtype="bfloat16"))
    assert TIERS[tier].check(load("cp_ref"), case, "cpu") == []


def test_a_case_is_text() -> None:
    assert Case.parse(str(SCORED)) == SCORED
    assert 'score_mod="near", dropout_p=0.25' in str(SCORED)
    assert str(SCORED).endswith('alibi="document")')


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_mod": "mine"}, "score_mod is 'mine'; it must be one of"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0"),
        (
            {"score_mod": "near", "areas": ((0, 12, 0, 12, -1, 0),)},
            "score_mod is given, and areas connect documents 0 and 1",
        ),
    ],
)
def test_problems_without_a_meaning_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case(replace(PACKED, **changes))
    with pytest.raises(ValueError, match="alibi is 'row'"):
        Case(PACKED, alibi="row")


def test_an_implementation_without_the_parameters_is_not_asked() -> None:
    def attention(*tensors: torch.Tensor, cp: Any, **arguments: Any) -> Any:
        assert not arguments.keys() & {"score_mod", "dropout_p", "alibi_slopes", "aux_tensors", "dropout_seed"}
        return cp_ref.attention(*tensors, cp=cp, **arguments)

    members = {name: getattr(cp_ref, name) for name in cp_ref.__all__} | {"attention": attention}
    impl = Implementation(SimpleNamespace(**members), "sample")
    has = probe(impl)
    assert has.choices["score_mod"] == has.choices["dropout_p"] == ("none",)
    assert "alibi" not in has.wishes
    assert has.refused["dropout_p some"] == "its attention has no parameter called dropout_p"
    for tier in ("logic", "plan", "determinism"):
        with pytest.raises(UnsupportedCase, match="no parameter called"):
            TIERS[tier].check(impl, SCORED, "cpu")


@pytest.mark.parametrize("name", SCORE_MODS)
def test_every_score_mod_changes_something(name: str) -> None:
    case = Case(replace(PACKED, score_mod=name))
    plain = Case(PACKED)
    tensors = build(case)
    got, without = (exact_results(one, tensors)["out"].nan_to_num() for one in (case, plain))
    assert not torch.allclose(got, without)
