"""The most bytes that a rank holds above its inputs, from what it does in each step. Standard library alone.

Counted: received operands until the step after theirs (what is exchanged in a2a until the end of the backward pass),
results that travel, the partial results of a step's launches, sums, the outputs, and what a backward kernel adds up in:
dq in float32, and with grouped heads dk and dv. Not counted: lanes of peers' memory, tables, what the allocator rounds,
and that the buffers of heads that come in stages go early.
"""

from __future__ import annotations

from cp_fast.cost.counts import RankCounts, StepCounts, item_bytes
from cp_ref.spec import Problem, slice_rows

__all__ = ["most_bytes"]

_WORKSPACE = 4  # bytes of a number


def most_bytes(problem: Problem, counts: RankCounts) -> int:
    """Over both passes; q, k, v and dout are inputs.

    >>> from cp_fast.cost.counts import count_rank
    >>> from cp_ref.spec import Sequence
    >>> alone = Problem(1, (Sequence(8, 8, 8, 8),), heads_q=2, heads_kv=2, d_qk=4, d_v=4, dtype="bfloat16")
    >>> most_bytes(alone, count_rank(alone, 0))  # out and lse, dq, dk, dv, and dq in float32
    832
    """
    item, wide = item_bytes(problem)
    batch = 1 if problem.qkv_format == "thd" else len(problem.sequences)
    own, own_kv = (batch * slice_rows(problem, side) for side in ("q", "kv"))
    own, own_kv = own * problem.heads_q, own_kv * problem.heads_kv * (problem.d_qk + problem.d_v)
    out, kept = own * (problem.d_v * item + wide), 0
    held: list[int] = []
    before = 0
    for step in counts.forward:
        results = sum(launch.rows * launch.heads * (problem.d_v * item + wide) for launch in step.launches)
        kept += step.kept
        held.append(out + kept + before + step.operands + _travelling(step) + step.gathered + results)
        before = step.operands
    sums = before = 0
    for step in counts.backward:
        kept += step.kept
        launch = _launch_bytes(problem, step, before + step.gathered, item)
        held.append(out + kept + sums + step.operands + _travelling(step) + launch)
        if step.launches:
            sums = max(sums, own * problem.d_qk * (wide if sums else item) + own_kv * item)
        before = step.operands
    return max(held)


def _travelling(step: StepCounts) -> int:
    """What is sent, and results that are received."""
    return sum(step.sent.values()) - step.operands + sum(step.received.values()) - step.operands


def _launch_bytes(problem: Problem, step: StepCounts, operands: int, item: int) -> int:
    """The most that the launches of a step hold, these operands included. A kernel reads its operands and adds up; then
    dk and dv are rounded, the operands gone, and at last dq.
    """
    most = yielded = 0
    for launch in step.launches:
        dq, keys = launch.rows * launch.heads * problem.d_qk, launch.keys * launch.heads_kv
        dkv = keys * (problem.d_qk + problem.d_v)
        grouped = dkv if launch.heads > launch.heads_kv else 0
        adds = _WORKSPACE * (dq + grouped)
        rounds = max(adds + keys * problem.d_qk * item, _WORKSPACE * dq + (dq + dkv) * item)
        most = max(most, yielded + max(adds + operands, rounds))
        yielded += (dq + dkv) * item
    return max(most, operands)
