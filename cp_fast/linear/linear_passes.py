"""Both passes of a linear layer on one rank: local kernels, the exchange of maps, and their composition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.linear_kernels import LinearGradients, LinearInputs, LinearKernels
from cp_fast.linear.linear_plan import LinearTables
from cp_fast.linear.state_tables import StateTables, Transfer
from cp_fast.runtime.prepared_exchange import Exchanges
from cp_ref.contract.collectives import all_reduce_sum
from cp_ref.contract.group import Group, Parcel, Pending

__all__ = [
    "MapExchange",
    "NoRowsBackward",
    "NoRowsForward",
    "Saved",
    "backward_pass",
    "forward_pass",
]

# ---- a rank without rows
#
# The passes of a rank without tokens: nothing to launch, and maps of others may go through it.


class _NoRows:
    """Empty tensors of the right shapes."""

    def __init__(self, inputs: LinearInputs) -> None:
        self._inputs = inputs
        d_k, (_, h_v, d_v) = inputs.q.shape[-1], inputs.v.shape
        dtype = torch.float64 if inputs.v.dtype == torch.float64 else torch.float32
        m = (0, h_v) if inputs.kind == "mamba2" else (0, h_v, d_k, d_k)
        self._maps = Maps(inputs.v.new_empty(m, dtype=dtype), inputs.v.new_empty(0, h_v, d_k, d_v, dtype=dtype))


class NoRowsForward(_NoRows):
    """See `ForwardRun`."""

    kept: tuple[torch.Tensor, ...] = ()

    def maps(self, chosen: Sequence[int]) -> Maps:
        """None."""
        return self._maps

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """No rows, no states."""
        return self._inputs.v, self._maps.b if final else None


class NoRowsBackward(_NoRows):
    """See `BackwardRun`."""

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        """None."""
        return self._maps.b

    def meanwhile(self) -> None:
        """Nothing."""

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        """No rows, no states."""
        q, k, v, g, beta, *_ = self._inputs
        return LinearGradients(q, k, v, g, beta, self._maps.b)


# ---- messages of maps
#
# The messages of states: maps packed in one tensor, a row for each slot, sent and received in the steps of a schedule.
#
# A row is [M, B] of all heads, flat. What is sent is a view of rows, or a copy where they do not lie together.


class MapExchange:
    """The maps of one pass: posted when made, complete after `wait`.

    own: the maps of the chosen fragments.
    """

    def __init__(self, tables: StateTables, own: Maps, exchanges: Exchanges, group: Group, where: str) -> None:
        self._tables, self._exchanges, self._group, self._where = tables, exchanges, group, where
        self._shapes = own.m.shape[1:], own.b.shape[1:]
        self._pending: tuple[Pending, list[Parcel]] | None = None  # and what is sent, which must stay
        self._done = 0
        if not tables.steps:  # nothing travels: no rows
            self._maps: Maps | None = own
            return
        self._maps = None
        size_m, size_b = (shape.numel() for shape in self._shapes)
        self._rows = own.b.new_empty(tables.slots, size_m + size_b)
        c = len(own.b)
        torch.cat([own.m.reshape(c, size_m), own.b.reshape(c, size_b)], dim=1, out=self._rows[:c])
        self._post()

    def _post(self) -> None:
        sends, recvs = self._tables.steps[self._done]
        out, back = ([Parcel(one.peer, one.tag, self._of(one)) for one in some] for some in (sends, recvs))
        self._pending = self._exchanges.post(self._group, self._where, out, back), out
        self._done += 1

    def _of(self, transfer: Transfer) -> torch.Tensor:
        if transfer.scattered is not None:
            return self._rows.index_select(0, transfer.scattered)
        return self._rows[transfer.first : transfer.first + transfer.count]

    def wait(self, meanwhile: Callable[[], None] | None = None) -> Maps:
        """The maps by slot, after all steps. meanwhile: work to do while the first messages travel."""
        if meanwhile is not None:
            meanwhile()
        while self._pending is not None:
            self._pending[0].wait()
            self._pending = None
            if self._done < len(self._tables.steps):
                self._post()
        if self._maps is None:
            m, b = self._rows.split([shape.numel() for shape in self._shapes], dim=1)
            self._maps = Maps(m.unflatten(1, self._shapes[0]), b.unflatten(1, self._shapes[1]))
        return self._maps


# ---- both passes


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
    tables: LinearTables,
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
    fragments, (pass_tables, _) = tables.fragments, tables.passes
    running = kernels.forward(inputs, fragments) if len(fragments) else NoRowsForward(inputs)
    maps = running.maps(pass_tables.chosen)
    exchange = MapExchange(pass_tables, maps, tables.exchanges, group, "states, forward")
    entering = entering_states(pass_tables, exchange.wait(), initial_state, len(fragments), kernels)
    out, states = running.run(entering, final=final)
    saved = Saved(tuple(running.kept), maps.m, entering)
    if not final:
        return out, None, saved
    assert states is not None
    everyone = states.new_zeros(len(tables.problem.lengths.len_q), *states.shape[1:])
    _, _, ending, documents = tables.ends
    everyone[documents] = states[ending]
    everyone = all_reduce_sum(group, everyone)
    if initial_state is not None:
        everyone[tables.empty] = initial_state[tables.empty]
    return out, everyone, saved


def backward_pass(
    tables: LinearTables,
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
    fragments, (_, pass_tables) = tables.fragments, tables.passes
    begin, begun, ending, ended = tables.ends
    if len(fragments):
        running = kernels.backward(inputs, fragments, saved.kept, saved.entering, dout)
    else:
        running = NoRowsBackward(inputs)
    total = None if dfinal is None else all_reduce_sum(group, dfinal)
    at_ends = None
    if total is not None:
        at_ends = total.new_zeros(len(fragments), *total.shape[1:])
        at_ends[ending] = total[ended]
    d = running.reverse_maps(pass_tables.chosen, None if at_ends is None else at_ends[pass_tables.chosen_index])
    own = Maps(_chosen_maps(tables, saved.maps), d)
    exchange = MapExchange(pass_tables, own, tables.exchanges, group, "states, backward")
    leaving = entering_states(
        pass_tables, exchange.wait(running.meanwhile), None, len(fragments), kernels, transposed=True
    )
    if at_ends is not None:
        leaving = at_ends if leaving is None else leaving + at_ends
    gradients = running.run(leaving)
    if gradients.dinitial is None:
        return gradients
    b = len(tables.problem.lengths.len_q)
    share = gradients.dinitial.new_zeros(b, *gradients.dinitial.shape[1:])
    share[begun] = gradients.dinitial[begin].to(share.dtype)
    if dfinal is not None:
        share[tables.empty] = dfinal[tables.empty].to(share.dtype)
    return gradients._replace(dinitial=share)


def _chosen_maps(tables: LinearTables, maps: torch.Tensor) -> torch.Tensor:
    """M of the fragments that the backward pass chooses, zero where the forward pass has none."""
    if tables.forward_maps is None:
        return maps
    there, here = tables.forward_maps
    found = maps.new_zeros(len(tables.passes[1].chosen), *maps.shape[1:])
    if len(there):
        found[there] = maps[here]
    return found
