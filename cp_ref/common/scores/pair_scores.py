"""A block of scores with the places of its pairs: what ALiBi, score_mod and dropout do to it, and the derivative."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch

from cp_ref.common.scores.alibi import alibi_bias
from cp_ref.common.scores.philox import kept
from cp_ref.common.scores.score_inputs import ScoreInputs
from cp_ref.common.scores.score_mod import modified_scores

__all__ = ["PairScores", "Pairs"]


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
