"""Running a program: one loop over its operations.

The operations of a pass are resolved on the first call of a shape. A plan keeps them for all calls of this shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from cp_fast.compile.packing import Packing
from cp_fast.compile.program import (
    OWN,
    Accumulate,
    Copy,
    Free,
    Instruction,
    Launch,
    Program,
    Programs,
    Recv,
    Send,
    Wait,
)
from cp_fast.kernels.attention.backend_protocol import Backend, LaunchOptions
from cp_fast.movers.mover_protocol import Rows
from cp_fast.movers.select_movers import kernels
from cp_fast.runtime.operations import (
    accumulate,
    backward_launch,
    copy,
    exchange,
    forward_launch,
    free,
    go_together,
    wait,
)
from cp_fast.runtime.pass_buffers import Operation, PassBuffers, Shapes, State, Tensors
from cp_fast.runtime.prepared_exchange import Prepares
from cp_fast.runtime.row_positions import RowPositions
from cp_ref.batches.tensors import wide_dtype
from cp_ref.calls.scores import ScoreTensors
from cp_ref.groups.group import Group
from cp_ref.schedules.schedule import side_of

__all__ = [
    "CompiledCall",
    "ForwardResults",
    "Launcher",
    "resolve",
]

# ---- from instructions to operations
#
# The instructions of a pass as operations, for calls of one shape.


class Launcher(NamedTuple):
    """What launches need besides their operands. `positions`: of the rows of the launches."""

    backend: Backend
    positions: RowPositions


def resolve(program: Program[Rows], shapes: Shapes, group: Group, launcher: Launcher | None = None) -> list[Operation]:
    """The instructions as operations. Messages that are posted together form one, and so do copies that `go_together`.
    Buffers that are freed between them are freed after them.

    launcher: None for a program without launches.
    """
    buffers, instructions = PassBuffers.of(program, shapes, kernels(shapes.device.type)), program.instructions
    sums = program.accumulations
    found, freed_later = list[Operation](), list[Operation]()
    sends, recvs, copies = list[Send[Rows]](), list[Recv](), list[Copy[Rows]]()
    for n, one in enumerate(instructions):
        following = instructions[n + 1] if n + 1 < len(instructions) else None
        if isinstance(one, Send):
            sends.append(one)
        elif isinstance(one, Recv):
            recvs.append(one)
        elif isinstance(one, Wait):
            found.append(wait)
        elif isinstance(one, Copy):
            copies.append(one)
        elif isinstance(one, Launch) and program.direction == "forward":
            assert launcher is not None
            found.append(forward_launch(buffers, *launcher, one))
        elif isinstance(one, Launch):
            assert launcher is not None
            freed = following.buffers if isinstance(following, Free) else ()
            found.append(backward_launch(buffers, *launcher, one, freed))
        elif isinstance(one, Accumulate):
            found.append(accumulate(buffers, one, of=sums.get(one.target.buffer)))
        else:
            (freed_later if copies else found).append(free(one))
        if copies and not _continue(buffers, copies, instructions[n + 1 :]):
            found += [copy(buffers, copies), *freed_later]
            copies, freed_later = [], []
        if (sends or recvs) and not isinstance(following, Send | Recv):
            where = f"{program.direction}, step {one.step} of {program.steps}"
            found.append(exchange(buffers, where, sends, recvs, group, hidden=_is_hidden(instructions[n + 1 :])))
            sends, recvs = [], []
    return found


def _continue(buffers: PassBuffers, copies: Sequence[Copy[Rows]], rest: Sequence[Instruction[Rows]]) -> bool:
    """Whether the next instruction that frees nothing is one more copy for their launch."""
    following = next((one for one in rest if not isinstance(one, Free)), None)
    return isinstance(following, Copy) and all(go_together(buffers, one, following) for one in copies)


def _is_hidden(rest: Sequence[Instruction[Rows]]) -> bool:
    """Whether a kernel is launched before the next wait."""
    for one in rest:
        if isinstance(one, Launch | Wait):
            return isinstance(one, Launch)
    return False


# ---- compiled calls


class ForwardResults(NamedTuple):
    """The results of a forward pass, sinks included: of `CompiledCall` as packed rows, else in the user's format."""

    out: torch.Tensor  # [t, h_q, d_v], in q's dtype, 0 for rows that see nothing.
    lse: torch.Tensor  # [h_q, t], -inf for rows that see nothing.
    max_logit: torch.Tensor | None  # [h_q], over this rank's launches, or over all ranks; None if nobody asked for it.
    kept: list[torch.Tensor]  # Tensors of other buffers for the backward pass.


