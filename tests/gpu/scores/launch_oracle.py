"""A launch by its definition: dense matrices, segment by segment, in any dtype, with PyTorch's autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_fast.kernels.attention.backend_protocol import LaunchOptions
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.calls.scores import PairScores, ScorePlaces

__all__ = ["LaunchResults", "Operands", "dense", "visible"]


class Operands(NamedTuple):
    """The inputs of a launch, and the gradients of its results."""

    q: torch.Tensor  # [n, h_q, d_qk]
    k: torch.Tensor  # [m, h_kv, d_qk]
    v: torch.Tensor  # [m, h_kv, d_v]
    dout: torch.Tensor  # [n, h_q, d_v]
    dlse: torch.Tensor  # [h_q, n]

    def to(self, dtype: torch.dtype) -> Operands:
        """All in another dtype."""
        return Operands(*(x.to(dtype) for x in self))


class LaunchResults(NamedTuple):
    """The results of both passes."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def visible(batch: VarlenBatch, s: int, device: torch.device) -> torch.Tensor:
    """Which keys of segment s each of its queries sees: bool [rows, columns]."""
    n, m = (cu[s + 1] - cu[s] for cu in (batch.cu_q, batch.cu_kv))
    distance = torch.arange(m, device=device) - torch.arange(n, device=device)[:, None] - (m - n)
    seen = torch.ones(n, m, dtype=torch.bool, device=device)
    if batch.left is not None:
        seen &= distance >= -batch.left
    if batch.right is not None:
        seen &= distance <= batch.right
    return seen


def dense(operands: Operands, batch: VarlenBatch, options: LaunchOptions) -> LaunchResults:
    """Both passes."""
    assert options.score_inputs is not None
    q, k, v = (x.detach().requires_grad_() for x in operands[:3])
    outs, lses = [], []
    for s in range(len(batch.cu_q) - 1):
        rows, columns = (slice(cu[s], cu[s + 1]) for cu in (batch.cu_q, batch.cu_kv))
        out, lse = _segment(q[rows], k[columns], v[columns], s, rows, columns, batch, options)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    grads = torch.autograd.grad([out, lse], [q, k, v], [operands.dout, operands.dlse.to(lse.dtype)])
    return LaunchResults(out.detach(), lse.detach(), *grads)


def _segment(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: int,
    rows: slice,
    columns: slice,
    batch: VarlenBatch,
    options: LaunchOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    given, scores = options.score_inputs, options.scores
    assert given is not None
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    raw = scores.scale * torch.einsum("ihd,jhd->hij", q, k)
    if scores.softcap > 0:
        raw = scores.softcap * torch.tanh(raw / scores.softcap)
    positions = given.positions
    heads = torch.arange(q.shape[1], device=q.device, dtype=torch.int32) + given.first_head
    i = positions.q_positions[rows]
    pairs = ScorePlaces(
        positions.q_sequences[rows][None, :, None],
        heads[:, None, None],
        i[None, :, None],
        positions.k_positions[columns][None, None],
        (positions.q_diagonals[rows] - i)[None, :, None],
    )
    places = PairScores(given.inputs, pairs)
    hidden = ~visible(batch, s, q.device)
    raw.register_hook(lambda grad: grad.masked_fill(hidden, 0.0))  # The derivative may be NaN there.
    modified = places.modified(raw).masked_fill(hidden, float("-inf"))
    lse = modified.logsumexp(-1)
    probabilities = (modified - lse[..., None]).exp().masked_fill(hidden, 0.0)
    kept = places.dropout(probabilities.dtype)
    if kept is not None:
        probabilities = probabilities * kept
    return torch.einsum("hij,jhd->ihd", probabilities, v), lse
