"""The recurrence of a fragment, token by token, and the affine map that the fragment is for the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, pairwise
from typing import NamedTuple

import torch

from cp_ref.batches.tensors import to_format, to_packed
from cp_ref.calls.linear_calls import ACTIVATIONS, LINEAR_KINDS
from cp_ref.groups.group import Group, Parcel
from cp_ref.groups.process_groups import error_context
from cp_ref.schedules.schedule import Message, RankSchedule, Scans
from cp_ref.schedules.values import check_choice, read_lengths
from cp_ref.schedules.words import QKV_FORMATS

__all__ = [
    "AffineMap",
    "Span",
    "Tokens",
    "by_column",
    "dense_causal_conv1d",
    "dense_linear_attention",
    "map_of",
    "play_states",
    "run",
]


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
    beta: torch.Tensor | None  # [n, h_v]; None for "mamba2" and "mamba"


def by_column(tokens: Tokens, rates: torch.Tensor) -> Tokens:
    """Mamba's tokens, g [n, h_v, d_v], as tokens of h_v * d_v heads: each column of a state decays by itself, and is a
    head of its own, with values of one number and a decay for each row.

    Args:
        rates: A, [h_v, d_k, d_v].

    >>> ones = torch.ones(1, 1, 2)
    >>> made = by_column(Tokens(ones, ones, ones, ones, None), torch.tensor([[[-1.0, -2.0], [-3.0, -4.0]]]))
    >>> made.v.shape, made.g.tolist()
    (torch.Size([1, 2, 1]), [[[-1.0, -3.0], [-2.0, -4.0]]])
    """
    decays = rates.mT * tokens.g[..., None]  # [n, h_v, d_v, d_k]
    return tokens._replace(v=tokens.v.flatten(1)[..., None], g=decays.flatten(1, 2))


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


Span = tuple[int, int]  # global rows [start, stop) of a fragment


def play_states(
    direction: str,
    steps: RankSchedule,
    group: Group,
    own: Mapping[Span, Callable[[], AffineMap]],
    begin: torch.Tensor,
) -> dict[Span, torch.Tensor]:
    """The state that enters each of the rank's fragments (in the backward pass: the gradient of the state that leaves
    it).

    Args:
        direction: "forward" or "backward", for errors.
        own: computes the map of each of the rank's fragments. Only maps that somebody needs are computed.
        begin: the state that enters the first fragment of each document in the order of the scans [b, h_v, d_k, d_v].
    """
    heads, d_k, d_v = begin.shape[1:]
    maps: dict[Span, AffineMap] = {}
    entering: dict[Span, torch.Tensor] = {}

    def known(span: Span) -> AffineMap:
        if span not in maps:
            maps[span] = own[span]()
        return maps[span]

    def room(message: Message) -> AffineMap:
        n = len(message.pieces)
        return AffineMap(begin.new_empty(n, heads, d_k, d_k), begin.new_empty(n, heads, d_k, d_v))

    for number, step in enumerate(steps):
        where = f"states, {direction}, step {number} of {len(steps)}"
        sends: list[Parcel] = []
        for message in step.sends:
            matrices, shifts = zip(*(known(span) for span in _spans(message)), strict=True)
            sends += _parcels(message, AffineMap(torch.stack(matrices), torch.stack(shifts)))
        arriving = [(message, room(message)) for message in step.recvs]
        with error_context(where):
            pending = group.exchange(sends, [parcel for pair in arriving for parcel in _parcels(*pair)])
        for document, spans in _document_maps(step.scans):
            state = begin[document]
            for place, span in enumerate(spans):
                if span in own:
                    entering[span] = state
                if place + 1 < len(spans):
                    state = known(span)(state)
        with error_context(where):
            pending.wait()
        for message, (matrices, shifts) in arriving:
            maps.update(zip(_spans(message), map(AffineMap, matrices, shifts), strict=True))
    return entering


def _parcels(message: Message, maps: AffineMap) -> list[Parcel]:
    """The two tensors of a message: all matrices, all shifts."""
    return [Parcel(message.peer, 2 * message.tag + n, x) for n, x in enumerate(maps)]


def _spans(message: Message) -> list[Span]:
    return [(start, stop) for start, stop, *_ in message.pieces.rows()]


def _document_maps(scans: Scans) -> Iterator[tuple[int, list[Span]]]:
    """The maps of each document, in order."""
    for document, rows in groupby(scans.rows(), key=lambda row: row[0]):
        yield document, [(start, stop) for _, start, stop in rows]


def dense_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    kind: str = "gated_delta_rule",
    A: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    qkv_format: str = "bshd",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear attention of whole (global) tensors, in float64.

    Args:
        q ... initial_state: as in `cp_ref.linear_attention`, for all tokens of the batch.
        qkv_format: "bshd", "sbhd" or "thd".
        cu_seqlens, cu_seqlens_padded: as `cu_seqlens_q` and `cu_seqlens_q_padded` in `cp_ref.attention`.

    Returns:
        (out, final_state): float64, out in v's format, zero in padding and tail; final_state [b, h_v, d_k, d_v].

    Raises:
        ValueError, TypeError: a word that does not exist, or lengths that are wrong.

    >>> one = torch.ones(1, 2, 1, 1)                                     # b 1, s 2, h 1, d 1
    >>> out, state = dense_linear_attention(one, one, one, torch.zeros(1, 2, 1), kind="mamba2")
    >>> out.flatten().tolist(), state.item()                             # no decay: S = 1, then 2
    ([1.0, 2.0], 2.0)
    """
    check_choice("kind", kind, LINEAR_KINDS)
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    documents = list(_documents(v, qkv_format, cu_seqlens, cu_seqlens_padded))
    q, k, v, g = (to_packed(x, qkv_format).double() for x in (q, k, v, g))
    shared = v.shape[1] // q.shape[1]  # heads of v that share a head of q and k
    q, k = (x.repeat_interleave(shared, dim=1) for x in (q, k))
    exponent = {"kda": g[..., None], "mamba": g[:, :, None]}.get(kind, g[..., None, None])
    decay = (exponent if A is None else A.double() * exponent).exp()  # [t, h_v, d_k or 1, d_v or 1]
    strength = None if beta is None else to_packed(beta, qkv_format).double()[..., None]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    rows = [v.new_zeros(v.shape[1:])] * len(v)
    final: list[torch.Tensor] = []
    for number, (start, stop) in enumerate(documents):
        state = v.new_zeros(v.shape[1], q.shape[-1], v.shape[-1])
        if initial_state is not None:
            state = initial_state[number].double()
        for i in range(start, stop):
            state = decay[i] * state
            write = v[i]
            if strength is not None:
                write = strength[i] * (v[i] - torch.einsum("hkv,hk->hv", state, k[i]))
            state = state + torch.einsum("hk,hv->hkv", k[i], write)
            rows[i] = factor * torch.einsum("hkv,hk->hv", state, q[i])
        final.append(state)
    out = torch.stack(rows) if rows else v
    return to_format(out, qkv_format, len(documents)), torch.stack(final)


