"""The largest logit for a library that lacks it: a separate pass over Q and K, in addition to the library's launch.

Block by block, the products of half precisions come out in float32 from the matrix units, as they do inside the
kernels, and only their maximum is kept: memory for one block of scores. Multiplying by a positive scale and softcap
keep the order of scores, so both are applied to the maxima; a negative scale is one of -q. ALiBi and score_mod do not
keep it, so where there is one of them, all scores are computed.
"""

from __future__ import annotations

import torch

from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, Gradients, LaunchOptions, Partial
from cp_fast.kernels.attention.score_blocks import (
    ScoreBlockSize,
    fold,
    mask,
    modify,
    of_pairs,
    placed_scores,
    score_blocks,
    size_of,
)
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.calls.scores import ScoreTensors
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature

__all__ = ["LargestLogit", "largest_logit"]

_SIZE = ScoreBlockSize(scores=2**25, columns=2048, rows=4096)


class LargestLogit(Backend):
    """A kernel library that gets max_logit of every launch from a separate pass."""

    def __init__(self, library: Backend) -> None:
        """Everything but max_logit is the library's."""
        self.name: str = library.name
        self.features: frozenset[Feature] = library.features | {Feature.MAX_LOGIT}
        self.rounded_gradients, self.shared_keys_tile = library.rounded_gradients, library.shared_keys_tile
        self.key_block, self.bits_of = library.key_block, library.bits_of
        self._library = library

    def why_not(self) -> str | None:
        """None where the library works, else its reason."""
        return self._library.why_not()

    def check_score_inputs(self, scores: ScoreSpec, inputs: ScoreTensors) -> None:
        """The library's."""
        self._library.check_score_inputs(scores, inputs)

    @torch.no_grad()
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenBatch, options: LaunchOptions
    ) -> Partial:
        """See `Backend.forward`."""
        part = self._library.forward(q, k, v, segments, options)
        return part._replace(max_logit=largest_logit(q, k, segments, options))

    def backward(self, given: list[BackwardOperands], segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """See `Backend.backward`: the library's."""
        return self._library.backward(given, segments, options)


def largest_logit(
    q: torch.Tensor, k: torch.Tensor, segments: VarlenBatch, options: LaunchOptions, size: ScoreBlockSize = _SIZE
) -> torch.Tensor:
    """Float32 [h_q]: per query head, the largest scale * q.k of q [n, h_q, d] over k [m, h_kv, d] that a row sees.

    >>> from cp_ref.schedules.problem import ScoreSpec
    >>> options = LaunchOptions(ScoreSpec(scale=0.5))
    >>> q, k = torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[[3.0]], [[5.0]]])
    >>> largest_logit(q, k, VarlenBatch.pack([2], [2], None, 0), options)  # 1 * 3, 2 * 3 and 2 * 5
    tensor([5.])
    """
    scale, softcap = options.scores.scale, options.scores.softcap
    places = options.score_inputs
    places = None if places is None or not places.inputs.without_dropout().features else places
    largest = torch.full((q.shape[1],), -torch.inf, dtype=torch.float32, device=q.device)
    for block in score_blocks(segments, q, k, size):
        queries = fold(q[block.rows, block.heads_q], size_of(block.heads_kv), q.dtype, block.height, q.shape[2])
        if scale < 0:
            queries.neg_()
        here = largest[block.heads_q]
        for columns, seen in block.columns:
            s = _products(queries, k[columns, block.heads_kv].transpose(0, 1))
            if places is not None:
                _finish(s, abs(scale), softcap)
                modify(of_pairs(s, block, seen), placed_scores(places, block, columns))
            mask(s, block, seen, -torch.inf)
            torch.maximum(here, of_pairs(s, block, seen).amax((1, 2)), out=here)
    return largest if places is not None else _finish(largest, abs(scale), softcap)


def _finish(products: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """Products of q and k as scores, in place; -inf stays."""
    products.mul_(scale)
    if softcap <= 0:
        return products
    nothing = products == -torch.inf
    return products.div_(softcap).tanh_().mul_(softcap).masked_fill_(nothing, -torch.inf)


def _products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Float32 [H, g * R, C] of queries [H, g * R, d] and keys [H, C, d]."""
    if queries.is_cuda and queries.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(queries, keys.mT, out_dtype=torch.float32)
    return torch.bmm(queries.float(), keys.mT.float())
