"""Scores that depend on places, for all references and baselines of this suite, written without those of `cp_ref`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from conformance.case import BY_DOCUMENT, Case, aux_tensors, score_mod_of
from cp_ref.schedules.problem import Problem, ScoreSpec

__all__ = [
    "PLAIN",
    "CaseScores",
    "PairPlaces",
    "alibi_slopes",
    "depends_on_number",
    "dropout_seed",
    "kept_pairs",
    "philox",
    "score_arguments",
    "scores_of",
]

# ---- dropout
#
# Which pairs dropout keeps, by the documented hash, in numpy and from its documentation alone (docs/how_to/scores.md).
#
# Philox-4x32 with 7 rounds (Salmon et al. 2011). `cp_ref.calls.scores` has another implementation, in PyTorch: the
# probes hold every result against this one.


Words = NDArray[np.uint64]
_Positions = NDArray[np.integer[Any]]
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter: tuple[Words, Words, Words, Words], key: int) -> tuple[Words, Words, Words, Words]:
    """Four words of 32 bits for each counter, under a key of 64 bits: Philox4x32 with 7 rounds.

    >>> zero = np.zeros((), dtype=np.uint64)
    >>> [f"{int(word):08x}" for word in philox((zero, zero, zero, zero), 0)]
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    x0, x1, x2, x3 = counter
    for n in range(7):
        low = np.uint64(((key & 0xFFFFFFFF) + n * 0x9E3779B9) & 0xFFFFFFFF)
        high = np.uint64(((key >> 32 & 0xFFFFFFFF) + n * 0xBB67AE85) & 0xFFFFFFFF)
        first, second = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1, x2, x3 = (second >> _32) ^ x1 ^ low, second & _MASK, (first >> _32) ^ x3 ^ high, first & _MASK
    return x0, x1, x2, x3


