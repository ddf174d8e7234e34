"""Bugs in places, masks and derivatives, planted in the reference: the tests' problems find each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import pytest
import torch

import cp_ref
from cp_ref.contract.score_inputs import ScoreInputs
from cp_ref.contract.scores import Pairs
from tests.scores.scored_problems import Scores, check
from tests.scores.test_problems import PACKED, whole

PLACES, BACKWARD = "cp_ref.executor.tile_places.tile_places", "cp_ref.reference_attention.run_backward"
A2A = {"cp_comm_type": "a2a", "a2a_size": 4}
ALIBI, DROPPED = Scores("h"), Scores(dropout_p=0.5, seed=3)


def of_places(change: Callable[[Pairs], dict[str, torch.Tensor]]) -> Callable[..., Any]:
    """A tile's places with some replaced."""

    def spoil(original: Callable[..., Pairs]) -> Callable[..., Pairs]:
        def spoiled(*given: Any) -> Pairs:
            pairs = original(*given)
            return pairs._replace(**change(pairs))

        return spoiled

    return spoil


def of_backward(change: Callable[[ScoreInputs], ScoreInputs]) -> Callable[..., Any]:
    """Other inputs of scores in the backward pass."""

    def spoil(run_backward: Callable[..., Any]) -> Callable[..., Any]:
        def spoiled(*given: Any) -> Any:
            return run_backward(*(change(x) if isinstance(x, ScoreInputs) else x for x in given))

        return spoiled

    return spoil


def other_seed(given: ScoreInputs) -> ScoreInputs:
    assert given.dropout_seed is not None
    return given._replace(dropout_seed=given.dropout_seed + 1)


MUTANTS: dict[str, tuple[str, Callable[..., Any], Scores, dict[str, Any]]] = {
    "queries counted from the tile's first": (
        PLACES, of_places(lambda pairs: {"q_idx": pairs.q_idx - pairs.q_idx.min()}), ALIBI, {},
    ),
    "keys one too late": (PLACES, of_places(lambda pairs: {"kv_idx": pairs.kv_idx + 1}), ALIBI, {}),
    "keys one too late, of dropout": (PLACES, of_places(lambda pairs: {"kv_idx": pairs.kv_idx + 1}), DROPPED, {}),
    "always the first document": (
        PLACES, of_places(lambda pairs: {"document": torch.zeros_like(pairs.document)}), DROPPED, {},
    ),
    "slopes of another document": (
        PLACES, of_places(lambda pairs: {"document": (pairs.document - 1).abs()}), Scores("bh"), {},
    ),
    "heads counted from the rank's first": (
        PLACES, of_places(lambda pairs: {"head": pairs.head - pairs.head.min()}), DROPPED, A2A,
    ),
    "one mask for all heads": (PLACES, of_places(lambda pairs: {"head": torch.zeros_like(pairs.head)}), DROPPED, {}),
    "aligned to the first key": (PLACES, of_places(lambda pairs: {"shift": torch.zeros_like(pairs.shift)}), ALIBI, {}),
    "another mask in the backward pass": (
        BACKWARD, of_backward(other_seed), DROPPED, {},
    ),
    "no mask in the backward pass": (BACKWARD, of_backward(ScoreInputs.without_dropout), DROPPED, {}),
    "no ALiBi in the backward pass": (
        BACKWARD, of_backward(lambda given: given._replace(alibi_slopes=None)), ALIBI, {},
    ),
    "no derivative of score_mod": (
        "cp_ref.contract.scores.PairScores.pulled_back",
        lambda pulled_back: lambda self, scores, grad: grad, Scores(score_mod="biased_by_head"), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_problem_finds_it(name: str) -> None:
    target, spoil, scores, fields = MUTANTS[name]
    case = whole(replace(PACKED, attn_mask_type="no_mask"), **fields)
    assert check(cp_ref, case, scores) == []
    with patch(target, spoil(resolve_name(target))):
        assert check(cp_ref, case, scores) != []
