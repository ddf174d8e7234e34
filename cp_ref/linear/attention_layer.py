"""`linear_attention`: the recurrence over documents that are spread over ranks.

Forward, each rank makes the maps of its fragments, exchanges them, and runs the recurrence of each fragment from the
state that enters it. Backward, the gradient of the state goes through a fragment by an affine map too, with M of the
forward pass: `dS_before = M^T dS_after + D`. D is the gradient that reaches the state through the fragment's own
outputs. So the second schedule of maps (M^T, D) is played in the same way, from the end of each document.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch

from cp_ref.api.packed_formats import to_format, to_packed
from cp_ref.api.reference_context import ContextParallel
from cp_ref.api.reference_plan import Plan, backward_pass
from cp_ref.common.autocast import autocast, no_autocast
from cp_ref.common.declared import implements
from cp_ref.common.derivatives import refuse_transforms
from cp_ref.common.groups.collectives import all_reduce_sum
from cp_ref.common.linear import linear_calls
from cp_ref.common.linear.linear_checks import LinearCall, agree_on_layer, read_linear_attention
from cp_ref.common.wide_dtype import wide_dtype
from cp_ref.linear.play_states import Span, play_states
from cp_ref.linear.recurrence import AffineMap, Tokens, map_of, run
from cp_ref.spec import DocumentFragments, check_context, document_fragments

__all__ = ["linear_attention"]


@implements(linear_calls.linear_attention)
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    cp: ContextParallel,
    plan: Plan,
    kind: str,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
) -> Any:
    refuse_transforms()
    check_context(cp, ContextParallel)
    q, k, v = (autocast(x) for x in (q, k, v))

    def read() -> LinearCall:
        tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        options = {"kind": kind, "scale": scale, "output_final_state": output_final_state}
        return read_linear_attention(cp, plan, Plan, tensors, initial_state=initial_state, **options)

    call = agree_on_layer(cp, plan, read)
    with no_autocast(q.device):
        out, final_state = cast(Any, _LinearAttention).apply(plan, cp, call, q, k, v, g, beta, initial_state)
    return (out, final_state) if output_final_state else out


class _Rank:
    """A rank's share of a batch: its fragments, and their rows."""

    def __init__(self, plan: Plan, call: LinearCall, tensors: tuple[torch.Tensor | None, ...]) -> None:
        fragments = document_fragments(plan.problem)
        self.own: list[tuple[int, slice, Span]] = []
        for document, _, _, start, stop, row in fragments.of(plan.rank).rows():
            self.own.append((document, slice(row, row + stop - start), (start, stop)))
        self.first, self.last = _ends(fragments)
        wide = wide_dtype(getattr(torch, call.dtype))
        fmt = plan.problem.qkv_format
        self.packed = Tokens(*(None if x is None else to_packed(x.detach(), fmt).to(wide) for x in tensors))  # pyright: ignore[reportArgumentType]
        self.empty = [n for n, length in enumerate(plan.problem.lengths.len_q) if not length]
        self.state_shape = len(plan.problem.sequences), call.heads_v, call.d_k, call.d_v

    def tokens(self, rows: slice) -> Tokens:
        """The tokens of a fragment."""
        return Tokens(*(None if x is None else x[rows] for x in self.packed))  # pyright: ignore[reportArgumentType]


def _ends(fragments: DocumentFragments) -> tuple[set[Span], set[Span]]:
    """The first and the last fragments of all documents."""
    spans = [(start, stop) for *_, start, stop, _ in fragments.rows()]
    places = fragments.place.tolist()
    first = {span for place, span in zip(places, spans, strict=True) if place == 0}
    last = {span for place, span in zip((*places[1:], 0), spans, strict=False) if place == 0}  # before another first
    return first, last


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, cp: ContextParallel, call: LinearCall, *tensors: Any) -> Any:
        *of_tokens, initial_state = tensors
        rank = _Rank(plan, call, tuple(of_tokens))
        begin = rank.packed.v.new_zeros(rank.state_shape)
        if initial_state is not None:
            begin = initial_state.to(begin.dtype)
        maps = {span: partial(map_of, rank.tokens(rows)) for _, rows, span in rank.own}
        entering = play_states("forward", plan.states.forward[cp.rank], cp.comm, maps, begin)

        out, final_state = torch.zeros_like(rank.packed.v), torch.zeros_like(begin)
        for document, rows, span in rank.own:
            out[rows], leaving = run(rank.tokens(rows), call.scale, entering[span])
            if span in rank.last:
                final_state[document] = leaving
        if call.output_final_state:
            final_state = all_reduce_sum(cp.comm, final_state)
            final_state[rank.empty] = begin[rank.empty]
        ctx.save_for_backward(*tensors)
        ctx.plan, ctx.problem, ctx.cp, ctx.call, ctx.entering = plan, plan.problem, cp, call, entering
        return to_format(out.to(tensors[0].dtype), plan.problem.qkv_format, len(plan.problem.sequences)), final_state

    @staticmethod
    @backward_pass
    def backward(ctx: Any, dout: torch.Tensor, dfinal: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, cp, call, problem = ctx.plan, ctx.cp, ctx.call, ctx.problem
        *of_tokens, initial_state = ctx.saved_tensors
        rank = _Rank(plan, call, tuple(of_tokens))
        dout = to_packed(dout, problem.qkv_format).to(rank.packed.v.dtype)
        dbegin = torch.zeros_like(dfinal)
        dbegin[rank.empty] = dfinal[rank.empty]
        if call.output_final_state:
            dfinal = all_reduce_sum(cp.comm, dfinal)

        local: dict[Span, tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]] = {}
        maps: dict[Span, partial[AffineMap]] = {}
        for _, rows, span in rank.own:
            local[span] = leaves, out, _ = _recorded(rank.tokens(rows), call.scale, ctx.entering[span])
            maps[span] = partial(_map_back, rank.tokens(rows), out, leaves[-1], dout[rows])
        dleaving = play_states("backward", plan.states.backward[cp.rank], cp.comm, maps, dfinal)

        dtokens = [None if x is None else torch.zeros_like(x) for x in rank.packed]
        for document, rows, span in rank.own:
            leaves, out, leaving = local[span]
            *dpart, dentering = torch.autograd.grad((out, leaving), leaves, (dout[rows], dleaving[span]))
            for dx, part in zip((x for x in dtokens if x is not None), dpart, strict=True):
                dx[rows] = part
            if span in rank.first:
                dbegin[document] = dentering
        results = [
            None if dx is None else to_format(dx.to(x.dtype), problem.qkv_format, len(problem.sequences))
            for dx, x in zip(dtokens, of_tokens, strict=True)
        ]
        return None, None, None, *results, None if initial_state is None else dbegin.to(initial_state.dtype)


def _recorded(
    tokens: Tokens, scale: float, state: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The recurrence of a fragment once more, recorded by autograd: leaves (tensors of tokens that are there, then the
    state), out, and the state that leaves.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (*tokens, state) if x is not None]
        q, k, v, g, *beta, before = leaves
        out, leaving = run(Tokens(q, k, v, g, *(beta or [None])), scale, before)
    return leaves, out, leaving


def _map_back(tokens: Tokens, out: torch.Tensor, state: torch.Tensor, dout: torch.Tensor) -> AffineMap:
    """The map of the state's gradient through a fragment: (M^T, D)."""
    (gradient,) = torch.autograd.grad(out, state, dout, retain_graph=True)
    return AffineMap(map_of(tokens).matrix.mT.contiguous(), gradient)
