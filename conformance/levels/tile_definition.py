"""One diagonal band tile by the definition: a dense float64 softmax over a mask that is written out, its gradients by
autograd.

    e = exp(score) where visible, else 0        lse = log(sum of e)        out = sum of e * v / sum of e

No largest score is taken out first: scores of normal inputs are far from the end of float64.
"""

from __future__ import annotations

import torch

from conformance.scores.score_formula import scores_of
from cp_ref.schedules.problem import ScoreOptions

__all__ = ["exact_tile", "visible"]


def visible(n: int, m: int, left: int | None, right: int | None) -> torch.Tensor:
    """Whether each of n rows sees each of m columns, bool [n, m]. Row i sees column j if i + (m - n) - left <= j and
    j <= i + (m - n) + right. A side of None is unbounded.

    >>> visible(2, 3, None, 0).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    rows = [
        [(left is None or i + (m - n) - left <= j) and (right is None or j <= i + (m - n) + right) for j in range(m)]
        for i in range(n)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(n, m)


def exact_tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    left: int | None,
    right: int | None,
    scores: ScoreOptions,
) -> dict[str, torch.Tensor]:
    """The results of one diagonal band tile (see `conformance.implementation`), float64: out, lse, dq, dk, dv.

    Args:
        q, k, v: [n, h_q, d_qk], [m, h_kv, d_qk], [m, h_kv, d_v]; query head h uses kv head h // (h_q // h_kv).
        dout: [n, h_q, d_v], the gradient of out; lse has none.
    """
    group = q.shape[1] // k.shape[1]
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        keys, values = (x.repeat_interleave(group, dim=1) for x in leaves[1:])
        s, _ = scores_of(torch.einsum("nhd,mhd->hnm", leaves[0], keys), scores)
        weights = s.exp() * visible(len(q), len(k), left, right).to(q.device)
        total = weights.sum(-1)  # [h, n]
        mean = weights / total.masked_fill(total == 0, 1.0)[..., None]
        out = torch.einsum("hnm,mhd->nhd", mean, values)
        dq, dk, dv = torch.autograd.grad(out, leaves, dout.double())
    return {"out": out.detach(), "lse": total.detach().log(), "dq": dq, "dk": dk, "dv": dv}
