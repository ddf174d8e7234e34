"""Bugs in scores that know where they are: tables of positions, documents, heads, slopes, masks of dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cp_fast.backends.backend_protocol import LaunchScores
from cp_ref.contract.score_inputs import ScoreInputs
from cp_ref.contract.scores import PairScores
from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]


def _launch(change: Callable[[LaunchScores], LaunchScores]) -> Callable[[Any], Any]:
    """Another launch's scores."""

    def wrong(placed_scores: Any, launch: LaunchScores | None, *rest: Any) -> PairScores | None:
        return placed_scores(None if launch is None else change(launch), *rest)

    return wrap(wrong)


def _inputs(change: Callable[[ScoreInputs], ScoreInputs]) -> Callable[[Any], Any]:
    return _launch(lambda launch: launch._replace(inputs=change(launch.inputs)))


def _placed(kind: Callable[[PairScores], PairScores]) -> Callable[[Any], Any]:
    """Pairs that compute something else."""

    def wrong(placed_scores: Any, *arguments: Any) -> PairScores | None:
        placed = placed_scores(*arguments)
        return None if placed is None else kind(placed)

    return wrap(wrong)


class _Unscaled(PairScores):
    def dropout(self, dtype: torch.dtype) -> torch.Tensor | None:
        factors = PairScores.dropout(self, dtype)
        return None if factors is None else factors * (1 - self.inputs.dropout_p)


class _SlopeOne(PairScores):
    def pulled_back(self, scores: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _from_the_first_row(span_places: Any, problem: Any, side: str, spans: Any) -> np.ndarray:
    """Rows are numbered as they lie in the launch."""
    places = span_places(problem, side, spans)
    begin = (np.cumsum(places[0]) - places[0]).astype(np.int32)
    return np.stack([places[0], places[1], begin, places[3] - places[2] + begin])


def _one_rank_too_late(span_places: Any, problem: Any, side: str, spans: Any) -> np.ndarray:
    """The keys of the next rank: positions are those of as many rows later."""
    places = span_places(problem, side, spans)
    if side == "kv" and places.size:
        places[2] += places[0].max() * (places[2] >= places[0].max())
    return places


def _first_document(span_places: Any, *arguments: Any) -> np.ndarray:
    places = span_places(*arguments)
    places[1] = places[1][:1] if places.size else places[1]
    return places


def _slopes_of_the_next_head(inputs: ScoreInputs) -> ScoreInputs:
    slopes = inputs.alibi_slopes
    return inputs if slopes is None else inputs._replace(alibi_slopes=slopes.roll(1, -1))


def _half_a_seed(inputs: ScoreInputs) -> ScoreInputs:
    seed = inputs.dropout_seed
    return inputs if seed is None else inputs._replace(dropout_seed=seed & 0xFFFFFFFF)


def _another_mask(backward: Any, self: Any, operands: Any, segments: Any, options: Any) -> Any:
    launch: LaunchScores | None = options.score_inputs
    if launch is not None and launch.inputs.dropout_seed is not None:
        inputs = launch.inputs._replace(dropout_seed=launch.inputs.dropout_seed + 1)
        options = options._replace(score_inputs=launch._replace(inputs=inputs))
    return backward(self, operands, segments, options)


_SPANS = "cp_fast.runtime.row_positions.span_places"
_PLACED = "cp_fast.backends.blockwise.placed_scores"

MUTANTS: dict[str, Mutant] = {
    "positions-of-the-launch": Mutant(
        "rows are numbered as they lie in the launch", _SPANS, wrap(_from_the_first_row), "probes"
    ),
    "positions-one-rank-too-late": Mutant(
        "keys have the positions of the next rank's", _SPANS, wrap(_one_rank_too_late), "special",
        where="dropout-mask-on-4",
    ),
    "one-document-for-all-rows": Mutant(
        "all rows are of the launch's first document", _SPANS, wrap(_first_document), "probes"
    ),
    "heads-of-the-launch": Mutant(
        "heads are counted from the launch's first", _PLACED, _launch(lambda launch: launch._replace(first_head=0)),
        "special", where="dropout-mask-on-4",
    ),
    "alibi-from-the-first-key": Mutant(
        "ALiBi's diagonal starts at the first key", _PLACED,
        _launch(lambda launch: launch._replace(
            positions=launch.positions._replace(q_diagonals=launch.positions.q_positions))),
        "logic",
    ),
    "slopes-of-another-head": Mutant(
        "every head has another's slope", _PLACED, _inputs(_slopes_of_the_next_head), "logic"
    ),
    "low-half-of-the-seed": Mutant("the seed's high half is left out", _PLACED, _inputs(_half_a_seed), "probes"),
    "other-pairs-dropped-in-the-backward": Mutant(
        "the backward pass drops other pairs", "cp_fast.backends.blockwise.BlockwiseBackend.backward",
        wrap(_another_mask), "probes",
    ),
    "kept-weights-as-they-are": Mutant(
        "what is kept is not divided by 1 - p", _PLACED, _placed(lambda placed: _Unscaled(*placed)), "probes"
    ),
    "score-mod-without-a-derivative": Mutant(
        "score_mod's derivative is left out", _PLACED, _placed(lambda placed: _SlopeOne(*placed)), "logic"
    ),
}  # fmt: skip
