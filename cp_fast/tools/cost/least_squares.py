"""Prices from what was measured: least squares of relative errors, none below 0. numpy alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["LIKELY", "least_squares"]

LIKELY = 0.1  # the weight of what a number was before, against one measurement's relative error


def least_squares(
    columns: Sequence[Sequence[float]], measured: Sequence[float], near: Sequence[float] = ()
) -> list[float]:
    """Factors from 0 of the columns, whose sum is what was measured, or as near to it as can be.

    Args:
        columns: of each measurement what its factors count, [measurements, factors].
        measured: above 0, [measurements].
        near: what the factors are likely to be, above 0, [factors]; each counts as `LIKELY` of a measurement.

    >>> [round(x, 6) for x in least_squares([[1, 2], [1, 4], [1, 6]], [3, 5, 7])]
    [1.0, 1.0]
    """
    likely = LIKELY * np.diag(1 / np.array(near)) if len(near) else np.zeros((0, len(columns[0])))
    a = np.concatenate([np.array(columns, dtype=float) / np.array(measured)[:, None], likely])
    b = np.append(np.ones(len(measured)), np.full(len(likely), LIKELY))
    kept, factors = list(range(a.shape[1])), np.zeros(a.shape[1])
    while kept:
        factors[:] = 0
        factors[kept] = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
        if (factors >= 0).all():
            break
        kept.remove(int(np.argmin(factors)))
    return factors.tolist()
