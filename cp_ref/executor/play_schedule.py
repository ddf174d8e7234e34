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

from cp_ref.contract.group import Group
from cp_ref.contract.process_groups import during
from cp_ref.contract.score_inputs import PLAIN, ScoreInputs
from cp_ref.contract.tensors import wide_dtype
from cp_ref.executor.rank_tensors import World
from cp_ref.executor.tile_attention import tile_backward, tile_forward, visible_pairs
from cp_ref.executor.tile_places import pair_scores
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import RankSchedule, Schedule
from cp_ref.tracing.recorder import SILENT, Recorder

__all__ = ["Results", "run_backward", "run_forward", "run_rank_schedule"]


class Results(NamedTuple):
    """A rank's results at the end of the forward pass; packed rows."""

    out: torch.Tensor  # [t, h_q, d_v], float32 or float64, 0 in padding and tail.
    lse: torch.Tensor  # [t, h_q], -inf in padding and tail; no sink in it yet
    max_logit: torch.Tensor  # [h_q], over this rank's tiles
    kept: dict[str, tuple[torch.Tensor, ...]]  # the operands that the schedule saves for the backward pass


def run_rank_schedule(
    direction: str,
    rank_schedule: RankSchedule,
    world: World,
    group: Group,
    compute: Callable[[Sequence[int]], None],
    recorder: Recorder = SILENT,
) -> None:
    """Play the steps of one direction, "forward" or "backward". `compute` does one tile, a row of `Tiles`, with the
    world's operands and adds to its results.
    """
    for number, step in enumerate(rank_schedule):
        where = f"{direction}, step {number} of {len(rank_schedule)}"
        recorder.step(number)
        sends = [parcel for message in step.sends for parcel in world.pack(message)]
        boxes = [world.boxes(message) for message in step.recvs]
        with during(where):
            pending = group.exchange(sends, [parcel for box in boxes for parcel in box])
        for tile in step.tiles.rows():
            compute(tile)
        with during(where):
            pending.wait()
        for message, box in zip(step.recvs, boxes, strict=True):
            world.unpack(message, box)
            recorder.received(world, message, box)
    recorder.step(len(rank_schedule))


