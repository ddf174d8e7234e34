"""Attention of one layer, both passes: the code around the schedule's steps.

user's format -> packed rows -> the plan's instructions -> user's format
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.compile.packing import Packing
from cp_fast.movers.mover_protocol import take
from cp_fast.runtime.pass_buffers import is_mask
from cp_fast.runtime.run import CompiledCall, ForwardResults
from cp_ref.batches.tensors import wide_dtype
from cp_ref.calls.scores import ScoreTensors
from cp_ref.groups.collectives import all_reduce_max, offset_grad
from cp_ref.groups.context import ContextParallel
from cp_ref.schedules.words import Feature, Unsupported

__all__ = ["backward_pass", "forward_pass", "sink_shares"]


def forward_pass(
    call: CompiledCall,
    cp: ContextParallel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offset: torch.Tensor | None,
    scores: ScoreTensors | None = None,
    *,
    return_max_logit: bool,
) -> ForwardResults:
    """Compute this rank's results from its slices, both in the user's format. Collective. The tensors here and in
    `backward_pass`, except dout and dlse, are detached: some kernel libraries take addresses, and refuse tensors with
    requires_grad. scores: further inputs of scores, in addition to q and k; None for none.
    """
    packing = call.packing
    scores = None if scores is None else packing.scores_in(scores)
    sink = _sink(packing, offset, wide_dtype(q.dtype), q.device)
    done = call.forward(cp.comm, packing.pack(q), packing.pack(k), packing.pack(v), sink, scores)
    largest = None
    if return_max_logit and done.max_logit is not None:
        largest = all_reduce_max(cp.comm, packing.heads_out(done.max_logit).amax(dim=0))
    return ForwardResults(packing.unpack(done.out), packing.unpack_lse(done.lse), largest, done.kept)


def backward_pass(
    call: CompiledCall,
    cp: ContextParallel,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    kept: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    offset: torch.Tensor | None,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    scores: ScoreTensors | None = None,
    *,
    deterministic: bool,
    wants_offset: bool,
    lse_given: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of q, k, v in the user's format, and of offset [h_q], as the context says. Collective.

    inputs: q, k, v if `Plan.needs_inputs`. out, lse, kept: the forward pass's results. dout, dlse: their gradients,
    None for zero. scores: as in the forward pass. lse_given: whether the caller has lse. Then some rank may have its
    gradient, and if its rows are sent, all ranks send one.
    """
    packing = call.packing
    scores = None if scores is None else packing.scores_in(scores)
    if dlse is not None and Feature.LSE_GRADIENT not in call.backend.features:
        raise Unsupported("a gradient through lse", {f"backend {call.backend.name!r}": {Feature.LSE_GRADIENT}})
    packed_out, packed_lse = packing.pack(out), packing.pack_lse(lse).contiguous()
    dlse = None if dlse is None else packing.pack_lse(dlse.detach()).contiguous()
    if dlse is None and lse_given and call.instructions.sends_do:
        dlse = torch.zeros_like(packed_lse)
    dout = torch.zeros_like(packed_out) if dout is None else packing.pack(dout.detach())
    if scores is not None and scores.score_mod is not None:
        dout, dlse = _without_blind_rows(packing, packed_out, packed_lse, offset, dout, dlse)
    doffset = None
    if offset is not None and wants_offset:
        mine = _offset_gradient(call, offset, dout, packed_out, packed_lse, dlse)
        doffset = offset_grad(cp, mine).to(offset.dtype)
    given = None
    if inputs is not None:
        q, k, v = inputs
        given = packing.pack(q), packing.pack(k), packing.pack(v)
    grads = dout, dlse, packed_out, packed_lse
    results = call.backward(cp.comm, given, *grads, kept, scores, deterministic=deterministic)
    dq, dk, dv = (packing.unpack(x) for x in results)
    return dq, dk, dv, doffset


def _without_blind_rows(
    packing: Packing,
    out: torch.Tensor,
    lse: torch.Tensor,
    offset: torch.Tensor | None,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dout and dlse, 0 in the rows whose keys a score_mod hides all: kernels multiply what is there, NaN included, by
    weights of 0. Rows that the mask hides are in no launch.
    """
    sink = _sink(packing, offset, lse.dtype, lse.device)
    if sink is None:
        blind = lse == float("-inf")
        dlse = None if dlse is None else dlse.masked_fill(blind, 0.0)
    else:
        blind = (lse == sink[:, None]) & (out == 0).all(dim=-1).t()
    return dout.masked_fill(blind.t()[..., None], 0.0), dlse


def _sink(
    packing: Packing, offset: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Each packed head's sink logit; None without a sink."""
    if packing.problem.softmax_type == "vanilla":
        return None
    zeros = torch.zeros(packing.problem.heads_q, dtype=dtype, device=device)
    return packing.heads_in(zeros if offset is None else offset.to(dtype))


def _offset_gradient(
    call: CompiledCall,
    offset: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
) -> torch.Tensor:
    """This rank's share of d softmax_offset [h_q]: minus the sink's weight times delta = sum(dout * out) - dlse, over
    the real rows; dout and out [t, h, d_v], lse and dlse [h, t].
    """
    real = call.instructions.real_q_rows
    rows = slice(None) if is_mask(real) else real
    sink = _sink(call.packing, offset, lse.dtype, lse.device)
    assert sink is not None
    dlse = None if dlse is None else take(dlse.t(), rows)
    share = sink_shares(sink, take(out, rows), take(lse.t(), rows), take(dout, rows), dlse)
    if is_mask(real):
        share = share.masked_fill(~real[:, None], 0.0)  # Padding may hold any value, NaN included.
    return call.packing.heads_out(-share.sum(dim=0)).sum(dim=0)


def sink_shares(
    sink: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None = None
) -> torch.Tensor:
    """Each row's share of minus the gradient of the sinks' logits [h], in lse's dtype: the sink's weight times delta,
    [n, h].

    Args:
        out, dout: [n, h, d_v].
        lse, dlse: [n, h], the lse with the sink in it.
    """
    products = dout.to(lse.dtype) * out.to(lse.dtype)
    delta = products.masked_fill(out == 0, 0.0).sum(dim=-1)  # of a row that sees nothing dout may be NaN
    if dlse is not None:
        delta = delta - dlse
    return (torch.exp(sink - lse) * delta).masked_fill(sink == float("-inf"), 0.0)
