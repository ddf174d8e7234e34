"""The formula of scores, for all references and baselines of this suite."""

from __future__ import annotations

import torch

from cp_ref.spec import ScoreOptions

__all__ = ["scores_of"]


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
