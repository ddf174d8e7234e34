"""Launches as operations: one call of the kernel library."""

from __future__ import annotations

from collections.abc import Sequence

from cp_fast.backends import Backend, BackwardOperands
from cp_fast.backends.backend_protocol import backward_letting_go, keeps_state
from cp_fast.compile.instructions import Launch
from cp_fast.runtime.pass_buffers import PassBuffers
from cp_fast.runtime.row_selection import Rows
from cp_fast.runtime.tensors import Operation, State, Tensors

__all__ = ["backward_launch", "forward_launch"]


def forward_launch(buffers: PassBuffers, backend: Backend, one: Launch[Rows]) -> Operation:
    """One forward call of the kernel library."""
    take_q, take_kv = map(buffers.taker, one.operands)
    batch, (result,), first_head, slot = one.batch, one.results, one.first_head, one.state
    stateful = backend if keeps_state(backend) else None

    def launch(state: State) -> None:
        (q,), _ = take_q(state)
        (k, v), _ = take_kv(state)
        if stateful is None:
            out, lse, max_logit = backend.forward(q, k, v, batch, state.options)
        else:
            (out, lse, max_logit), state.opaque[slot] = stateful.forward_with_state(q, k, v, batch, state.options)
        state.buffers[result] = Tensors((out,), (lse,))
        state.max_logit.append((first_head, max_logit))

    return launch


def backward_launch(buffers: PassBuffers, backend: Backend, one: Launch[Rows], free: Sequence[int]) -> Operation:
    """One backward call. `free`: operands without a later use. If the library can, they are freed once the kernels
    have read them, before the gradients are allocated.
    """
    take_q, take_kv, take_do, take_res = map(buffers.taker, one.operands)
    batch, (dq, dkv), slot = one.batch, one.results, one.state
    stateful = backend if keeps_state(backend) else None

    def operands(state: State) -> BackwardOperands:
        (q,), _ = take_q(state)
        (k, v), _ = take_kv(state)
        (dout,), dlse = take_do(state)
        (out,), (lse,) = take_res(state)
        for number in free:
            state.buffers[number] = None
        return BackwardOperands(dout, q, k, v, out, lse, dlse[0] if dlse else None)

    def launch(state: State) -> None:
        if stateful is None:
            part = backward_letting_go(backend, [operands(state)], batch, state.options)
        else:
            part = stateful.backward_with_state(operands(state), batch, state.options, state.opaque[slot])
        state.buffers[dq], state.buffers[dkv] = Tensors((part.dq,), ()), Tensors((part.dk, part.dv), ())

    return launch
