"""The compiler: a rank's schedule is lowered, and passes make the plan fast (`cp_fast.compile.pass_table` lists them).

Passes on tiles run while a step's tiles become launches (`cp_fast.compile.tiles.launches`), passes on instructions
after that.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cp_fast.compile.executable_plan import ExecutablePlan, PassPlan
from cp_fast.compile.index_tables import RowKey
from cp_fast.compile.link import linked
from cp_fast.compile.lowering.lower_schedule import Draft, lower
from cp_fast.compile.pass_table import is_on, skipped
from cp_fast.compile.passes.accumulate_late import accumulate_late
from cp_fast.compile.passes.free_early import free_early
from cp_fast.compile.passes.recv_in_place import recv_in_place
from cp_fast.compile.planning.choose_head_chunks import choose_head_chunks
from cp_fast.compile.planning.chosen_schedule import Schedules, chosen_rank_schedule
from cp_fast.compile.planning.fold_batch import fold_batch
from cp_fast.compile.tiles.windows import WindowRule, own_window
from cp_fast.movers.rows import Rows
from cp_fast.runtime.packed_tensors import Packing
from cp_ref.schedules.planners.make_schedule import saved_kinds
from cp_ref.schedules.problem import Problem

__all__ = ["compiled", "lowered", "optimized", "upload"]

_TILE = 128  # rows of a tile of FlashAttention 4
_LARGE = 2048  # query rows from which a tile of a packed batch keeps its own window


def lowered(
    packing: Packing, rank: int, schedules: Schedules, saved: tuple[str, ...], *, shares_keys: int = 0
) -> Draft:
    """One rank's part of a schedule, lowered.

    Args:
        saved: the kinds of operands that are kept between the passes.
        shares_keys: see `TileGroups`.
    """
    problem, packed = packing.problem, packing.packed_problem
    if packing.folded:
        schedules = fold_batch(schedules, problem)
    rule = WindowRule(own_window(problem), _LARGE if problem.qkv_format == "thd" else 0)
    off = skipped(position_free_scores=problem.position_free_scores)
    sink = problem.softmax_type != "vanilla"
    shares_keys = shares_keys if problem.position_free_scores else 0
    return lower(packed.workload, rank, *schedules, saved, rule, sink=sink, skipped=off, shares_keys=shares_keys)


def compiled(problem: Problem, rank: int, head_chunks: tuple[int, ...] | None = None) -> Draft:
    """The plan of one rank, made as for a call. `head_chunks`: see `make_schedule`; None for the chosen ones."""
    head_chunks = choose_head_chunks(problem) if head_chunks is None else head_chunks
    packing = Packing(problem, may_fold=is_on("fold_batch"))
    steps = chosen_rank_schedule(problem, rank, head_chunks)
    return optimized(lowered(packing, rank, steps, saved_kinds(problem), shares_keys=_TILE))


def optimized(draft: Draft, *, in_place: bool = False) -> Draft:
    """The draft after the passes on instructions.

    Args:
        in_place: whether the plan is updated in place: then its buffers and messages keep their places.
    """
    plan = draft.plan
    off = {**plan.skipped, **skipped(in_place=in_place)}

    def improved(one: PassPlan[RowKey], kept: list[int]) -> PassPlan[RowKey]:
        one = one if "accumulate_late" in off else accumulate_late(one)
        one = one if "recv_in_place" in off else recv_in_place(one, draft.tables, kept)
        return one if "free_early" in off else free_early(one, kept)

    forward, backward = improved(plan.forward, [number for number, _ in plan.saved]), improved(plan.backward, [])
    return replace(draft, plan=replace(plan, forward=forward, backward=backward, skipped=off))


def upload(draft: Draft, device: torch.device) -> ExecutablePlan[Rows]:
    """The plan with its tables on the device, by one copy."""
    host = draft.tables.on_host(pinned=device.type == "cuda")
    return linked(draft.plan, draft.tables.on_device(host.to(device, non_blocking=True)))