def dense_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    qkv_format: str = "bshd",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
) -> torch.Tensor:
    """A causal convolution of whole (global) tensors, in float64.

    Args:
        x ... activation: as in `cp_ref.causal_conv1d`, for all tokens of the batch.
        qkv_format, cu_seqlens, cu_seqlens_padded: as in `dense_linear_attention`.

    Returns:
        x's shape, float64, zero in padding and tail.

    Raises:
        ValueError, TypeError: a word that does not exist, or lengths that are wrong.

    >>> x = torch.tensor([[[1.0], [2.0], [4.0]]])                        # b 1, s 3, one channel
    >>> dense_causal_conv1d(x, torch.tensor([[10.0, 1.0]])).flatten().tolist()
    [1.0, 12.0, 24.0]
    """
    if activation is not None:
        check_choice("activation", activation, ACTIVATIONS)
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    documents = list(_documents(x, qkv_format, cu_seqlens, cu_seqlens_padded))
    x, weight = to_packed(x, qkv_format).double(), weight.double()
    rows = [x.new_zeros(x.shape[1:])] * len(x)
    for start, stop in documents:
        for i in range(start, stop):
            seen = x[max(start, i - weight.shape[1] + 1) : i + 1]
            row = (weight[:, -len(seen) :].T * seen).sum(dim=0)
            row = row if bias is None else row + bias.double()
            rows[i] = row if activation is None else row * torch.sigmoid(row)
    return to_format(torch.stack(rows) if rows else x, qkv_format, len(documents))


def _documents(
    x: torch.Tensor, qkv_format: str, cu_seqlens: torch.Tensor | None, cu_seqlens_padded: torch.Tensor | None
) -> Iterator[tuple[int, int]]:
    """The real tokens of each document: rows of the packed buffer."""
    real = read_lengths("cu_seqlens", cu_seqlens)
    if qkv_format == "thd":
        slots = read_lengths("cu_seqlens_padded", cu_seqlens_padded) or real
        if real is None or slots is None:
            raise ValueError("cu_seqlens is None; qkv_format 'thd' needs it")
        starts = slots[:-1]
    else:
        batch, longest = (x.shape[0], x.shape[1]) if qkv_format == "bshd" else (x.shape[1], x.shape[0])
        starts = [n * longest for n in range(batch)]
        real = [n * longest for n in range(batch + 1)] if real is None else real
    for start, (first, last) in zip(starts, pairwise(real), strict=True):
        yield start, start + last - first
