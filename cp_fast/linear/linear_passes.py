"""Both passes of a linear layer on one rank: local kernels, the exchange of maps, and their composition."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.exchange_maps import MapExchange
from cp_fast.linear.linear_kernels import LinearGradients, LinearInputs, LinearKernels
from cp_fast.linear.linear_plan import LinearPlan
from cp_fast.linear.no_rows import NoRowsBackward, NoRowsForward
from cp_fast.linear.state_tables import StateTables
from cp_ref.common.groups.collectives import all_reduce_sum
from cp_ref.spec import Group

__all__ = ["Saved", "backward_pass", "forward_pass"]


class Saved(NamedTuple):
    """The tensors that the backward pass needs besides the inputs."""

    kept: tuple[torch.Tensor, ...]  # of the kernels
    maps: torch.Tensor  # M of the fragments that have one
    entering: torch.Tensor | None  # the fragments' initial states


def entering_states(
    tables: StateTables,
    maps: Maps,
    states: torch.Tensor | None,
    fragments: int,
    kernels: LinearKernels,
    *,
    transposed: bool = False,
) -> torch.Tensor | None:
    """The states that enter the rank's fragments; None where all are zero. See `LinearKernels.compose`."""
    if states is None and not tables.composes:
        return None
    return kernels.compose(tables, maps, states, fragments, transposed=transposed)


def forward_pass(
    plan: LinearPlan,
    kernels: LinearKernels,
    group: Group,
    inputs: LinearInputs,
    initial_state: torch.Tensor | None,
    *,
    final: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
    """Out [n, h_v, d_v] of this rank's packed rows, the final states of all documents if asked for, and what to save.

    initial_state: [b, h_v, d_k, d_v] in the states' dtype, or None.
    """
    fragments, (tables, _) = plan.fragments, plan.passes
    running = kernels.forward(inputs, fragments) if len(fragments) else NoRowsForward(inputs)
    maps = running.maps(tables.chosen)
    exchange = MapExchange(tables, maps, group, "states, forward")
    entering = entering_states(tables, exchange.wait(), initial_state, len(fragments), kernels)
    out, states = running.run(entering, final=final)
    saved = Saved(tuple(running.kept), maps.m, entering)
    if not final:
        return out, None, saved
    assert states is not None
    everyone = states.new_zeros(len(plan.problem.lengths.len_q), *states.shape[1:])
    _, _, ending, documents = plan.ends
    everyone[documents] = states[ending]
    everyone = all_reduce_sum(group, everyone)
    if initial_state is not None:
        everyone[plan.empty] = initial_state[plan.empty]
    return out, everyone, saved


def backward_pass(
    plan: LinearPlan,
    kernels: LinearKernels,
    group: Group,
    inputs: LinearInputs,
    saved: Saved,
    dout: torch.Tensor,
    dfinal: torch.Tensor | None,
) -> LinearGradients:
    """The gradients of the packed rows and, in `dinitial` [b, h_v, d_k, d_v], this rank's share of the initial states';
    None where the kernels had none.

    dfinal: this rank's gradient of the final states of all documents [b, h_v, d_k, d_v]; None where the call had none.
    """
    fragments, (_, tables) = plan.fragments, plan.passes
    begin, begun, ending, ended = plan.ends
    if len(fragments):
        running = kernels.backward(inputs, fragments, saved.kept, saved.entering, dout)
    else:
        running = NoRowsBackward(inputs)
    total = None if dfinal is None else all_reduce_sum(group, dfinal)
    at_ends = None
    if total is not None:
        at_ends = total.new_zeros(len(fragments), *total.shape[1:])
        at_ends[ending] = total[ended]
    d = running.reverse_maps(tables.chosen, None if at_ends is None else at_ends[tables.chosen_index])
    exchange = MapExchange(tables, Maps(_chosen_maps(plan, saved.maps), d), group, "states, backward")
    leaving = entering_states(tables, exchange.wait(running.meanwhile), None, len(fragments), kernels, transposed=True)
    if at_ends is not None:
        leaving = at_ends if leaving is None else leaving + at_ends
    gradients = running.run(leaving)
    if gradients.dinitial is None:
        return gradients
    b = len(plan.problem.lengths.len_q)
    share = gradients.dinitial.new_zeros(b, *gradients.dinitial.shape[1:])
    share[begun] = gradients.dinitial[begin].to(share.dtype)
    if dfinal is not None:
        share[plan.empty] = dfinal[plan.empty].to(share.dtype)
    return gradients._replace(dinitial=share)


def _chosen_maps(plan: LinearPlan, maps: torch.Tensor) -> torch.Tensor:
    """M of the fragments that the backward pass chooses, zero where the forward pass has none."""
    if plan.forward_maps is None:
        return maps
    there, here = plan.forward_maps
    found = maps.new_zeros(len(plan.passes[1].chosen), *maps.shape[1:])
    if len(there):
        found[there] = maps[here]
    return found
