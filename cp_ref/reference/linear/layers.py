"""The layers of hybrid models over ranks: linear attention and short causal convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from cp_ref.batches.tensors import to_format, to_packed, wide_dtype
from cp_ref.calls import linear_calls
from cp_ref.calls.layer import public_function
from cp_ref.calls.linear_calls import LinearCall, columns_apart, columns_together
from cp_ref.groups.collectives import all_reduce_sum
from cp_ref.reference.executor.play_schedule import run_rank_schedule
from cp_ref.reference.executor.rank_tensors import RankTensors
from cp_ref.reference.layer_calls import Done, Passes, Run, called
from cp_ref.reference.linear.recurrence import (
    AffineMap,
    Span,
    Tokens,
    by_column,
    map_of,
    play_states,
)
from cp_ref.reference.linear.recurrence import run as recurrence
from cp_ref.reference.reference_plan import Plan
from cp_ref.schedules.linear_schedules import DocumentFragments, conv_workload, document_fragments

__all__ = [
    "causal_conv1d",
    "linear_attention",
]


class _Rank:
    """A rank's share of a batch: its fragments, and their rows."""

    def __init__(
        self, plan: Plan, call: LinearCall, tensors: tuple[torch.Tensor | None, ...], rates: torch.Tensor | None
    ) -> None:
        fragments = document_fragments(plan.problem)
        self.own: list[tuple[int, slice, Span]] = []
        for document, _, _, start, stop, row in fragments.of(plan.rank).rows():
            self.own.append((document, slice(row, row + stop - start), (start, stop)))
        self.first, self.last = _ends(fragments)
        wide = wide_dtype(getattr(torch, call.dtype))
        fmt = plan.problem.qkv_format
        self.given = Tokens(*(None if x is None else to_packed(x.detach(), fmt).to(wide) for x in tensors))  # pyright: ignore[reportArgumentType]
        self.rates = None if rates is None else rates.detach().to(wide)
        self.packed = self.given if self.rates is None else by_column(self.given, self.rates)
        self.d_v = call.d_v
        self.empty = [n for n, length in enumerate(plan.problem.lengths.len_q) if not length]
        self.state_shape = len(plan.problem.sequences), call.heads_v, call.d_k, call.d_v

    def tokens(self, rows: slice) -> Tokens:
        """The tokens of a fragment."""
        return Tokens(*(None if x is None else x[rows] for x in self.packed))  # pyright: ignore[reportArgumentType]

    def states(self, x: torch.Tensor) -> torch.Tensor:
        """The states of a call [b, h_v, d_k, d_v], as those of the packed tokens' heads."""
        return x if self.rates is None else columns_apart(x)

    def of_call(self, x: torch.Tensor) -> torch.Tensor:
        """`states` undone."""
        return x if self.rates is None else columns_together(x, self.d_v)

    def gradients(self, found: Tokens) -> tuple[Tokens, torch.Tensor | None]:
        """Gradients of the given tokens and of the rates, of those of the packed tokens."""
        if self.rates is None:
            return found, None
        steps = torch.zeros_like(self.given.g)  # padding may hold NaN
        for _, rows, _ in self.own:
            steps[rows] = self.given.g[rows]
        with torch.enable_grad():
            v, g, rates = (x.detach().requires_grad_() for x in (self.given.v, steps, self.rates))
            made = by_column(self.given._replace(v=v, g=g), rates)
        dv, dg, drates = torch.autograd.grad((made.v, made.g), (v, g, rates), (found.v, found.g))
        return found._replace(v=dv, g=dg), drates


def _ends(fragments: DocumentFragments) -> tuple[set[Span], set[Span]]:
    """The first and the last fragments of all documents."""
    spans = [(start, stop) for *_, start, stop, _ in fragments.rows()]
    places = fragments.place.tolist()
    first = {span for place, span in zip(places, spans, strict=True) if place == 0}
    last = {span for place, span in zip((*places[1:], 0), spans, strict=False) if place == 0}  # before another first
    return first, last


