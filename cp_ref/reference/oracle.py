"""Attention by its definition: the oracle for everything else.

Global tensors, one sequence at a time (all at once where there are areas), the whole score matrix, float64. It knows no
rank, no schedule and no tile, so none of their mistakes can hide in it; gradients come from autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Unpack

import torch

from cp_ref.batches.tensors import lse_from_packed, to_format, to_packed
from cp_ref.calls.score_mod import with_digest
from cp_ref.calls.scores import PairScores, ScorePlaces, ScoreTensors, read_scores
from cp_ref.problems.arguments import CallArguments, problem_arguments, takes
from cp_ref.problems.call_checks import one_a_head
from cp_ref.problems.read_problem import check_offset, read_problem, read_sizes
from cp_ref.schedules.areas import WindowRow
from cp_ref.schedules.problem import Problem, Sequence

__all__ = ["attend", "dense_attention", "inside_areas", "visible_in"]


@takes(CallArguments)
def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Unpack[CallArguments]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute attention of whole (global) tensors, in float64.

    Args:
        q: bshd [b, s_q, h_q, d_qk], sbhd [s_q, b, h_q, d_qk], thd [t_q, h_q, d_qk]; any float dtype.
        k: the same with s_kv (t_kv) and h_kv; v: the same as k with d_v.
        The others: as in `cp_ref.attention`. `softmax_offset` is [h_q] or [1, h_q, 1, 1]. A thd tensor may be
        longer than its padded lengths.

    Returns:
        out: float64, q's format with d_v.
        lse: float64, [b, h_q, s_q] for bshd and sbhd, [h_q, t_q] for thd. Natural logarithm, sinks included.
        max_logit: float64 [h_q], the largest visible score of each head, -inf where nothing is visible. Not
            differentiable.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule.

    >>> q = torch.tensor([[[[1.0]], [[0.0]]]])                      # b 1, s 2, h 1, d 1
    >>> v = torch.tensor([[[[1.0]], [[3.0]]]])
    >>> out, lse, max_logit = dense_attention(q, q, v, softmax_scale=1.0)
    >>> # query 1 has scores 0 and 0: the mean of 1 and 3
    >>> out.flatten().tolist(), [round(x, 3) for x in lse.flatten().tolist()]
    ([1.0, 2.0], [1.0, 0.693])
    """
    of_call: dict[str, Any] = {**arguments}
    softmax_offset, scores = one_a_head(of_call.pop("softmax_offset", None)), ScoreTensors.given(of_call)
    given = problem_arguments(of_call, "dense_attention")
    place, qkv_format = {"cp_size": 1, "cp_comm_type": "p2p", "layout": "contiguous"}, given["qkv_format"]
    words = with_digest(given)
    problem = read_problem(**place, **words, sizes=read_sizes(q, k, v, qkv_format, 1))
    check_offset(problem, softmax_offset, q)
    inputs = read_scores(problem, given["score_mod"], q, scores)
    batch_size = len(problem.sequences)
    q, k, v = (to_packed(x, qkv_format).double() for x in (q, k, v))
    for name, tokens, slots in (("q", q.shape[0], problem.starts_q[-1]), ("k", k.shape[0], problem.starts_kv[-1])):
        if tokens < slots:
            raise ValueError(f"{name} has {tokens} tokens, fewer than the {slots} of its padded cumulative lengths")
    out = q.new_zeros(q.shape[0], problem.heads_q, problem.d_v)
    lse = q.new_full((q.shape[0], problem.heads_q), float("-inf"))
    max_logit = q.new_full((problem.heads_q,), float("-inf"))
    for rows, columns, visible in _masks(problem, q.device):
        extra = PairScores(inputs, _pairs(problem, rows, columns)) if inputs.features else None
        block = q[rows], k[columns], v[columns]
        out[rows], lse[rows], largest = attend(problem, visible, *block, softmax_offset, extra)
        max_logit = torch.maximum(max_logit, largest)
    return to_format(out, qkv_format, batch_size), lse_from_packed(lse, qkv_format, batch_size), max_logit


