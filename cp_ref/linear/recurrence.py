"""The recurrence of a fragment, token by token, and the affine map that the fragment is for the state."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["AffineMap", "Tokens", "map_of", "run"]


class AffineMap(NamedTuple):
    """`S -> matrix S + shift`: what the rows of a fragment do to a state [h_v, d_k, d_v]."""

    matrix: torch.Tensor  # [h_v, d_k, d_k]
    shift: torch.Tensor  # [h_v, d_k, d_v]

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        return self.matrix @ state + self.shift


class Tokens(NamedTuple):
    """The rows of a fragment, float32 or float64; head j of v, g and beta uses head j // (h_v // h) of q and k."""

    q: torch.Tensor  # [n, h, d_k]
    k: torch.Tensor  # [n, h, d_k]
    v: torch.Tensor  # [n, h_v, d_v]
    g: torch.Tensor  # [n, h_v], or [n, h_v, d_k] for "kda"
    beta: torch.Tensor | None  # [n, h_v]; None for "mamba2"


def run(tokens: Tokens, scale: float, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrences of `linear_attention`.

    Args:
        state: [h_v, d_k, d_v], before the first token.

    Returns:
        out [n, h_v, d_v], and the state after the last token.

    >>> ones = torch.ones(2, 1, 1)
    >>> out, state = run(Tokens(ones, ones, ones, torch.zeros(2, 1), None), 1.0, torch.zeros(1, 1, 1))
    >>> out.flatten().tolist(), state.item()
    ([1.0, 2.0], 2.0)
    """
    q, k, v, g, beta = tokens
    shared = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(shared, dim=1)[..., None] for x in (q, k))  # columns [n, h_v, d_k, 1]
    decay = g.exp().reshape(*g.shape[:2], -1, 1)  # [n, h_v, 1 or d_k, 1]
    rows: list[torch.Tensor] = []
    for i in range(len(v)):
        state = decay[i] * state
        write = v[i][:, None]  # [h_v, 1, d_v]
        if beta is not None:
            write = beta[i][:, None, None] * (write - k[i].mT @ state)
        state = state + k[i] * write
        rows.append(scale * (q[i].mT @ state)[:, 0])
    return torch.stack(rows), state


def map_of(tokens: Tokens) -> AffineMap:
    """The map of a fragment: what the recurrence makes of the unit matrix without values, and of zero with them.

    >>> ones = torch.ones(2, 1, 1)
    >>> matrix, shift = map_of(Tokens(ones, ones, ones, torch.full((2, 1), 0.5).log(), None))
    >>> matrix.item(), shift.item()                     # each token halves the state, and adds one
    (0.25, 1.5)
    """
    (heads, d_v), d_k = tokens.v.shape[1:], tokens.k.shape[-1]
    unit = torch.eye(d_k, dtype=tokens.v.dtype, device=tokens.v.device).expand(heads, d_k, d_k)
    without_values = tokens._replace(v=tokens.v.new_zeros(len(tokens.v), heads, d_k))
    return AffineMap(run(without_values, 1.0, unit)[1], run(tokens, 1.0, unit.new_zeros(heads, d_k, d_v))[1])