def linear_forward(run: Run, *tensors: Any) -> Done:
    """Out and the final states; kept are the states that enter the fragments."""
    (plan, cp, call), (*of_tokens, rates, initial_state) = run, tensors
    rank = _Rank(plan, call, tuple(of_tokens), rates)
    begin = rank.packed.v.new_zeros(rank.state_shape)
    if initial_state is not None:
        begin = initial_state.to(begin.dtype)
    begin = rank.states(begin)
    maps = {span: partial(map_of, rank.tokens(rows)) for _, rows, span in rank.own}
    entering = play_states("forward", plan.states.forward[cp.rank], cp.comm, maps, begin)

    out, final_state = torch.zeros_like(rank.packed.v), torch.zeros_like(begin)
    for document, rows, span in rank.own:
        out[rows], leaving = recurrence(rank.tokens(rows), call.scale, entering[span])
        if span in rank.last:
            final_state[document] = leaving
    if call.output_final_state:
        final_state = all_reduce_sum(cp.comm, final_state)
        final_state[rank.empty] = begin[rank.empty]
    out = out.reshape(rank.given.v.shape).to(tensors[0].dtype)
    out = to_format(out, plan.problem.qkv_format, len(plan.problem.sequences))
    return Done((out, rank.of_call(final_state)), kept=entering)


def linear_backward(
    run: Run,
    tensors: Sequence[Any],
    _: Any,
    entering: dict[Span, torch.Tensor],
    dout: torch.Tensor,
    dfinal: torch.Tensor,
) -> Sequence[torch.Tensor | None]:
    """Gradients of all operands."""
    (plan, cp, call), problem = run, run.plan.problem
    *of_tokens, rates, initial_state = tensors
    rank = _Rank(plan, call, tuple(of_tokens), rates)
    dout = to_packed(dout, problem.qkv_format).to(rank.packed.v.dtype).reshape(rank.packed.v.shape)
    dfinal = rank.states(dfinal)
    dbegin = torch.zeros_like(dfinal)
    dbegin[rank.empty] = dfinal[rank.empty]
    if call.output_final_state:
        dfinal = all_reduce_sum(cp.comm, dfinal)

    local: dict[Span, tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]] = {}
    maps: dict[Span, partial[AffineMap]] = {}
    for _, rows, span in rank.own:
        local[span] = leaves, out, _ = _recorded(rank.tokens(rows), call.scale, entering[span])
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
    found, drates = rank.gradients(Tokens(*dtokens))  # pyright: ignore[reportArgumentType]
    results = [
        None if dx is None else to_format(dx.to(x.dtype), problem.qkv_format, len(problem.sequences))
        for dx, x in zip(found, of_tokens, strict=True)
    ]
    drates = None if drates is None else drates.to(rates.dtype)
    return *results, drates, None if initial_state is None else rank.of_call(dbegin).to(initial_state.dtype)


LINEAR = Passes(linear_calls.LINEAR, linear_forward, linear_backward)
linear_attention = public_function(linear_calls.linear_attention, called, LINEAR, __name__)


def _recorded(
    tokens: Tokens, scale: float, state: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The recurrence of a fragment once more, recorded by autograd: leaves (tensors of tokens that are there, then the
    state), out, and the state that leaves.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (*tokens, state) if x is not None]
        q, k, v, g, *beta, before = leaves
        out, leaving = recurrence(Tokens(q, k, v, g, *(beta or [None])), scale, before)
    return leaves, out, leaving


def _map_back(tokens: Tokens, out: torch.Tensor, state: torch.Tensor, dout: torch.Tensor) -> AffineMap:
    """The map of the state's gradient through a fragment: (M^T, D)."""
    (gradient,) = torch.autograd.grad(out, state, dout, retain_graph=True)
    return AffineMap(map_of(tokens).matrix.mT.contiguous(), gradient)


ALL = slice(0, 1)  # channels travel together, as one head