class CompiledCall:
    """A plan's two passes, compiled for tensors of one shape, dtype and device.

    Args:
        positions: of the rows of the launches.
        transport: the group of the messages, if it prepares exchanges. Any other group is given with each call, so that
            a plan does not keep it alive.
        sizes: the packed rows of q, and of k and v.
    """

    __slots__ = ("_operations", "_positions", "_shapes", "backend", "instructions", "packing", "transport")

    def __init__(
        self,
        packing: Packing,
        instructions: Programs[Rows],
        positions: RowPositions,
        backend: Backend,
        transport: Prepares | None,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._positions = positions
        self.packing, self.instructions, self.backend, self.transport = packing, instructions, backend, transport
        d_qk, d_v = packing.problem.d_qk, packing.problem.d_v
        dims = {"q": (d_qk,), "kv": (d_qk, d_v), "do": (d_v,), "res": (d_v,), "out": (d_v,), "sink": ()}
        dims |= {"dq": (d_qk,), "dkv": (d_qk, d_v)}
        axes = {kind: [(-1, d) for d in some] for kind, some in dims.items()}
        dtypes = {kind: (dtype,) * len(some) for kind, some in dims.items()}
        rows = {kind: sizes[side_of(kind) == "kv"] for kind in dims}
        shapes = Shapes(rows, axes, dtypes, device, instructions.spare_rows, frozenset({"res", "out"}))
        self._shapes = shapes, replace(shapes, with_column=frozenset({"res", "out", "do"}))
        self._operations: dict[tuple[str, bool], list[Operation]] = {}

    def forward(
        self,
        group: Group,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        scores: ScoreTensors | None = None,
    ) -> ForwardResults:
        """Run the forward pass. Its inputs are this rank's packed slices, contiguous, a tail allowed: `q` [t_q, h_q,
        d_qk], k [t_kv, h_kv, d_qk], v [t_kv, h_kv, d_v]. The argument sink [h_q] has each head's sink logit. scores:
        what scores depend on besides q and k, if there is any; slopes are of packed heads.
        """
        program = self.instructions.forward
        state = self._state(program, group, scores=scores)
        state.buffers[OWN["q"]], state.buffers[OWN["kv"]] = Tensors((q,), ()), Tensors((k, v), ())
        state.buffers[OWN["sink"]] = sink
        for operation in self._pass(program, group):
            operation(state)
        (out,), lse = self._result(state, program, "out")
        kept = [x for number, _ in self.instructions.kept for some in state.buffers[number] for x in some]
        return ForwardResults(out, lse[0], _largest(state, q), kept)

    def backward(
        self,
        group: Group,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        kept: Sequence[torch.Tensor],
        scores: ScoreTensors | None = None,
        *,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute dq, dk, dv in the input's dtype, 0 in padding and tail.

        Args:
            inputs: q, k, v as in `forward`; None where the plan does not need them.
            dout, out: [t_q, h_q, d_v], all own rows; out is final.
            dlse, lse: [h_q, t_q]; dlse is None for zero on every rank.
            kept: see `ForwardResults`.
            scores: as in `forward`.
        """
        program = self.instructions.backward
        state = self._state(program, group, deterministic=deterministic, scores=scores)
        if inputs is not None:
            state.buffers[OWN["q"]], state.buffers[OWN["kv"]] = Tensors(inputs[:1], ()), Tensors(inputs[1:], ())
        state.buffers[OWN["do"]] = Tensors((dout,), () if dlse is None else (dlse,))
        state.buffers[OWN["res"]] = Tensors((out,), (lse,))
        rest = iter(kept)
        for _, number in self.instructions.kept:
            kind = program.buffers[number].kind
            rows = [next(rest) for _ in range(2 if kind == "kv" else 1)]
            state.buffers[number] = Tensors(rows, [next(rest)] if kind == "res" else ())
        for operation in self._pass(program, group, has_dlse=dlse is not None):
            operation(state)
        (dq,), _ = self._result(state, program, "dq")
        (dk, dv), _ = self._result(state, program, "dkv")
        return dq, dk, dv

    def _state(
        self, program: Program[Rows], group: Group, *, deterministic: bool = False, scores: ScoreTensors | None
    ) -> State:
        options = LaunchOptions(self.packing.problem.scores, deterministic)
        return State(len(program.buffers), self.transport or group, options, scores)

    def _pass(self, program: Program[Rows], group: Group, *, has_dlse: bool = False) -> list[Operation]:
        """A pass as operations: those of an earlier call, or new ones."""
        key = program.direction, has_dlse
        found = self._operations.get(key)
        if found is None:
            shapes, comm = self._shapes[has_dlse], self.transport or group
            launcher = Launcher(self.backend, self._positions)
            found = self._operations[key] = resolve(program, shapes, comm, launcher)
        return found

    def _result(self, state: State, program: Program[Rows], kind: str) -> Tensors:
        """The rank's own results of a kind: zeros for rows without a result."""
        number, (shapes, _) = program.results[kind], self._shapes
        spec = program.buffers[number]
        rows, columns = state.buffers[number] or shapes.allocation(spec).nothing()
        if self.instructions.spare_rows:
            size = shapes.own_rows(spec)
            return Tensors([x[:size] for x in rows], [x[:, :size].contiguous() for x in columns])
        return Tensors(rows, columns)


def _largest(state: State, q: torch.Tensor) -> torch.Tensor | None:
    """The largest logit of each head over all launches; None if the kernel library lacks it."""
    largest = None
    for first, part in state.max_logit:
        if part is None:
            return None
        if largest is None:
            largest = _no_logit(q)
        here = largest[first : first + len(part)]
        torch.maximum(here, part, out=here)
    return _no_logit(q) if largest is None else largest


def _no_logit(q: torch.Tensor) -> torch.Tensor:
    return torch.full((q.shape[1],), float("-inf"), dtype=wide_dtype(q.dtype), device=q.device)
