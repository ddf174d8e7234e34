"""The library of linear attention in plain PyTorch: backward passes by PyTorch's derivatives of the chunked form.

The scans of Mamba are in `selective_scan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from cp_fast.kernels.linear.chunk_rows import ChunkRows, chunk_rows, compute_dtype
from cp_fast.kernels.linear.linear_kernels import (
    BackwardRun,
    ForwardRun,
    FragmentRows,
    LinearGradients,
    LinearInputs,
    Maps,
    compose_in_waves,
)
from cp_fast.kernels.linear.selective_scan import SelectiveBackward, SelectiveForward
from cp_ref.batches.tensors import recording
from cp_ref.calls.linear_calls import LinearKind
from cp_ref.schedules.words import Feature

__all__ = ["ChunkStates", "ChunkedKernels", "prepare"]

# ---- states of chunks
#
# The chunked form of the three recurrences: matrix products inside chunks, a loop over chunks for the state.
#
# For a chunk with states S before and S' after it, let G be the sum of g up to each row, itself included. Row i then
# sees
#
#     out_i = scale * (exp(G_i) q_i)^T S + scale * sum_{j <= i} (q_i . exp(G_i - G_j) k_j) v'_j
#     S'    = exp(G_last) S + sum_j exp(G_last - G_j) k_j v'_j^T
#
# with v' = v for mamba2. For the delta rules v' = u - w S, where (I + A) u = beta v, (I + A) w = beta exp(G) k, and A
# is the strictly lower triangle of beta_i k_i . exp(G_i - G_j) k_j: the WY representation of Gated DeltaNet (Yang et
# al., 2024). g has one number for a head, or one for each row of S (kda).


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


# ---- the kernel library


class ChunkedKernels:
    """See `LinearKernels`."""

    name = "torch"
    features = frozenset(
        {
            Feature.CPU,
            Feature.CUDA,
            Feature.FLOAT16,
            Feature.BFLOAT16,
            Feature.FLOAT32,
            Feature.FLOAT64,
            Feature.HEAD_DIM_OVER_128,
            Feature.HEAD_DIM_OVER_256,
            Feature.HEAD_DIM_ODD,
        }
    )

    def why_not(self) -> str | None:
        """None: PyTorch works."""
        return None

    kinds = frozenset[LinearKind](("gated_delta_rule", "kda", "mamba2", "mamba"))

    def forward(self, inputs: LinearInputs, fragments: FragmentRows) -> ForwardRun:
        return (SelectiveForward if inputs.kind == "mamba" else _Forward)(inputs, fragments)

    def backward(
        self,
        inputs: LinearInputs,
        fragments: FragmentRows,
        kept: Sequence[torch.Tensor],
        initial: torch.Tensor | None,
        dout: torch.Tensor,
    ) -> BackwardRun:
        return (SelectiveBackward if inputs.kind == "mamba" else _Backward)(inputs, fragments, initial, dout)

    compose = staticmethod(compose_in_waves)


class _Forward:
    kept: tuple[torch.Tensor, ...] = ()

    def __init__(self, inputs: LinearInputs, fragments: FragmentRows) -> None:
        self._inputs, self._fragments = inputs, fragments
        self._states = prepare(inputs, fragments)

    def maps(self, chosen: Sequence[int]) -> Maps:
        m, b = self._states.maps(len(self._fragments))
        return Maps(m[list(chosen)], b[list(chosen)])

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, states = self._states.run(_zeros(self._inputs, self._fragments) if initial is None else initial)
        return out.to(self._inputs.v.dtype), states if final else None


class _Backward:
    def __init__(
        self, inputs: LinearInputs, fragments: FragmentRows, initial: torch.Tensor | None, dout: torch.Tensor
    ) -> None:
        with torch.enable_grad(), recording():
            q, k, v, g = (x.detach().requires_grad_() for x in inputs[:4])
            beta = None if inputs.beta is None else inputs.beta.detach().requires_grad_()
            start = _zeros(inputs, fragments) if initial is None else initial.detach()
            self._initial = start.requires_grad_()
            states = prepare(inputs._replace(q=q, k=k, v=v, g=g, beta=beta), fragments)
            self._results = states.run(self._initial)
        self._given = [q, k, v, g, *([] if beta is None else [beta])]
        self._dout = dout.to(compute_dtype(dout.dtype))

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        grads = torch.zeros_like(self._initial)
        if dfinal is not None:
            grads[list(chosen)] = dfinal
        (found,) = torch.autograd.grad(self._results, [self._initial], [self._dout, grads], retain_graph=True)
        return found[list(chosen)]

    def meanwhile(self) -> None:
        pass

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        grads = torch.zeros_like(self._initial) if dfinal is None else dfinal
        dinitial, dq, dk, dv, dg, *rest = torch.autograd.grad(
            self._results, [self._initial, *self._given], [self._dout, grads], materialize_grads=True
        )
        return LinearGradients(dq, dk, dv, dg, rest[0] if rest else None, dinitial)


def _zeros(inputs: LinearInputs, fragments: FragmentRows) -> torch.Tensor:
    """Initial states."""
    d_k, (_, h_v, d_v) = inputs.q.shape[-1], inputs.v.shape
    return inputs.v.new_zeros(len(fragments), h_v, d_k, d_v, dtype=compute_dtype(inputs.v.dtype))