def taps(tile: Sequence[int], kernel_size: int) -> Iterator[tuple[int, slice, slice]]:
    """The products of a tile: (column of weight, rows of the result, rows of x), for rows that are in the tile.

    >>> for tap in taps((0, 4, 8, 2, 4, 0, 1), 3): print(*tap)        # results 4:8 of x 2:4
    0 slice(4, 6, None) slice(2, 4, None)
    1 slice(4, 5, None) slice(3, 4, None)
    """
    _, q_start, q_stop, k_start, k_stop, *_ = tile
    for j in range(kernel_size):
        back = kernel_size - 1 - j
        start, stop = max(q_start, k_start + back), min(q_stop, k_stop + back)
        if start < stop:
            yield j, slice(start, stop), slice(start - back, stop - back)


def conv_forward(run: Run, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Done:
    """The slice of the result; saved are the rows of all fragments that this rank has, and the sums."""
    plan, cp, call = run
    problem, wide = plan.problem, wide_dtype(x.dtype)
    packed, factors = to_packed(x, problem.qkv_format), weight.to(wide)
    held = RankTensors(conv_workload(problem, call.kernel_size), cp.rank, x.device)
    held.put_own("kv", packed[:, None])
    sums = torch.zeros_like(held.tensors["kv"][0][:, 0], dtype=wide)  # [t of all ranks, channels]

    def compute(tile: Sequence[int]) -> None:
        for j, rows, columns in taps(tile, call.kernel_size):
            sums[rows] += factors[:, j] * held.tensors["kv"][0][columns, 0].to(wide)

    run_rank_schedule("forward", plan.halo(call.kernel_size).forward[cp.rank], held, cp.comm, compute)
    if bias is not None:
        sums += bias.to(wide)
    out = torch.zeros_like(packed, dtype=wide)
    for here, there in held.own["kv"]:
        out[here] = sums[there] if call.activation is None else sums[there] * torch.sigmoid(sums[there])
    out = to_format(out.to(x.dtype), problem.qkv_format, len(problem.sequences))
    return Done((out,), (held.tensors["kv"][0], sums))


def conv_backward(
    run: Run, tensors: Sequence[Any], saved: Sequence[torch.Tensor], _: None, dout: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """Gradients of x, weight and bias."""
    (plan, cp, call), (x, weight, bias), (x_all, sums) = run, tensors, saved
    problem, wide = plan.problem, sums.dtype
    factors = weight.to(wide)
    held = RankTensors(conv_workload(problem, call.kernel_size), cp.rank, x.device)
    held.tensors["kv"] = (x_all,)
    held.start_result("dkv", ((1, call.channels), wide, 0.0))
    dsums = torch.zeros_like(sums)
    packed = to_packed(dout, problem.qkv_format).to(wide)
    for here, there in held.own["kv"]:
        gate = torch.sigmoid(sums[there])
        slope = torch.ones_like(gate) if call.activation is None else gate * (1 + sums[there] * (1 - gate))
        dsums[there] = packed[here] * slope
    dfactors = torch.zeros_like(factors)

    def compute(tile: Sequence[int]) -> None:
        for j, rows, columns in taps(tile, call.kernel_size):
            dfactors[:, j] += (dsums[rows] * x_all[columns, 0].to(wide)).sum(dim=0)
            held.accumulate("dkv", columns, ALL, (factors[:, j] * dsums[rows])[:, None])

    run_rank_schedule("backward", plan.halo(call.kernel_size).backward[cp.rank], held, cp.comm, compute)
    dx = torch.zeros(len(packed), 1, call.channels, dtype=wide, device=x.device)
    held.copy_out("dkv", dx)
    dx = to_format(dx[:, 0].to(x.dtype), problem.qkv_format, len(problem.sequences))
    dbias = None if bias is None else dsums.sum(dim=0).to(bias.dtype)
    return dx, dfactors.to(weight.dtype), dbias


CONVOLUTION = Passes(linear_calls.CONVOLUTION, conv_forward, conv_backward)
causal_conv1d = public_function(linear_calls.causal_conv1d, called, CONVOLUTION, __name__)
