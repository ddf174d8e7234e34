"""The two passes of attention: one loop over the operations of a program, and the user's format around it.

The operations of a pass are resolved on the first call of a shape. A plan keeps them for all calls of this shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
from cp_fast.movers.mover_protocol import Rows, take
from cp_fast.movers.select_movers import movers_for
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
from cp_fast.runtime.pass_buffers import Operation, PassBuffers, Shapes, State, Tensors, is_mask
from cp_fast.runtime.prepared_exchange import Prepares
from cp_fast.runtime.row_positions import RowPositions
from cp_ref.batches.tensors import wide_dtype
from cp_ref.calls.scores import ScoreTensors
from cp_ref.groups.collectives import all_reduce_max, offset_grad
from cp_ref.groups.context import ContextParallel
from cp_ref.groups.group import Group
from cp_ref.schedules.schedule import side_of
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "CompiledCall",
    "ForwardResults",
    "Launcher",
    "backward_pass",
    "forward_pass",
    "resolve",
    "sink_shares",
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
    buffers, instructions = PassBuffers.of(program, shapes, movers_for(shapes.device.type)), program.instructions
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


class CompiledCall:
    """A plan's two passes, compiled for tensors of one shape, dtype and device.

    Args:
        positions: of the rows of the launches.
        transport: the group of the messages, if it prepares exchanges. Any other group is given with each call, so that
            a plan does not keep it alive.
        sizes: the packed rows of q, and of k and v.

    Attributes:
        kept_buffers: see `Programs.kept_buffers`.
        has_sink: whether each head's denominator has a sink.
        position_free: see `Problem.position_free_scores`.
        wide: the dtype of sums.
    """

    __slots__ = (
        *("_operations", "_options", "_positions", "_shapes"),
        *("backend", "has_sink", "kept_buffers", "packing", "position_free", "programs", "transport", "wide"),
    )

    def __init__(
        self,
        packing: Packing,
        programs: Programs[Rows],
        positions: RowPositions,
        backend: Backend,
        transport: Prepares | None,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._positions = positions
        self.packing, self.programs, self.backend, self.transport = packing, programs, backend, transport
        self.kept_buffers, self.has_sink = programs.kept_buffers, packing.problem.softmax_type != "vanilla"
        self.position_free, self.wide = packing.problem.position_free_scores, wide_dtype(dtype)
        d_qk, d_v = packing.problem.d_qk, packing.problem.d_v
        dims = {"q": (d_qk,), "kv": (d_qk, d_v), "do": (d_v,), "res": (d_v,), "out": (d_v,), "sink": ()}
        dims |= {"dq": (d_qk,), "dkv": (d_qk, d_v)}
        axes = {kind: [(-1, d) for d in some] for kind, some in dims.items()}
        dtypes = {kind: (dtype,) * len(some) for kind, some in dims.items()}
        rows = {kind: sizes[side_of(kind) == "kv"] for kind in dims}
        shapes = Shapes(rows, axes, dtypes, device, programs.spare_rows, frozenset({"res", "out"}))
        self._shapes = shapes, replace(shapes, with_column=frozenset({"res", "out", "do"}))
        self._options = [LaunchOptions(packing.problem.scores, deterministic) for deterministic in (False, True)]
        self._operations: dict[tuple[str, bool], list[Operation]] = {}

    def run(
        self,
        program: Program[Rows],
        group: Group,
        own: Mapping[int, Any],
        scores: ScoreTensors | None,
        *,
        deterministic: bool = False,
        has_dlse: bool = False,
    ) -> State:
        """Run one of the two programs. own: the buffers that are filled before it begins, by number."""
        comm, key = self.transport or group, (program.direction, has_dlse)
        if (operations := self._operations.get(key)) is None:
            launcher = Launcher(self.backend, self._positions)
            operations = self._operations[key] = resolve(program, self._shapes[has_dlse], comm, launcher)
        buffers: list[Any] = [None] * len(program.buffers)
        for number, tensors in own.items():
            buffers[number] = tensors
        state = State(buffers, comm, self._options[deterministic], scores)
        for operation in operations:
            operation(state)
        return state

    def result(self, state: State, program: Program[Rows], kind: str) -> Tensors:
        """The rank's own results of a kind: zeros for rows without a result."""
        number, (shapes, _) = program.results[kind], self._shapes
        spec = program.buffers[number]
        rows, columns = state.buffers[number] or shapes.allocation(spec).nothing()
        if self.programs.spare_rows:
            size = shapes.own_rows(spec)
            return Tensors([x[:size] for x in rows], [x[:, :size].contiguous() for x in columns])
        return Tensors(rows, columns)


