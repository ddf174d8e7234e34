"""Scores that know where they are: ALiBi, score_mod and dropout. One definition for the oracle, for both packages and
for `conformance`.

The order of operations on a pair, query i and key j of one document:

    s = scale * q.k            softcap
    s = s + ALiBi              `alibi`
    s = score_mod(s, ...)      `score_mod`
    mask, softmax (sinks included)
    p = p * keep / (1 - dropout_p)      `philox`
    out = p v

i and j count from the document's first slot, h is the global query head, b the document's number in the batch. So no
score depends on the rank, the schedule or the layout.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch

from cp_ref.contract.score_inputs import ScoreInputs
from cp_ref.contract.score_mod import modified_scores

__all__ = [
    "ROUNDS",
    "PairScores",
    "Pairs",
    "alibi_bias",
    "kept",
    "philox4x32",
    "threshold",
]


def alibi_bias(
    slopes: torch.Tensor,
    document: torch.Tensor,
    head: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    shift: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The addition of ALiBi to scores: -slope * |i + shift - j|.

    Args:
        slopes: float32 [h_q], or [b, h_q] with a row for each document.
        document, head, q_idx, kv_idx: int32 or int64 tensors that broadcast against a block of scores.
        shift: len_kv - len_q of the document, in real tokens.
        dtype: of the scores.

    Returns:
        dtype, of the broadcast shape.

    >>> i, j, zero = torch.arange(2)[:, None], torch.arange(3), torch.zeros((), dtype=torch.int64)
    >>> alibi_bias(torch.tensor([0.5]), zero, zero, i, j, torch.tensor(1), torch.float32).tolist()
    [[-0.5, -0.0, -0.5], [-1.0, -0.5, -0.0]]
    """
    slope = slopes[head.long()] if slopes.dim() == 1 else slopes[document.long(), head.long()]
    return -slope.to(dtype) * (q_idx + shift - kv_idx).abs().to(dtype)


ROUNDS = 7
_LOW = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key after each round

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor], rounds: int = ROUNDS) -> Words:
    """The four random words of a counter under a key.

    Args:
        counter, key: int64 tensors that broadcast, each value of 32 bits, from 0 to 2**32 - 1.
        rounds: 7 here; 10 is the generator of most libraries.

    Returns:
        Four int64 tensors of the same kind.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox4x32((zero, zero, zero, zero), (zero, zero))]  # Random123's known answer
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        high0, low0 = _product(c0, _FACTORS[0])
        high1, low1 = _product(c2, _FACTORS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def kept(
    document: torch.Tensor,
    head: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    seed: torch.Tensor,
    dropout_p: float,
) -> torch.Tensor:
    """Which pairs dropout keeps.

    Args:
        document, head, q_idx, kv_idx: int32 or int64 tensors that broadcast against a block of scores.
        seed: int64, one element; its 64 bits are the key.
        dropout_p: the probability of dropping a pair.

    Returns:
        bool, of the broadcast shape.

    >>> zero = torch.zeros(1, dtype=torch.int32)  # keys 0 and 8 have the first two words of the example above
    >>> kept(zero, zero, zero, torch.tensor([0, 8]), torch.tensor(0), 0.3).int().tolist()
    [1, 0]
    """
    b, h, i, j = (x.long() for x in (document, head, q_idx, kv_idx))
    seed = seed.reshape(())
    counter = (j >> 4) * 8 + (j & 7), (i >> 4) * 8 + (i & 7), h, b
    first, second, third, fourth = philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW))
    high_i, high_j = (i & 8) != 0, (j & 8) != 0
    word = torch.where(high_i, torch.where(high_j, fourth, third), torch.where(high_j, second, first))
    return word >= threshold(dropout_p)


def threshold(dropout_p: float) -> int:
    """The least word that is kept.

    >>> threshold(0.25) == 2**30
    True
    """
    return round(dropout_p * 2**32)


def _product(a: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of a product. int64 wraps at 2**64, so all 64 bits are there."""
    product = a * factor
    return (product >> 32) & _LOW, product & _LOW


class Pairs(NamedTuple):
    """Where the pairs of a block of scores are: int32 tensors that broadcast against the block.

    kv_idx varies along the last axis alone, and the others do not vary there.
    """

    document: torch.Tensor  # number of the document in the batch
    head: torch.Tensor  # global query head
    q_idx: torch.Tensor  # slot of the query, from the document's first
    kv_idx: torch.Tensor  # slot of the key, from the document's first
    shift: torch.Tensor  # len_kv - len_q of the document


class PairScores(NamedTuple):
    """The inputs of a call's scores, and the pairs of one block.

    >>> i, j, zero = torch.arange(2)[:, None], torch.arange(2), torch.zeros((), dtype=torch.int32)
    >>> def squared(score, b, h, q_idx, kv_idx):
    ...     return score**2
    >>> block = PairScores(ScoreInputs(score_mod=squared), Pairs(zero, zero, i, j, zero))
    >>> block.modified(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[1.0, 4.0], [9.0, 16.0]]
    >>> block.pulled_back(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2, 2)).tolist()
    [[2.0, 4.0], [6.0, 8.0]]
    """

    inputs: ScoreInputs
    pairs: Pairs

    def modified(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores after the softcap -> scores before the mask."""
        scores = self._with_alibi(scores)
        if self.inputs.score_mod is None:
            return scores
        return modified_scores(self.inputs.score_mod, scores, self.pairs[:4], self.inputs.aux_tensors).to(scores.dtype)

    def pulled_back(self, scores: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of `modified(scores)` -> that of the scores: by autograd of score_mod, computed again. The
        caller hides masked pairs afterwards, whose derivative may be NaN.
        """
        if self.inputs.score_mod is None:
            return grad
        with torch.enable_grad(), _recording():
            leaf = scores.detach().requires_grad_()
            result = self.modified(leaf)
            if not result.requires_grad:  # it does not depend on the scores
                return torch.zeros_like(grad)
            return torch.autograd.grad(result, leaf, grad, materialize_grads=True)[0]

    def dropout(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The factors of the probabilities, 0 or 1 / (1 - dropout_p); None without dropout."""
        inputs = self.inputs
        if inputs.dropout_p == 0 or inputs.dropout_seed is None:
            return None
        return kept(*self.pairs[:4], inputs.dropout_seed, inputs.dropout_p).to(dtype) / (1 - inputs.dropout_p)

    def _with_alibi(self, scores: torch.Tensor) -> torch.Tensor:
        slopes = self.inputs.alibi_slopes
        return scores if slopes is None else scores + alibi_bias(slopes, *self.pairs, scores.dtype)


def _recording() -> AbstractContextManager[None]:
    """Autograd also inside an operator of torch.library, whose body PyTorch runs without it."""
    core = cast(Any, torch)._C
    return core._SetExcludeDispatchKeyGuard(core.DispatchKey.AutogradFunctionality, False)
