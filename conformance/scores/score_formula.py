"""The formula of scores, for all references and baselines of this suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from conformance.case import Case
from conformance.scores.dropout_hash import kept_pairs
from conformance.scores.score_arguments import alibi_slopes, dropout_seed
from conformance.scores.score_mods import aux_tensors, score_mod_of
from cp_ref.schedules.problem import Problem, ScoreOptions

__all__ = ["PLAIN", "CaseScores", "Places", "scores_of"]

_NONE: Mapping[str, torch.Tensor] = {}


class Places(NamedTuple):
    """Where pairs are: int64 tensors that broadcast to [queries, keys]."""

    document: torch.Tensor
    q_idx: torch.Tensor
    kv_idx: torch.Tensor
    shift: torch.Tensor  # len_kv - len_q of the document


class CaseScores(NamedTuple):
    """A case's inputs of scores, in addition to q and k."""

    problem: Problem | None = None
    slopes: torch.Tensor | None = None
    aux: Mapping[str, torch.Tensor] = _NONE
    seed: int = 0

    @staticmethod
    def of(case: Case, device: torch.device | str) -> CaseScores:
        """Those of a case."""
        p = case.problem
        return CaseScores(p, alibi_slopes(case, device), aux_tensors(p, device) or _NONE, dropout_seed(case))

    def modified(self, scores: torch.Tensor, places: Places) -> torch.Tensor:
        """ALiBi and score_mod of scores [h, n, m], in their dtype; differentiable."""
        b, i, j, shift = (x.to(torch.int32) for x in places)
        h = torch.arange(len(scores), dtype=torch.int32, device=scores.device)[:, None, None]
        dtype = scores.dtype
        if self.slopes is not None:
            slope = self.slopes[h.long()] if self.slopes.dim() == 1 else self.slopes[b.long(), h.long()]
            scores = scores - slope.to(dtype) * (i + shift - j).abs().to(dtype)
        function = None if self.problem is None else score_mod_of(self.problem)
        return scores if function is None else function(scores, b, h, i, j, **self.aux).to(dtype)

    def with_slope(self, scores: torch.Tensor, places: Places) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The modified scores, and the slope of each."""
        if self.problem is None or not self.problem.score_mod:
            return self.modified(scores, places), 1.0
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            modified = self.modified(leaf, places)
            (slope,) = torch.autograd.grad(modified.sum(), leaf)
        return modified.detach(), slope

    def dropout(self, heads: int, places: Places, dtype: torch.dtype) -> torch.Tensor | float:
        """The factors of the probabilities [h, n, m]: 0, or 1 / (1 - dropout_p)."""
        if self.problem is None or not self.problem.dropout_p:
            return 1.0
        documents, rows, columns = (x.cpu().numpy() for x in places[:3])
        kept = np.zeros((heads, len(rows), len(columns)), dtype=bool)
        of_row = np.broadcast_to(documents[:, 0], len(rows))
        for n in np.unique(of_row):
            of_document = of_row == n
            for head in range(heads):
                pairs = kept_pairs(int(n), head, rows[of_document, 0], columns, self.seed, self.problem.dropout_p)
                kept[head, of_document] = pairs
        return torch.from_numpy(kept).to(places.document.device, dtype) / (1 - self.problem.dropout_p)


PLAIN = CaseScores()


def scores_of(products: torch.Tensor, options: ScoreOptions) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The scores of products q.k, in their dtype, and the slope of each: of the score in scale * q.k.

    >>> scores_of(torch.tensor([4.0]), ScoreOptions(0.5))
    (tensor([2.]), 1.0)
    """
    scores = products * options.scale
    if options.softcap <= 0:
        return scores, 1.0
    bent = torch.tanh(scores / options.softcap)
    return options.softcap * bent, 1.0 - bent * bent
