"""The options of scores, as one record from a call to the kernels."""

from __future__ import annotations

from typing import NamedTuple

from cp_ref.spec.arguments.feature_sets import Feature

__all__ = ["ScoreOptions"]


class ScoreOptions(NamedTuple):
    """How a score is made of a query and a key: s = scale * q.k, then softcap * tanh(s / softcap) if softcap > 0.
    `cp_ref.common.scores` has what follows: ALiBi, score_mod, dropout.

    >>> ScoreOptions(0.5, softcap=30.0).features
    frozenset({<Feature.SOFTCAP: 'softcap'>})
    """

    scale: float
    softcap: float = 0.0  # 0 for none
    score_mod: str = ""  # the digest of a function; "" for none
    dropout_p: float = 0.0  # 0 for none

    @property
    def features(self) -> frozenset[Feature]:
        """The features that they require."""
        asked = {
            Feature.SOFTCAP: self.softcap > 0,
            Feature.SCORE_MOD: self.score_mod != "",
            Feature.DROPOUT: self.dropout_p > 0,
        }
        return frozenset(feature for feature, wanted in asked.items() if wanted)
