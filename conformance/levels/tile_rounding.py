"""How far rounding may carry the results of one tile from the exact ones, value by value, from the sizes of what is
added up.

A sum of n terms of independent signs, such as a product over head dims, has the error eps * sqrt(n * sum of squares).
A sum of terms that share a sign, such as the denominator, has the error eps * sqrt(n) times its size. A function of a
value inherits the value's error in proportion. The worst total is one unit; a kernel may have `UNITS` of it.

Where a gradient is a small difference of large numbers, its own size says nothing of its error: with one visible key
dq is 0, and is computed as p * (dout . v - dout . out) * k.
"""

from __future__ import annotations

import torch

from conformance.levels.tile_definition import visible
from cp_ref.schedules.problem import ScoreOptions

__all__ = ["UNITS", "rounding"]

# Needed by both packages in 1,600 drawn tiles: 0.4 in float32, and 0.6 in float64, where the exact results are rounded
# too. The rest is for fast exponentials, and sums in other orders.
UNITS = 2.0


def rounding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    left: int | None,
    right: int | None,
    scores: ScoreOptions,
) -> dict[str, torch.Tensor]:
    """One unit of rounding, in the dtype of q, of each value of `exact_tile`, which has the same arguments: float64.

    A name that ends in _e is the unit of the value named before it. Scores and weights are [h_q, n, m].
    """
    eps, tiny = torch.finfo(q.dtype).eps, torch.finfo(q.dtype).tiny
    n, m, heads_kv, group = len(q), len(k), k.shape[1], q.shape[1] // k.shape[1]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))

    def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The product a . b of each row of a and each row of b, [h, n, m], and its unit."""
        exact, squares = (torch.einsum("nhd,mhd->hnm", x, y) for x, y in ((a, b), (a.square(), b.square())))
        return exact, eps * (exact.abs() + (a.shape[2] * squares).sqrt())

    scale, softcap = scores.scale, scores.softcap
    s, s_e = (scale * x for x in product(q, keys))
    slope, slope_e = 1.0, 0.0
    if softcap > 0:
        t = torch.tanh(s / softcap)
        slope = 1 - t.square()
        t_e = slope * s_e / softcap + eps * t.abs()
        slope_e = 2 * t.abs() * t_e + eps
        s, s_e = softcap * t, softcap * t_e
    seen = visible(n, m, left, right).to(q.device)
    total = (s.exp() * seen).sum(-1, keepdim=True)
    lse = total.masked_fill(total == 0, 1.0).log()
    p = (s - lse).exp() * seen
    lse_e = (p * s_e).sum(-1, keepdim=True) + eps * (lse.abs() + m**0.5)
    p_e = p * (s_e + lse_e + eps * (s.abs() + 1)) + tiny * seen

    dp, dp_e = product(dout, values)
    delta = (p * dp).sum(-1, keepdim=True)
    delta_e = (p_e * dp.abs() + p * dp_e).sum(-1, keepdim=True)
    rise, rise_e = p * (dp - delta), p_e * (dp - delta).abs() + p * (dp_e + delta_e)
    ds, ds_e = scale * rise * slope, scale * (rise_e * slope + rise.abs() * (slope_e + eps))

    def of_rows(w: torch.Tensor, w_e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The unit of w @ x, [n, h_q, d]."""
        return torch.einsum("hnm,mhd->nhd", w_e + eps * m**0.5 * w.abs(), x.abs())

    def of_columns(w: torch.Tensor, w_e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The unit of w^T @ x, [m, h_kv, d]."""
        unit = torch.einsum("hnm,nhd->mhd", w_e + eps * (n * group) ** 0.5 * w.abs(), x.abs())
        return unit.unflatten(1, (heads_kv, group)).sum(2)

    units = {"out": of_rows(p, p_e, values), "lse": lse_e[..., 0], "dq": of_rows(ds, ds_e, keys)}
    return units | {"dk": of_columns(ds, ds_e, q), "dv": of_columns(p, p_e, dout)}
