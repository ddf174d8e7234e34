"""The instructions of a pass as operations, for calls of one shape."""

from __future__ import annotations

from collections.abc import Sequence

from cp_fast.backends import Backend
from cp_fast.compile.executable_plan import PassPlan
from cp_fast.compile.instructions import Accumulate, Copy, Free, Instruction, Launch, Recv, Send, Wait
from cp_fast.movers.rows import Rows
from cp_fast.movers.select_kernels import kernels
from cp_fast.runtime.operations.copy_operations import copy, go_together
from cp_fast.runtime.operations.exchange_operations import exchange, wait
from cp_fast.runtime.operations.launch_operations import backward_launch, forward_launch
from cp_fast.runtime.operations.sum_operations import accumulate, free
from cp_fast.runtime.pass_buffers import PassBuffers
from cp_fast.runtime.row_positions import RowPositions
from cp_fast.runtime.tensors import Operation, Shapes
from cp_ref.spec import Group

__all__ = ["resolve"]


def resolve(
    plan: PassPlan[Rows], shapes: Shapes, backend: Backend, positions: RowPositions, group: Group
) -> list[Operation]:
    """The instructions as operations. Messages that are posted together form one, and so do copies that `go_together`;
    what is freed between these is freed after them.
    """
    buffers, instructions = PassBuffers.of(plan, shapes, kernels(shapes.device.type)), plan.instructions
    sums = plan.accumulations
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
        elif isinstance(one, Launch) and plan.direction == "forward":
            found.append(forward_launch(buffers, backend, positions, one))
        elif isinstance(one, Launch):
            freed = following.buffers if isinstance(following, Free) else ()
            found.append(backward_launch(buffers, backend, positions, one, freed))
        elif isinstance(one, Accumulate):
            found.append(accumulate(buffers, one, of=sums.get(one.target.buffer)))
        else:
            (freed_later if copies else found).append(free(one))
        if copies and not _continue(buffers, copies, instructions[n + 1 :]):
            found += [copy(buffers, copies), *freed_later]
            copies, freed_later = [], []
        if (sends or recvs) and not isinstance(following, Send | Recv):
            where = f"{plan.direction}, step {one.step} of {plan.steps}"
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
