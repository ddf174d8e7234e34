"""Bugs in places, masks and derivatives, planted in the reference: the tests' problems find each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import cp_ref
from tests.meta.mutants import MUTANTS
from tests.meta.mutants.model import read_mutants
from tests.scores.scored_problems import Scores, check
from tests.scores.test_problems import PACKED, whole

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
cp_ref.executor.tile_attention.pair_indices
> result = result._replace(kv_idx=result.kv_idx + 1)

dropped-keys (dropout): keys one too late, of dropout
cp_ref.executor.tile_attention.pair_indices
> result = result._replace(kv_idx=result.kv_idx + 1)

document (dropout): always the first document
cp_ref.executor.tile_attention.pair_indices
> result = result._replace(document=torch.zeros_like(result.document))

slopes (alibi of documents): slopes of another document
cp_ref.executor.tile_attention.pair_indices
> result = result._replace(document=(result.document - 1).abs())

heads (dropout): one mask for all heads
cp_ref.executor.tile_attention.pair_indices
> result = result._replace(head=torch.zeros_like(result.head))

no-mask (dropout): no mask in the backward pass
cp_ref.executor.play_schedule.run_backward
+ inputs = inputs.without_dropout()

no-alibi (alibi): no ALiBi in the backward pass
cp_ref.executor.play_schedule.run_backward
+ inputs = inputs._replace(alibi_slopes=None)
"""
OF = {"alibi": ALIBI, "dropout": DROPPED}
BUGS = {name: (MUTANTS[name], *how) for name, how in KNOWN.items()}
BUGS |= {
    name: (bug, Scores("bh") if bug.where else OF[bug.tier], {}) for name, bug in read_mutants("cp_ref", OTHERS).items()
}


@pytest.mark.parametrize("name", BUGS)
def test_a_problem_finds_it(name: str) -> None:
    fields: dict[str, Any]
    bug, scores, fields = BUGS[name]
    case = whole(replace(PACKED, attn_mask_type="no_mask"), **fields)
    assert check(cp_ref, case, scores) == []
    with bug.planted():
        assert check(cp_ref, case, scores) != []
