"""Playing one rank's schedule: post the step's messages, compute its tiles while they travel, take them in.

The same few lines run every legal schedule, in both directions; schedules differ only in data. Messages of any kind may
go from any rank to any other; a tile may have any query heads, also some of those that share a kv head.

The same for all schedules, and not part of any:

    kv heads     a query head reads the kv head of its group, wherever that lies, and adds its gradients to it
    max_logit    each rank's largest logit over its tiles; the caller takes the maximum over all ranks
    the sink     is no key and in no tile: the caller adds it to the merged out and lse, before the backward pass
                 begins, and reduces its gradient over all ranks
    delta        sum(dout * out) - dlse, by row: the caller computes it where the rows are owned; with dout and the
                 final lse it is the operand "do"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cp_ref.batches.tensors import wide_dtype
from cp_ref.calls.scores import PLAIN, ScoreTensors
from cp_ref.groups.group import Group
from cp_ref.groups.process_groups import error_context
from cp_ref.reference.executor.rank_tensors import RankTensors
from cp_ref.reference.executor.tile_attention import pair_scores, tile_backward, tile_forward
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import RankSchedule, Schedule

__all__ = ["RankResults", "run_backward", "run_forward", "run_rank_schedule"]


class RankResults(NamedTuple):
    """A rank's results at the end of the forward pass; packed rows."""

    out: torch.Tensor  # [t, h_q, d_v], float32 or float64, 0 in padding and tail.
    lse: torch.Tensor  # [t, h_q], -inf in padding and tail; no sink in it yet
    max_logit: torch.Tensor  # [h_q], over this rank's tiles
    saved: dict[str, tuple[torch.Tensor, ...]]  # the operands that the schedule saves for the backward pass


def run_rank_schedule(
    direction: str,
    rank_schedule: RankSchedule,
    held: RankTensors,
    group: Group,
    compute: Callable[[Sequence[int]], None],
) -> None:
    """Play the steps of one direction, "forward" or "backward". `compute` does one tile, a row of `Tiles`, with the
    operands that are held, and adds to the results.
    """
    for number, step in enumerate(rank_schedule):
        held.step = number
        where = f"{direction}, step {number} of {len(rank_schedule)}"
        sends = [parcel for message in step.sends for parcel in held.pack(message)]
        boxes = [held.boxes(message) for message in step.recvs]
        with error_context(where):
            pending = group.exchange(sends, [parcel for box in boxes for parcel in box])
        for tile in step.tiles.rows():
            compute(tile)
        with error_context(where):
            pending.wait()
        for message, box in zip(step.recvs, boxes, strict=True):
            held.unpack(message, box)


def run_forward(
    problem: Problem,
    schedule: Schedule,
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inputs: ScoreTensors = PLAIN,
    held: RankTensors | None = None,
) -> RankResults:
    """This rank's share of the forward pass.

    q [t_q, h_q, d_qk], k [t_kv, h_kv, d_qk], v [t_kv, h_kv, d_v]: this rank's packed slices, a tail allowed.
    inputs: what scores depend on besides q and k. held: empty tensors of the rank; a trace gives some that record.
    """
    held = held or RankTensors(problem.workload, group.rank, q.device)
    wide, options = wide_dtype(q.dtype), problem.scores
    held.put_own("q", q)
    held.put_own("kv", k, v)
    held.start_result("out", ((problem.heads_q, problem.d_v), wide, 0.0), ((problem.heads_q,), wide, float("-inf")))
    max_logit = q.new_full((problem.heads_q,), float("-inf"), dtype=wide)

    def compute(tile: Sequence[int]) -> None:
        q_tile, k_tile, v_tile = held.of_tile(tile, wide, "q", "kv")
        part = tile_forward(
            q_tile,
            k_tile,
            v_tile,
            held.visible(tile),
            options,
            pair_scores(problem, inputs, tile, q.device),
        )
        held.add_tile(tile, "out", part.out, part.lse)
        *_, head_start, head_stop = tile
        heads = slice(head_start, head_stop)
        max_logit[heads] = torch.maximum(max_logit[heads], part.max_logit)

    run_rank_schedule("forward", schedule.forward[group.rank], held, group, compute)
    out = torch.zeros(q.shape[0], problem.heads_q, problem.d_v, dtype=wide, device=q.device)
    lse = out.new_full(out.shape[:2], float("-inf"))
    held.copy_out("out", out, lse)
    return RankResults(out, lse, max_logit, {kind: held.tensors[kind] for kind in schedule.saved})


def run_backward(
    problem: Problem,
    schedule: Schedule,
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    saved: dict[str, tuple[torch.Tensor, ...]],
    inputs: ScoreTensors = PLAIN,
    held: RankTensors | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's share of the backward pass.

    q, k, v as in `run_forward`; dout [t_q, h_q, d_v]; lse [t_q, h_q] final, sinks included; delta [t_q, h_q]
    from `row_delta`; saved: from the forward pass; inputs, held: as in the forward pass. Returns dq, dk, dv in
    float32 or float64, 0 in padding and tail.
    """
    held = held or RankTensors(problem.workload, group.rank, q.device)
    wide, options = wide_dtype(q.dtype), problem.scores
    held.put_own("q", q)
    held.put_own("kv", k, v)
    held.tensors |= saved
    held.put_own("do", dout, lse, delta)
    held.start_result("dq", ((problem.heads_q, problem.d_qk), wide, 0.0))
    kv_shapes = (problem.heads_kv, problem.d_qk), (problem.heads_kv, problem.d_v)
    held.start_result("dkv", *((shape, wide, 0.0) for shape in kv_shapes))

    def compute(tile: Sequence[int]) -> None:
        q_tile, k_tile, v_tile, dout_tile, lse_tile, delta_tile = held.of_tile(tile, wide, "q", "kv", "do")
        part = tile_backward(
            q_tile,
            k_tile,
            v_tile,
            dout_tile,
            lse_tile,
            delta_tile,
            held.visible(tile),
            options,
            pair_scores(problem, inputs, tile, q.device),
        )
        held.add_tile(tile, "dq", part.dq)
        held.add_tile(tile, "dkv", part.dk, part.dv)

    run_rank_schedule("backward", schedule.backward[group.rank], held, group, compute)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    held.copy_out("dq", dq)
    held.copy_out("dkv", dk, dv)
    return dq, dk, dv
