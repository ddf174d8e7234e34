"""Bugs in scores that know where they are: positions, documents, heads, slopes, derivatives, masks of dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_ref.contract.score_inputs import ScoreInputs
from cp_ref.contract.scores import Pairs, PairScores
from cp_ref.schedules.problem import Problem
from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]


def _pairs(change: Callable[[Pairs], Pairs]) -> Callable[[Any], Any]:
    """Other places of a tile's pairs."""

    def wrong(pair_scores: Any, *arguments: Any) -> PairScores | None:
        extra = pair_scores(*arguments)
        return None if extra is None else extra._replace(pairs=change(extra.pairs))

    return wrap(wrong)


def _inputs(change: Callable[[ScoreInputs], ScoreInputs]) -> Callable[[Any], Any]:
    """Other inputs of a tile's scores."""

    def wrong(pair_scores: Any, problem: Problem, inputs: ScoreInputs, *rest: Any) -> PairScores | None:
        return pair_scores(problem, change(inputs), *rest)

    return wrap(wrong)


def _from_the_tile(x: torch.Tensor) -> torch.Tensor:
    return x - x.flatten()[:1].view(1, 1, 1)


def _shift_of_slots(pair_scores: Any, problem: Problem, inputs: ScoreInputs, *rest: Any) -> PairScores | None:
    extra = pair_scores(problem, inputs, *rest)
    if extra is None:
        return None
    s = problem.sequences[int(extra.pairs.document)]
    return extra._replace(pairs=extra.pairs._replace(shift=torch.full_like(extra.pairs.shift, s.slots_kv - s.slots_q)))


def _slopes_of_the_next_head(inputs: ScoreInputs) -> ScoreInputs:
    slopes = inputs.alibi_slopes
    return inputs if slopes is None else inputs._replace(alibi_slopes=slopes.roll(1, -1))


def _half_a_seed(inputs: ScoreInputs) -> ScoreInputs:
    seed = inputs.dropout_seed
    return inputs if seed is None else inputs._replace(dropout_seed=seed & 0xFFFFFFFF)


def _another_mask(tile_backward: Any, *arguments: Any) -> Any:
    *others, extra = arguments
    if extra is None or extra.inputs.dropout_seed is None:
        return tile_backward(*arguments)
    inputs = extra.inputs._replace(dropout_seed=extra.inputs.dropout_seed + 1)
    return tile_backward(*others, extra._replace(inputs=inputs))


def _not_scaled(dropout: Any, dtype: torch.dtype, extra: PairScores | None) -> Any:
    factors = dropout(dtype, extra)
    return factors if extra is None else factors * (1 - extra.inputs.dropout_p)


def _no_dropout_of_dp(tile_backward: Any, q: Any, k: Any, v: Any, dout: Any, *rest: Any) -> Any:
    """dp = dout v^T without the factors of dropout: dv alone has them."""
    *others, extra = rest
    part = tile_backward(q, k, v, dout, *rest)
    if extra is None or extra.inputs.dropout_p == 0:
        return part
    plain = tile_backward(q, k, v, dout, *others, extra._replace(inputs=extra.inputs.without_dropout()))
    return part._replace(dq=plain.dq, dk=plain.dk)


_PLACES = "cp_ref.executor.play_schedule.pair_scores"
_BACKWARD = "cp_ref.executor.play_schedule.tile_backward"

MUTANTS: dict[str, Mutant] = {
    "query-positions-of-the-rank": Mutant(
        "queries are counted from the tile's first row",
        _PLACES,
        _pairs(lambda pairs: pairs._replace(q_idx=_from_the_tile(pairs.q_idx))),
        "logic",
    ),
    "key-positions-of-the-rank": Mutant(
        "keys are counted from the first that arrived",
        _PLACES,
        _pairs(lambda pairs: pairs._replace(kv_idx=_from_the_tile(pairs.kv_idx))),
        "probes",
    ),
    "document-before": Mutant(
        "scores are of the document before",
        _PLACES,
        _pairs(lambda pairs: pairs._replace(document=(pairs.document - 1).clamp(min=0))),
        "probes",
    ),
    "heads-of-the-rank": Mutant(
        "heads are counted from the rank's first: a2a's exchange is forgotten",
        _PLACES,
        _pairs(lambda pairs: pairs._replace(head=_from_the_tile(pairs.head))),
        "special",
        where="dropout-mask-on-4",
    ),
    "alibi-without-the-shift": Mutant(
        "ALiBi's diagonal starts at the first key",
        _PLACES,
        _pairs(lambda pairs: pairs._replace(shift=torch.zeros_like(pairs.shift))),
        "logic",
    ),
    "alibi-aligned-to-slots": Mutant(
        "ALiBi's diagonal ends at the last slot, not at the last token", _PLACES, wrap(_shift_of_slots), "logic"
    ),
    "slopes-of-the-next-head": Mutant(
        "every head has another's slope", _PLACES, _inputs(_slopes_of_the_next_head), "logic"
    ),
    "half-a-seed": Mutant("the seed's high half is left out", _PLACES, _inputs(_half_a_seed), "probes"),
    "another-mask-in-the-backward": Mutant(
        "the backward pass drops other pairs", _BACKWARD, wrap(_another_mask), "probes"
    ),
    "dropout-of-dv-alone": Mutant("dp is that without dropout", _BACKWARD, wrap(_no_dropout_of_dp), "logic"),
    "kept-weights-not-scaled": Mutant(
        "what is kept is not divided by 1 - p", "cp_ref.executor.tile_attention._dropout", wrap(_not_scaled), "probes"
    ),
    "score-mod-has-slope-1": Mutant(
        "score_mod's derivative is left out",
        "cp_ref.contract.scores.PairScores.pulled_back",
        lambda _: lambda self, scores, grad: grad,
        "logic",
    ),
}