def kept_pairs(
    sequence: int, head: int, q_idx: _Positions, kv_idx: _Positions, seed: int, dropout_p: float
) -> NDArray[np.bool_]:
    """Whether each pair is kept: bool [n, m].

    Args:
        q_idx: [n] positions of queries inside the sequence; kv_idx: [m] those of keys. Integers.
        seed: of 64 bits, signed or not.
    """
    i, j = np.asarray(q_idx, np.uint64)[:, None], np.asarray(kv_idx, np.uint64)[None]
    block, inside, half = np.uint64(16), np.uint64(8), np.uint64(2)
    counter = (j // block * inside + j % inside, i // block * inside + i % inside)
    shape = np.broadcast_shapes(i.shape, j.shape)
    fixed = (np.full(shape, head, np.uint64), np.full(shape, sequence, np.uint64))
    words = np.stack(philox((*(np.broadcast_to(x, shape) for x in counter), *fixed), seed))  # pyright: ignore[reportArgumentType]
    word = half * (i // inside % half) + j // inside % half
    chosen = np.take_along_axis(words, np.broadcast_to(word, shape)[None].astype(np.int64), axis=0)[0]
    return chosen >= round(dropout_p * 2**32)


# ---- arguments of a call
#
# A call's arguments for scores, from the case alone: slopes, captured tensors and the seed of dropout.


def score_arguments(case: Case, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Arguments of `attention` in addition to its plan: those that the case needs, no others."""
    p = case.problem
    found = {
        "alibi_slopes": alibi_slopes(case, device),
        "aux_tensors": aux_tensors(p, device),
        "dropout_seed": _given_seed(case, device) if p.dropout_p else None,
    }
    return {name: x for name, x in found.items() if x is not None}


def depends_on_number(case: Case) -> bool:
    """Whether scores depend on the numbers of the sequences."""
    return case.alibi == "document" or case.problem.dropout_p > 0 or case.problem.score_mod in BY_DOCUMENT


def alibi_slopes(case: Case, device: str | torch.device = "cpu") -> torch.Tensor | None:
    """float32 [h_q], or [b, h_q]; None without ALiBi.

    >>> from cp_ref.schedules.problem import Problem, Sequence
    >>> alibi_slopes(Case(Problem(1, (Sequence(3, 3, 3, 3),), heads_q=3), alibi="head"))
    tensor([0.5000, 0.2500, 0.1250])
    """
    if not case.alibi:
        return None
    p = case.problem
    slopes = 0.5 ** (torch.arange(p.heads_q) % 6 + 1).float()
    if case.alibi == "document":
        slopes = slopes * (1.0 + torch.arange(len(p.sequences)) % 4)[:, None]
    return slopes.to(device)


def dropout_seed(case: Case) -> int:
    """64 bits, signed, of which both halves differ from case to case."""
    seed = (case.seed + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
    return seed - 2**64 if seed >= 2**63 else seed


def _given_seed(case: Case, device: str | torch.device) -> int | torch.Tensor:
    """A tensor in every second case."""
    seed = dropout_seed(case)
    return torch.tensor([seed], dtype=torch.int64, device=device) if case.seed % 2 else seed


# ---- the formula of scores
#
# The formula of scores, for all references and baselines of this suite.


_NONE: Mapping[str, torch.Tensor] = {}


class PairPlaces(NamedTuple):
    """Where pairs are: int64 tensors that broadcast to [queries, keys]."""

    sequence: torch.Tensor
    q_idx: torch.Tensor
    kv_idx: torch.Tensor
    shift: torch.Tensor  # len_kv - len_q of the sequence


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

    def modified(self, scores: torch.Tensor, places: PairPlaces) -> torch.Tensor:
        """ALiBi and score_mod of scores [h, n, m], in their dtype; differentiable."""
        b, i, j, shift = (x.to(torch.int32) for x in places)
        h = torch.arange(len(scores), dtype=torch.int32, device=scores.device)[:, None, None]
        dtype = scores.dtype
        if self.slopes is not None:
            slope = self.slopes[h.long()] if self.slopes.dim() == 1 else self.slopes[b.long(), h.long()]
            scores = scores - slope.to(dtype) * (i + shift - j).abs().to(dtype)
        function = None if self.problem is None else score_mod_of(self.problem)
        return scores if function is None else function(scores, b, h, i, j, **self.aux).to(dtype)

    def with_slope(self, scores: torch.Tensor, places: PairPlaces) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The modified scores, and the slope of each."""
        if self.problem is None or not self.problem.score_mod:
            return self.modified(scores, places), 1.0
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            modified = self.modified(leaf, places)
            (slope,) = torch.autograd.grad(modified.sum(), leaf)
        return modified.detach(), slope

    def dropout(self, heads: int, places: PairPlaces, dtype: torch.dtype) -> torch.Tensor | float:
        """The factors of the probabilities [h, n, m]: 0, or 1 / (1 - dropout_p)."""
        if self.problem is None or not self.problem.dropout_p:
            return 1.0
        sequences, rows, columns = (x.cpu().numpy() for x in places[:3])
        kept = np.zeros((heads, len(rows), len(columns)), dtype=bool)
        of_row = np.broadcast_to(sequences[:, 0], len(rows))
        for n in np.unique(of_row):
            of_sequence = of_row == n
            for head in range(heads):
                pairs = kept_pairs(int(n), head, rows[of_sequence, 0], columns, self.seed, self.problem.dropout_p)
                kept[head, of_sequence] = pairs
        return torch.from_numpy(kept).to(places.sequence.device, dtype) / (1 - self.problem.dropout_p)


PLAIN = CaseScores()


def scores_of(products: torch.Tensor, options: ScoreSpec) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The scores of products q.k, in their dtype, and the slope of each: of the score in scale * q.k.

    >>> scores_of(torch.tensor([4.0]), ScoreSpec(0.5))
    (tensor([2.]), 1.0)
    """
    scores = products * options.scale
    if options.softcap <= 0:
        return scores, 1.0
    bent = torch.tanh(scores / options.softcap)
    return options.softcap * bent, 1.0 - bent * bent