def run_forward(
    problem: Problem,
    schedule: Schedule,
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inputs: ScoreInputs = PLAIN,
    recorder: Recorder = SILENT,
) -> Results:
    """This rank's share of the forward pass.

    q [t_q, h_q, d_qk], k [t_kv, h_kv, d_qk], v [t_kv, h_kv, d_v]: this rank's packed slices, a tail allowed.
    inputs: what scores depend on besides q and k. recorder: sees every intermediate.
    """
    recorder.begin("forward")
    recorder.own("given", q=q, k=k, v=v)
    wide = wide_dtype(q.dtype)
    world = World(problem.workload, group.rank, q.device)
    world.put_own("q", q)
    world.put_own("kv", k, v)
    world.start_result("out", ((problem.heads_q, problem.d_v), wide, 0.0), ((problem.heads_q,), wide, float("-inf")))
    max_logit = q.new_full((problem.heads_q,), float("-inf"), dtype=wide)

    def compute(tile: Sequence[int]) -> None:
        rows, columns, heads, kv_heads = _slices(world, tile)
        (q_all,), (k_all, v_all) = world.tensors["q"], world.tensors["kv"]
        part = tile_forward(
            q_all[rows, heads].to(wide),
            k_all[columns, kv_heads].to(wide),
            v_all[columns, kv_heads].to(wide),
            _visible(world, tile),
            problem.scores,
            pair_scores(problem, inputs, tile, q.device),
        )
        recorder.tile(tile, out=part.out, lse=part.lse)
        world.add("out", rows, heads, part.out, part.lse)
        max_logit[heads] = torch.maximum(max_logit[heads], part.max_logit)

    run_rank_schedule("forward", schedule.forward[group.rank], world, group, compute, recorder)
    out = torch.zeros(q.shape[0], problem.heads_q, problem.d_v, dtype=wide, device=q.device)
    lse = out.new_full(out.shape[:2], float("-inf"))
    world.own("out", out, lse)
    recorder.own("merged", out=out, lse=lse)
    return Results(out, lse, max_logit, {kind: world.tensors[kind] for kind in schedule.saved})


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
    kept: dict[str, tuple[torch.Tensor, ...]],
    inputs: ScoreInputs = PLAIN,
    recorder: Recorder = SILENT,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's share of the backward pass.

    q, k, v as in `run_forward`; dout [t_q, h_q, d_v]; lse [t_q, h_q] final, sinks included; delta [t_q, h_q] is
    sum(dout * out) - dlse; kept: from the forward pass; inputs: as in the forward pass; recorder: sees every
    intermediate. Returns dq, dk, dv in float32 or float64, 0 in padding and tail.
    """
    recorder.begin("backward")
    recorder.own("given", dout=dout, lse=lse, delta=delta)
    wide = wide_dtype(q.dtype)
    world = World(problem.workload, group.rank, q.device)
    world.put_own("q", q)
    world.put_own("kv", k, v)
    world.tensors |= kept
    world.put_own("do", dout, lse, delta)
    world.start_result("dq", ((problem.heads_q, problem.d_qk), wide, 0.0))
    kv_shapes = (problem.heads_kv, problem.d_qk), (problem.heads_kv, problem.d_v)
    world.start_result("dkv", *((shape, wide, 0.0) for shape in kv_shapes))

    def compute(tile: Sequence[int]) -> None:
        rows, columns, heads, kv_heads = _slices(world, tile)
        (q_all,), (k_all, v_all), (dout_all, lse_all, delta_all) = (world.tensors[kind] for kind in ("q", "kv", "do"))
        part = tile_backward(
            q_all[rows, heads].to(wide),
            k_all[columns, kv_heads].to(wide),
            v_all[columns, kv_heads].to(wide),
            dout_all[rows, heads].to(wide),
            lse_all[rows, heads],
            delta_all[rows, heads],
            _visible(world, tile),
            problem.scores,
            pair_scores(problem, inputs, tile, q.device),
        )
        dk, dv = (_by_kv_head(x, kv_heads, problem.heads_kv) for x in (part.dk, part.dv))
        recorder.tile(tile, dq=part.dq, dk=dk, dv=dv)
        world.add("dq", rows, heads, part.dq)
        world.add("dkv", columns, slice(None), dk, dv)

    run_rank_schedule("backward", schedule.backward[group.rank], world, group, compute, recorder)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    world.own("dq", dq)
    world.own("dkv", dk, dv)
    recorder.own("merged", dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


def _slices(world: World, tile: Sequence[int]) -> tuple[slice, slice, slice, torch.Tensor]:
    """A tile's query rows, key rows, query heads, and for each of these the number of its kv head."""
    _, q_start, q_stop, k_start, k_stop, head_start, head_stop = tile
    kv_heads = torch.arange(head_start, head_stop, device=world.device) // world.work.group_size
    return slice(q_start, q_stop), slice(k_start, k_stop), slice(head_start, head_stop), kv_heads


def _visible(world: World, tile: Sequence[int]) -> torch.Tensor:
    """Which pairs of a tile are visible, bool [n, m]: those in the diagonal band of its attention slice."""
    area, q_start, q_stop, k_start, k_stop, *_ = tile
    lo, hi = int(world.work.areas.lo[area]), int(world.work.areas.hi[area])
    return visible_pairs(slice(q_start, q_stop), slice(k_start, k_stop), lo, hi, world.device)


def _by_kv_head(grads: torch.Tensor, kv_heads: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """Sum the query heads' gradients [m, h, d] of K or V into the kv heads they share: [m, h_kv, d]."""
    return grads.new_zeros(grads.shape[0], heads_kv, grads.shape[2]).index_add_(1, kv_heads, grads)
