"""The chunked form of the three recurrences: matrix products inside chunks, a loop over chunks for the state.

For a chunk with states S before and S' after it, let G be the sum of g up to each row, itself included. Row i then sees

    out_i = scale * (exp(G_i) q_i)^T S + scale * sum_{j <= i} (q_i . exp(G_i - G_j) k_j) v'_j
    S'    = exp(G_last) S + sum_j exp(G_last - G_j) k_j v'_j^T

with v' = v for mamba2. For the delta rules v' = u - w S, where (I + A) u = beta v, (I + A) w = beta exp(G) k, and A is
the strictly lower triangle of beta_i k_i . exp(G_i - G_j) k_j: the WY representation of Gated DeltaNet (Yang et al.,
2024). g has one number for a head, or one for each row of S (kda).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.chunked.chunk_rows import ChunkRows, chunk_rows
from cp_fast.linear.linear_kernels import FragmentRows, LinearInputs

__all__ = ["ChunkStates", "compute_dtype", "prepare"]

_SIZES = {"gated_delta_rule": 64, "kda": 16, "mamba2": 64}  # kda has a number for each two rows and each of d_k
_LEAST = {torch.float32: -100.0, torch.float64: -800.0}  # exp of less is 0, and a sum of them stays finite


class ChunkStates(NamedTuple):
    """Chunks of fragments, all but their states: h_v is second, [chunks, h_v, size, ...]."""

    rows: ChunkRows
    q: torch.Tensor  # [chunks, h_v, size, d_k]: scale * exp(G) q
    scores: torch.Tensor  # [chunks, h_v, size, size]: row i for v' of rows j <= i
    k: torch.Tensor  # [chunks, h_v, size, d_k]: exp(G_last - G) k
    v: torch.Tensor  # [chunks, h_v, size, d_v]: u, or v
    w: torch.Tensor | None  # [chunks, h_v, size, d_k]; None for mamba2
    decay: torch.Tensor  # [chunks, h_v, d_k, 1], or one for a head [chunks, h_v, 1, 1]: exp(G_last)

    def maps(self, fragments: int) -> Maps:
        """(M, B) of all fragments."""
        d_k, d_v = self.k.shape[-1], self.v.shape[-1]
        b = self.v.new_zeros(fragments, self.k.shape[1], d_k, d_v)
        if self.w is None:
            m = self.v.new_ones(fragments, self.k.shape[1])
            for chunks, which in self.rows.waves:
                b[which] = self.decay[chunks] * b[which] + self.k[chunks].mT @ self.v[chunks]
                m[which] = self.decay[chunks, :, 0, 0] * m[which]
            return Maps(m, b)
        m = torch.eye(d_k, dtype=b.dtype, device=b.device).expand(fragments, self.k.shape[1], d_k, d_k).clone()
        for chunks, which in self.rows.waves:
            k, w, v = self.k[chunks].mT, self.w[chunks], self.v[chunks]
            b[which] = self.decay[chunks] * b[which] + k @ (v - w @ b[which])
            m[which] = self.decay[chunks] * m[which] - k @ (w @ m[which])
        return Maps(m, b)

    def run(self, initial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From initial states [f, h_v, d_k, d_v] to out [n, h_v, d_v] and the final states."""
        state, parts = initial, list[torch.Tensor]()
        for chunks, which in self.rows.waves:
            before, v = state[which], self.v[chunks]
            if self.w is not None:
                v = v - self.w[chunks] @ before
            parts.append(self.q[chunks] @ before + self.scores[chunks] @ v)
            state = state.index_copy(0, which, self.decay[chunks] * before + self.k[chunks].mT @ v)
        order = torch.cat([chunks for chunks, _ in self.rows.waves])
        out = torch.cat(parts)[torch.argsort(order)]
        return self.rows.joined(out.transpose(1, 2)), state


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def prepare(inputs: LinearInputs, fragments: FragmentRows) -> ChunkStates:
    """Everything inside chunks that needs no state. Differentiable."""
    dtype = compute_dtype(inputs.v.dtype)
    longest = max(stop - start for start, stop in pairwise(fragments.cu))
    size = min(_SIZES[inputs.kind], 1 << (longest - 1).bit_length())
    rows = chunk_rows(fragments, size)

    def cut(x: torch.Tensor) -> torch.Tensor:
        return rows.cut(x.to(dtype)).transpose(1, 2)  # [chunks, heads, size, ...]

    groups = inputs.v.shape[1] // inputs.q.shape[1]
    q, k = (cut(x).repeat_interleave(groups, dim=1) for x in (inputs.q * inputs.scale, inputs.k))
    v, g = cut(inputs.v), cut(inputs.g.to(dtype).clamp(min=_LEAST[dtype]))
    by_row = g.dim() == 4
    total = (g if by_row else g[..., None]).double().cumsum(2)  # G [chunks, h_v, size, d_k or 1]
    last = total[:, :, -1:]
    below = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    between = _exp((total[:, :, :, None] - total[:, :, None]).masked_fill(~below[..., None], -torch.inf), dtype)
    so_far, rest, decay = (_exp(x, dtype) for x in (total, last - total, last.mT))
    scores = _products(q, k, between, by_row)
    decayed = k * rest
    if inputs.beta is None:
        return ChunkStates(rows, q * so_far, scores, decayed, v, None, decay)
    beta = cut(inputs.beta)[..., None]
    a = (beta * _products(k, k, between, by_row)).tril(-1)
    both = torch.cat([beta * v, beta * k * so_far], dim=-1)
    u, w = torch.linalg.solve_triangular(a, both, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], -1)
    return ChunkStates(rows, q * so_far, scores, decayed, u, w, decay)


def _exp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp of sums of g, or of their differences. These are exact in float64 alone: strong decays add up to a thousand,
    of which float32 has the fourth digit after the point.
    """
    return x.to(dtype).exp()


def _products(x: torch.Tensor, k: torch.Tensor, between: torch.Tensor, by_row: bool) -> torch.Tensor:
    """x_i . exp(G_i - G_j) k_j for j <= i, else 0: [chunks, h_v, size, size]."""
    if by_row:
        return torch.einsum("nhid,nhijd,nhjd->nhij", x, between, k)
    return (x @ k.mT) * between[..., 0]
