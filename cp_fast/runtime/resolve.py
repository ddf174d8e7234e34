"""The instructions of a pass as operations, for calls of one shape."""

from __future__ import annotations

from collections.abc import Sequence

from cp_fast.backends import Backend
from cp_fast.compile.executable_plan import PassPlan
from cp_fast.compile.instructions import Accumulate, Copy, Free, Instruction, Launch, Recv, Send, Wait
from cp_fast.movers.rows import Rows
from cp_fast.movers.select_kernels import kernels
from cp_fast.runtime.operations.copy_operations import copy
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
    """Each instruction as an operation; messages that are posted together form one."""
    buffers, instructions = PassBuffers.of(plan, shapes, kernels(shapes.device.type)), plan.instructions
    sums = plan.accumulations
    found: list[Operation] = []
    sends, recvs = list[Send[Rows]](), list[Recv]()
    for n, one in enumerate(instructions):
        following = instructions[n + 1] if n + 1 < len(instructions) else None
        if isinstance(one, Send):
            sends.append(one)
        elif isinstance(one, Recv):
            recvs.append(one)
        elif isinstance(one, Wait):
            found.append(wait)
        elif isinstance(one, Copy):
            found.append(copy(buffers, one))
        elif isinstance(one, Launch) and plan.direction == "forward":
            found.append(forward_launch(buffers, backend, positions, one))
        elif isinstance(one, Launch):
            freed = following.buffers if isinstance(following, Free) else ()
            found.append(backward_launch(buffers, backend, positions, one, freed))
        elif isinstance(one, Accumulate):
            found.append(accumulate(buffers, one, of=sums.get(one.target.buffer)))
        else:
            found.append(free(one))
        if (sends or recvs) and not isinstance(following, Send | Recv):
            where = f"{plan.direction}, step {one.step} of {plan.steps}"
            found.append(exchange(buffers, where, sends, recvs, group, hidden=_is_hidden(instructions[n + 1 :])))
            sends, recvs = [], []
    return found


def _is_hidden(rest: Sequence[Instruction[Rows]]) -> bool:
    """Whether a kernel is launched before the next wait."""
    for one in rest:
        if isinstance(one, Launch | Wait):
            return isinstance(one, Launch)
    return False