def _masks(problem: Problem, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Query rows int64 [n] and key rows int64 [m] of the packed tensors, and whether each pair is visible, bool [n, m].
    One sequence at a time; with areas, which may reach across sequences, all real tokens at once.
    """
    lengths = zip(problem.sequences, problem.starts_q, problem.starts_kv, strict=False)
    tokens = [
        (torch.arange(q, q + s.len_q, device=device), torch.arange(k, k + s.len_kv, device=device), s)
        for s, q, k in lengths
    ]
    if problem.areas is None:
        yield from ((rows, columns, visible_in(problem, s, device)) for rows, columns, s in tokens)
    elif tokens:
        rows, columns = (torch.cat(side) for side in list(zip(*tokens, strict=True))[:2])
        yield rows, columns, inside_areas(problem.areas, rows[:, None], columns[None, :])


def _pairs(problem: Problem, rows: torch.Tensor, columns: torch.Tensor) -> ScorePlaces:
    """The places of scores [n, h, m], for query rows [n] and key rows [m] of the packed tensors. Pairs of two sequences
    have no place, and are hidden.
    """
    sequence, slot = _slots(problem.starts_q, rows)
    lengths = torch.tensor([(s.len_q, s.len_kv) for s in problem.sequences], device=rows.device)
    places = {
        "sequence": sequence[:, None, None],
        "head": torch.arange(problem.heads_q, device=rows.device)[None, :, None],
        "q_idx": slot[:, None, None],
        "kv_idx": _slots(problem.starts_kv, columns)[1][None, None, :],
        "shift": (lengths[sequence, 1] - lengths[sequence, 0])[:, None, None],
    }
    return ScorePlaces(**{name: x.to(torch.int32) for name, x in places.items()})


def _slots(starts: tuple[int, ...], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each row [n], the last one that starts at or before it, and the row's slot in it."""
    first = torch.tensor(starts[:-1], device=rows.device)
    sequence = (first <= rows[:, None]).sum(dim=1) - 1
    return sequence, rows - first[sequence]


def inside_areas(areas: Iterable[WindowRow], i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Which pairs of rows i [n, 1] and j [1, m] are in an area, bool [n, m]: the definition, and on purpose not the
    arithmetic of `cp_ref.schedules`.
    """
    visible = torch.zeros(i.shape[0], j.shape[1], dtype=torch.bool, device=i.device)
    for q_start, q_stop, k_start, k_stop, left, right in areas:
        inside = (q_start <= i) & (i < q_stop) & (k_start <= j) & (j < k_stop)
        aligned = i + (k_stop - q_stop)
        if left >= 0:
            inside &= j >= aligned - left
        if right >= 0:
            inside &= j <= aligned + right
        visible |= inside
    return visible


def visible_in(problem: Problem, sequence: Sequence, device: torch.device) -> torch.Tensor:
    """The mask, bool [len_q, len_kv]: the definition itself, and on purpose not the arithmetic of
    `cp_ref.schedules.problem`.
    """
    i = torch.arange(sequence.len_q, device=device)[:, None]
    j = torch.arange(sequence.len_kv, device=device)[None, :]
    if problem.bottom_right:
        i = i + (sequence.len_kv - sequence.len_q)
    left, right = problem.window_size
    visible = torch.ones(sequence.len_q, sequence.len_kv, dtype=torch.bool, device=device)
    if problem.causal:
        visible &= j <= i
    elif right >= 0:
        visible &= j <= i + right
    if left >= 0:
        visible &= j >= i - left
    return visible


def attend(
    problem: Problem,
    visible: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_offset: torch.Tensor | None,
    extra: PairScores | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """visible bool [n, m] or [n, h_q, m], q [n, h_q, d_qk], k [m, h_kv, d_qk], v [m, h_kv, d_v], extra: ALiBi,
    score_mod and dropout -> out [n, h_q, d_v], lse [n, h_q], max_logit [h_q].
    """
    k, v = (x.repeat_interleave(problem.heads_per_kv, dim=1) for x in (k, v))  # h uses kv head h // heads_per_kv
    scores = problem.scale * torch.einsum("nhd,mhd->nhm", q, k)
    if problem.softcap > 0:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    hidden = ~(visible if visible.dim() == 3 else visible[:, None, :])
    if extra is not None:  # of hidden pairs score_mod sees 0, and gives no gradient, whatever its derivative
        scores = extra.modified(scores.masked_fill(hidden, 0.0))
    masked = scores.detach().masked_fill(hidden, float("-inf"))
    columns = [masked, masked.new_full((*masked.shape[:2], 1), float("-inf"))]  # A row may have no key at all.
    sink = None
    if problem.softmax_type != "vanilla":
        sink = q.new_zeros(problem.heads_q) if softmax_offset is None else softmax_offset.double()
        columns.append(sink.detach()[None, :, None].expand(q.shape[0], -1, 1))
    shift = torch.cat(columns, dim=-1).amax(dim=-1)
    shift = shift.masked_fill(shift == float("-inf"), 0.0)  # Any finite number will do for a row that sees nothing.
    weights = torch.exp(scores.masked_fill(hidden, 0.0) - shift[..., None]).masked_fill(hidden, 0.0)
    denominator = weights.sum(dim=-1)
    if sink is not None:
        denominator = denominator + torch.exp(sink - shift)
    empty = denominator == 0
    denominator = denominator.masked_fill(empty, 1.0)
    probabilities = weights / denominator[..., None]
    if extra is not None and (factors := extra.dropout(probabilities.dtype)) is not None:
        probabilities = probabilities * factors
    out = torch.einsum("nhm,mhd->nhd", probabilities, v)
    out = out.masked_fill((weights == 0).all(dim=-1)[..., None], 0.0)  # its gradient may be NaN, and reaches nothing
    lse = (shift + torch.log(denominator)).masked_fill(empty, float("-inf"))
    largest = (
        torch.cat([*columns[:2]], dim=-1).amax(dim=(0, 2))
        if len(q)
        else columns[1].new_full((problem.heads_q,), float("-inf"))
    )
    return out, lse, largest