# ---- the two passes of attention
#
# user's format -> packed rows -> the plan's programs -> user's format


class ForwardResults(NamedTuple):
    """The results of a forward pass in the user's format, sinks included."""

    out: torch.Tensor  # In q's dtype, 0 for rows that see nothing.
    lse: torch.Tensor  # -inf for rows that see nothing.
    max_logit: torch.Tensor | None  # [h_q], over all ranks; None if nobody asked for it, or the library lacks it.
    kept: list[torch.Tensor]  # Tensors of other buffers for the backward pass.


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
    packing, program = call.packing, call.programs.forward
    scores = None if scores is None else packing.scores_in(scores)
    q = packing.pack(q)
    own = {
        OWN["q"]: Tensors((q,), ()),
        OWN["kv"]: Tensors((packing.pack(k), packing.pack(v)), ()),
        OWN["sink"]: _sink(packing, offset, call.wide, q.device) if call.has_sink else None,
    }
    state = call.run(program, cp.comm, own, scores)
    (out,), (lse,) = call.result(state, program, "out")
    kept = [x for number, _ in call.kept_buffers for some in state.buffers[number] for x in some]
    largest = _largest(state, q) if return_max_logit else None
    if largest is not None:
        largest = all_reduce_max(cp.comm, packing.heads_out(largest).amax(dim=0))
    return ForwardResults(packing.unpack(out), packing.unpack_lse(lse), largest, kept)


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

    inputs: q, k, v if `Programs.needs_inputs`. out, lse, kept: the forward pass's results. dout, dlse: their gradients,
    None for zero. scores: as in the forward pass. lse_given: whether the caller has lse. Then some rank may have its
    gradient, and if its rows are sent, all ranks send one.
    """
    packing, program = call.packing, call.programs.backward
    scores = None if scores is None else packing.scores_in(scores)
    if dlse is not None and Feature.LSE_GRADIENT not in call.backend.features:
        raise Unsupported("a gradient through lse", {f"backend {call.backend.name!r}": {Feature.LSE_GRADIENT}})
    packed_out, packed_lse = packing.pack(out), packing.pack_lse(lse).contiguous()
    dlse = None if dlse is None else packing.pack_lse(dlse.detach()).contiguous()
    if dlse is None and lse_given and call.programs.sends_do:
        dlse = torch.zeros_like(packed_lse)
    dout = torch.zeros_like(packed_out) if dout is None else packing.pack(dout.detach())
    if scores is not None and scores.score_mod is not None:
        dout, dlse = _without_blind_rows(call, packed_out, packed_lse, offset, dout, dlse)
    doffset = None
    if offset is not None and wants_offset:
        mine = _offset_gradient(call, offset, dout, packed_out, packed_lse, dlse)
        doffset = offset_grad(cp, mine).to(offset.dtype)
    own = {
        OWN["do"]: Tensors((dout,), () if dlse is None else (dlse,)),
        OWN["res"]: Tensors((packed_out,), (packed_lse,)),
    }
    if inputs is not None:
        q, k, v = inputs
        own |= {OWN["q"]: Tensors((packing.pack(q),), ()), OWN["kv"]: Tensors((packing.pack(k), packing.pack(v)), ())}
    rest = iter(kept)
    for _, number in call.kept_buffers:
        kind = program.buffers[number].kind
        rows = [next(rest) for _ in range(2 if kind == "kv" else 1)]
        own[number] = Tensors(rows, [next(rest)] if kind == "res" else ())
    how = {"deterministic": deterministic, "has_dlse": dlse is not None}
    state = call.run(program, cp.comm, own, scores, **how)
    (dq,), _ = call.result(state, program, "dq")
    (dk, dv), _ = call.result(state, program, "dkv")
    return packing.unpack(dq), packing.unpack(dk), packing.unpack(dv), doffset


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


def _without_blind_rows(
    call: CompiledCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    offset: torch.Tensor | None,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dout and dlse, 0 in the rows whose keys a score_mod hides all: kernels multiply what is there, NaN included, by
    weights of 0. Rows that the mask hides are in no launch.
    """
    if not call.has_sink:
        blind = lse == float("-inf")
        dlse = None if dlse is None else dlse.masked_fill(blind, 0.0)
    else:
        sink = _sink(call.packing, offset, lse.dtype, lse.device)
        blind = (lse == sink[:, None]) & (out == 0).all(dim=-1).t()
    return dout.masked_fill(blind.t()[..., None], 0.0), dlse


def _sink(packing: Packing, offset: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Each packed head's sink logit, where there is a sink."""
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
    real = call.programs.real_q_rows
    rows = slice(None) if is_mask(real) else real
    sink = _sink(call.packing, offset, lse.dtype, lse.device)
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
