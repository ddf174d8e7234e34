"""Launches as operations: one call of the kernel library."""

from __future__ import annotations

from collections.abc import Sequence

from cp_fast.backends import Backend, BackwardOperands, LaunchOptions
from cp_fast.backends.backend_protocol import LaunchScores
from cp_fast.compile.instructions import Launch
from cp_fast.movers.rows import Rows
from cp_fast.runtime.pass_buffers import PassBuffers
from cp_fast.runtime.row_positions import RowPositions
from cp_fast.runtime.tensors import Operation, State, Tensors

__all__ = ["backward_launch", "forward_launch"]


def forward_launch(buffers: PassBuffers, backend: Backend, positions: RowPositions, one: Launch[Rows]) -> Operation:
    """One forward call of the kernel library."""
    take_q, take_kv = map(buffers.taker, one.operands)
    batch, (result,), first_head = one.batch, one.results, one.first_head

    def launch(state: State) -> None:
        (q,), _ = take_q(state)
        (k, v), _ = take_kv(state)
        options = state.options if state.inputs is None else _with_places(state, positions, one)
        out, lse, max_logit = backend.forward(q, k, v, batch, options)
        state.buffers[result] = Tensors((out,), (lse,))
        state.max_logit.append((first_head, max_logit))

    return launch


def backward_launch(
    buffers: PassBuffers, backend: Backend, positions: RowPositions, one: Launch[Rows], free: Sequence[int]
) -> Operation:
    """One backward call. `free`: operands without a later use. If the library can, they are freed once the kernels
    have read them, before the gradients are allocated.
    """
    take_q, take_kv, take_do, take_res = map(buffers.taker, one.operands)
    batch, (dq, dkv) = one.batch, one.results

    def operands(state: State) -> BackwardOperands:
        (q,), _ = take_q(state)
        (k, v), _ = take_kv(state)
        (dout,), dlse = take_do(state)
        (out,), (lse,) = take_res(state)
        for number in free:
            state.buffers[number] = None
        return BackwardOperands(dout, q, k, v, out, lse, dlse[0] if dlse else None)

    def launch(state: State) -> None:
        options = state.options if state.inputs is None else _with_places(state, positions, one)
        part = backend.backward_letting_go([operands(state)], batch, options)
        state.buffers[dq], state.buffers[dkv] = Tensors((part.dq,), ()), Tensors((part.dk, part.dv), ())

    return launch


def _with_places(state: State, positions: RowPositions, one: Launch[Rows]) -> LaunchOptions:
    """The options of a launch whose scores depend on the places of its rows and heads."""
    assert state.inputs is not None
    return state.options._replace(score_inputs=LaunchScores(positions.of(one), one.first_head, state.inputs))
