"""From a problem to one rank's program: first everything on the host, then one upload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cp_fast.backends import Segments
from cp_fast.heads import HeadExchange, Side
from cp_fast.planning.batch import Batch
from cp_fast.planning.blocks import Block
from cp_fast.planning.columns import Range
from cp_fast.planning.drafts import DraftGive, DraftLaunch, DraftStep, DraftTake
from cp_fast.planning.exchange import DraftSide, draft_side, group_block
from cp_fast.planning.gather import draft_gather
from cp_fast.planning.halo import draft_halo
from cp_fast.planning.padded import PaddedTables
from cp_fast.planning.placing import Place
from cp_fast.planning.ring import draft_ring
from cp_fast.planning.tables import Key, RowKey, Tables, Uploaded
from cp_fast.program import Give, KVStep, Launch, RankProgram, Take
from cp_ref.spec import Problem, head_ranges

__all__ = ["DraftProgram", "compile_program", "draft_program", "link_program", "upload_program"]


@dataclass(frozen=True, slots=True)
class DraftProgram:
    """See `RankProgram`; its tables are on the host."""

    problem: Problem
    rank: int
    tables: Tables | PaddedTables
    forward: list[DraftStep]
    backward: list[DraftStep]
    real_q_rows: RowKey
    sides: tuple[DraftSide, DraftSide] | None  # q, kv
    spare_rows: int = 0
    position_ids: Key | None = None


def compile_program(problem: Problem, rank: int, device: torch.device) -> RankProgram:
    """The program of one rank, with its tables on the device."""
    return upload_program(draft_program(problem, rank), device)


def draft_program(problem: Problem, rank: int) -> DraftProgram:
    """One rank's program, on the host."""
    batch = Batch(problem)
    tables = Tables(batch.loops)
    draft_hops = draft_halo if batch.windowed else draft_ring
    sides = None
    if problem.cp_comm_type in ("a2a", "a2a+p2p"):
        unit, place = divmod(rank, problem.a2a_size)
        q, kv = group_block(batch, unit, "q"), group_block(batch, unit, "kv")
        q_side = draft_side(batch, rank, "q", q, tables)
        same = batch.alike and all(np.array_equal(a, b) for a, b in zip(q.ranges[0], kv.ranges[0], strict=True))
        sides = (q_side, q_side if same else draft_side(batch, rank, "kv", kv, tables))
        ring = Place(unit, lambda other: other * problem.a2a_size + place, 1, q.anchors[0], kv)
        forward, backward = draft_hops(batch, ring, tables)
    else:
        keys = batch.owned("kv", rank)
        own = Block(
            (Range(np.zeros_like(keys.total), keys.total),),
            (batch.home_rows("kv", rank),),
            sum(problem.lengths.slots_kv) // problem.cp_size,
        )
        q_anchor = batch.home_rows("q", rank)
        if problem.cp_comm_type == "p2p":
            forward, backward = draft_hops(batch, Place(rank, lambda unit: unit, 0, q_anchor, own), tables)
        else:
            forward, backward = draft_gather(batch, rank, q_anchor, own, tables)
    real_q_rows = tables.rows(batch.home_rows("q", rank), batch.real_rows("q", rank))
    return DraftProgram(problem, rank, tables, forward, backward, real_q_rows, sides)


def upload_program(draft: DraftProgram, device: torch.device) -> RankProgram:
    """The program with its tables on the device, by one copy."""
    assert isinstance(draft.tables, Tables)
    host = draft.tables.on_host(pinned=device.type == "cuda")
    return link_program(draft, draft.tables.on_device(host.to(device, non_blocking=True)))


def link_program(draft: DraftProgram, tables: Uploaded) -> RankProgram:
    """The program with its tables as they lie on the device."""
    made: dict[int, Launch] = {}  # both passes have the same launches
    real = tables.rows(draft.real_q_rows)
    return RankProgram(
        tuple(_step(step, tables, made) for step in draft.forward),
        tuple(_step(step, tables, made) for step in draft.backward),
        real if isinstance(real, slice) or real.dtype == torch.bool else real.long(),  # for PyTorch's own operators
        None if draft.sides is None else _heads(draft, draft.sides, tables),
        draft.spare_rows,
        None if draft.position_ids is None else tables.numbers(draft.position_ids),
    )


def _step(step: DraftStep, tables: Uploaded, made: dict[int, Launch]) -> KVStep:
    return KVStep(
        give_kv=tuple(_give(g, tables) for g in step.give_kv),
        take_kv=tuple(_take(t, tables) for t in step.take_kv),
        give_dkv=tuple(_give(g, tables) for g in step.give_dkv),
        take_dkv=tuple(_take(t, tables) for t in step.take_dkv),
        launches=tuple(_launch(launch, tables, made) for launch in step.launches),
        own=step.own,
        grad_size=step.grad_size,
    )


def _give(give: DraftGive, tables: Uploaded) -> Give:
    return Give(give.peer, give.tag, tables.rows(give.rows), give.own)


def _take(take: DraftTake, tables: Uploaded) -> Take:
    return Take(take.peer, take.tag, take.size, tables.rows(take.rows), take.home)


def _launch(launch: DraftLaunch, tables: Uploaded, made: dict[int, Launch]) -> Launch:
    if id(launch) not in made:
        q, kv = tables.lengths(launch.cu_q), tables.lengths(launch.cu_kv)
        bounds = launch.bounds or (None, None)
        cu_q, cu_kv = tables.cumulative(launch.cu_q, bounds[0]), tables.cumulative(launch.cu_kv, bounds[1])
        made[id(launch)] = Launch(
            q_rows=tables.rows(launch.q_rows),
            out_rows=tables.rows(launch.out_rows),
            kv_rows=tables.rows(launch.kv_rows),
            grad_rows=tables.rows(launch.grad_rows),
            segments=Segments(cu_q, cu_kv, launch.left, launch.right, q.device, kv.device),
        )
    return made[id(launch)]


def _heads(draft: DraftProgram, sides: tuple[DraftSide, DraftSide], tables: Uploaded) -> HeadExchange:
    problem, rank = draft.problem, draft.rank
    peers = range(rank - rank % problem.a2a_size, rank - rank % problem.a2a_size + problem.a2a_size)
    found: list[Side] = []
    for number, (side, all_heads) in enumerate(zip(sides, (problem.heads_q, problem.heads_kv), strict=True)):
        ranges = [head_ranges(problem, p)[number] for p in range(problem.a2a_size)]
        found.append(
            Side(
                home_rows=tables.rows(side.home_rows),
                into_home=tables.rows(side.into_home),
                home_count=side.home_count,
                group_rows=tables.rows(side.group_rows),
                into_group=tables.rows(side.into_group),
                group_counts=side.group_counts,
                spare_rows=draft.spare_rows,
                first_heads=tuple(begin for begin, _ in ranges),
                heads=ranges[0][1] - ranges[0][0],
                all_heads=all_heads,
            )
        )
    return HeadExchange(tuple(peers), rank % problem.a2a_size, found[0], found[1])
