"""The compiler: a rank's schedule is lowered, and passes make its programs fast (`cp_fast.passes` lists them).

Passes on tiles run while a step's tiles become launches (`cp_fast.tiles.launches`), passes on instructions after
that. At last the tables of a plan go to the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cp_fast.compile.chosen_schedule import choose, chosen_rank_schedule
from cp_fast.compile.index_tables import RowKey, Uploaded
from cp_fast.compile.instruction_passes import (
    PIECES,
    accumulate_late,
    copy_early,
    free_early,
    recv_in_place,
    write_in_place,
)
from cp_fast.compile.lower import Draft, lower
from cp_fast.compile.packing import Packing, fold_batch
from cp_fast.compile.program import Instruction, Launch, Program, Programs, View, with_views
from cp_fast.kernels.attention.backend_protocol import Backend
from cp_fast.kernels.attention.varlen_batch import SegmentStarts, VarlenBatch
from cp_fast.movers.mover_protocol import Rows
from cp_fast.passes import is_on, skipped
from cp_fast.tiles.segments import WindowRule, own_window
from cp_fast.tiles.tile_groups import SegmentKeys
from cp_ref.schedules.planners.make_schedule import saved_kinds
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import RankPasses

__all__ = [
    "compiled",
    "drafted",
    "linked",
    "lowered",
    "optimized",
    "upload",
]

# ---- Tables on the device
#
# Programs with their tables on the device: every key becomes its rows.


def linked(programs: Programs[Any], tables: Uploaded) -> Programs[Rows]:
    """The programs with their tables on the device."""
    batches: dict[SegmentKeys, VarlenBatch] = {}  # Shared by both programs.

    def view(one: View[Any]) -> View[Rows]:
        return one if one.rows is None else View(one.buffer, tables.rows(one.rows), one.heads)

    def batch(keys: SegmentKeys) -> VarlenBatch:
        if keys not in batches:
            bound_q, bound_kv = keys.bounds or (None, None)
            cu_q, device_q = tables.lengths(keys.cu_q, bound_q)
            cu_kv, device_kv = tables.lengths(keys.cu_kv, bound_kv)
            batch = VarlenBatch(cu_q, cu_kv, keys.left, keys.right, device_q, device_kv)
            if keys.starts is not None:
                (host_q, of_q), (_, rows), (host_kv, of_kv), (_, columns) = map(tables.lengths, keys.starts)
                batch = replace(batch, starts=SegmentStarts(host_q[:-1], host_kv[:-1], of_q, rows, of_kv, columns))
            batches[keys] = batch
        return batches[keys]

    def instruction(one: Instruction[Any]) -> Instruction[Rows]:
        one = with_views(one, view)
        return replace(one, batch=batch(one.batch)) if isinstance(one, Launch) else one

    def program(one: Program[Any]) -> Program[Rows]:
        return replace(one, instructions=tuple(map(instruction, one.instructions)))

    real = tables.rows(programs.real_q_rows)
    if isinstance(real, torch.Tensor) and real.dtype != torch.bool:
        real = real.long()  # for PyTorch's own operators
    positions = None if programs.position_ids is None else tables.rows(programs.position_ids)
    forward, backward = program(programs.forward), program(programs.backward)
    return replace(programs, forward=forward, backward=backward, real_q_rows=real, position_ids=positions)


# ---- The pipeline


_LARGE = 2048  # query rows from which a tile of a packed batch keeps its own window


def compiled(problem: Problem, rank: int, library: Backend, head_chunks: tuple[int, ...] | None = None) -> Draft:
    """The programs of one rank, as `make_plan` has them without other arguments. `head_chunks`: those of the schedule;
    None for the chosen ones.
    """
    choices = choose(problem, key_block=library.key_block)
    if head_chunks is not None:
        choices = choices._replace(head_chunks=head_chunks)
    passes = chosen_rank_schedule(problem, rank, choices)
    return drafted(Packing(problem, may_fold=is_on("fold_batch")), rank, passes, saved_kinds(problem), library)


def drafted(packing: Packing, rank: int, passes: RankPasses, saved: tuple[str, ...], library: Backend) -> Draft:
    """One rank's passes as fast programs for a kernel library. `saved`: see `lowered`."""
    problem = packing.problem
    draft = lowered(packing, rank, passes, saved, shared_keys_tile=library.shared_keys_tile)
    return optimized(draft, writes_rows=library.writes_rows and not library.pads(problem.d_qk, problem.d_v))


def lowered(
    packing: Packing, rank: int, passes: RankPasses, saved: tuple[str, ...], *, shared_keys_tile: int = 0
) -> Draft:
    """One rank's passes as slow programs.

    Args:
        saved: the kinds of operands that are kept between the passes.
        shared_keys_tile: see `TileGroups`.
    """
    problem, packed = packing.problem, packing.packed_problem
    if packing.folded:
        passes = fold_batch(passes, problem)
    rule = WindowRule(own_window(problem), _LARGE if problem.qkv_format == "thd" else 0)
    off = skipped(position_free_scores=problem.position_free_scores)
    sink = problem.softmax_type != "vanilla"
    shared_keys_tile = shared_keys_tile if problem.position_free_scores else 0
    return lower(packed.workload, rank, *passes, saved, rule, sink=sink, skipped=off, shared_keys_tile=shared_keys_tile)


def optimized(draft: Draft, *, in_place: bool = False, writes_rows: bool = False, most_pieces: int = PIECES) -> Draft:
    """The draft after the passes on instructions.

    Args:
        in_place: whether the plan is updated in place: then its buffers and messages keep their places.
        writes_rows: see `Backend.writes_rows`.
        most_pieces: of a message that is received in place.
    """
    programs = draft.programs
    off = {**programs.skipped, **skipped(in_place=in_place)}
    if not writes_rows:
        off.setdefault("write_in_place", "the kernel library yields outs of its own")

    def improved(one: Program[RowKey], kept: list[int]) -> Program[RowKey]:
        one = one if "write_in_place" in off else write_in_place(one, draft.tables)
        one = one if "accumulate_late" in off else accumulate_late(one)
        one = one if "recv_in_place" in off else recv_in_place(one, draft.tables, kept, most_pieces)
        one = one if "copy_early" in off else copy_early(one)
        return one if "free_early" in off else free_early(one, kept)

    forward = improved(programs.forward, [number for number, _ in programs.saved])
    backward = improved(programs.backward, [])
    return replace(draft, programs=replace(programs, forward=forward, backward=backward, skipped=off))


def upload(draft: Draft, device: torch.device) -> Programs[Rows]:
    """The programs with their tables on the device, by one copy."""
    host = draft.tables.on_host(pinned=device.type == "cuda")
    return linked(draft.programs, draft.tables.on_device(host.to(device, non_blocking=True)))
