"""The costs of a schedule, counted on integers: work, balance, bytes and buffers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ref.schedules.areas import Areas, pairs
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Message, RankSchedule, Schedule, Step, Tiles
from cp_ref.schedules.table import Column

__all__ = [
    "ITEM_BYTES",
    "RankCost",
    "Report",
    "message_bytes",
    "report",
    "tile_pairs",
]

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # Of a number, by dtype.


@dataclass(frozen=True, slots=True)
class RankCost:
    """One rank's share. Pairs are visible (query, key) pairs times query heads; both passes have the same tiles."""

    tokens: int  # Query slots that the rank owns, padding included.
    tiles: int  # In the forward pass.
    pairs: int  # In the forward pass.
    forward_bytes: int  # sent
    backward_bytes: int  # sent
    held_rows: int  # Most kv rows received and still needed at one time, in the forward pass.


@dataclass(frozen=True, slots=True)
class Report:
    """The costs of all ranks."""

    ranks: tuple[RankCost, ...]

    @property
    def balance(self) -> float:
        """The mean rank's work over the busiest rank's: 1 is perfect, 1 / cp_size is one rank doing everything."""
        pairs = [r.pairs for r in self.ranks]
        return sum(pairs) / (len(pairs) * max(pairs)) if max(pairs) else 1.0

    @property
    def sent_bytes(self) -> int:
        """All bytes that all ranks send, both passes."""
        return sum(r.forward_bytes + r.backward_bytes for r in self.ranks)


def report(problem: Problem, schedule: Schedule) -> Report:
    """Count. The schedule is taken to be right: `verify` first."""
    slots = problem.slots.q
    tokens = np.bincount(slots.rank, slots.stop - slots.start, minlength=problem.cp_size).astype(np.int64).tolist()
    costs: list[RankCost] = []
    for rank, rank_schedule in enumerate(schedule.forward):
        tiles = Tiles.concat([step.tiles for step in rank_schedule])
        work = tile_pairs(problem.workload.areas, tiles) * (tiles.head_stop - tiles.head_start)
        sent = _sent(problem, rank_schedule), _sent(problem, schedule.backward[rank])
        costs.append(RankCost(tokens[rank], len(tiles), int(work.sum()), *sent, _held_rows(rank_schedule)))
    return Report(tuple(costs))


def tile_pairs(areas: Areas, tiles: Tiles) -> Column:
    """The number of visible pairs of each tile, for each head."""
    band = areas.lo[tiles.area], areas.hi[tiles.area]
    return pairs(tiles.q_start, tiles.q_stop, tiles.k_start, tiles.k_stop, *band)


def message_bytes(problem: Problem, message: Message) -> int:
    """The bytes that travel: operands in the problem's dtype, results in float32 (float64 for float64)."""
    item = ITEM_BYTES[problem.dtype]
    wide = max(item, 4)
    row_bytes = {
        "q": problem.d_qk * item,
        "kv": (problem.d_qk + problem.d_v) * item,
        "do": problem.d_v * item + 2 * wide,
        "out": (problem.d_v + 1) * wide,
        "dq": problem.d_qk * wide,
        "dkv": (problem.d_qk + problem.d_v) * wide,
    }[message.kind]
    return message.pieces.row_heads * row_bytes


def _sent(problem: Problem, rank_schedule: RankSchedule) -> int:
    return sum(message_bytes(problem, m) for step in rank_schedule for m in step.sends)


def _held_rows(rank_schedule: RankSchedule) -> int:
    """The high-water mark of received kv rows, each held from the step it travels in to the last step that uses it."""
    held = np.zeros(len(rank_schedule) + 1, dtype=np.int64)
    used = [_used_keys(step) for step in rank_schedule]
    for arrival, step in enumerate(rank_schedule):
        for message in step.recvs:
            if message.kind != "kv":
                continue
            start, stop = message.pieces.start, message.pieces.stop
            last = np.full_like(start, arrival)
            for later in range(arrival + 1, len(rank_schedule)):
                begins, ends = used[later]  # A span meets one of these: more begin before its end than end before it.
                meets = np.searchsorted(begins, stop, side="left") > np.searchsorted(ends, start, side="right")
                last[meets] = later
            held[arrival] += int((stop - start).sum())
            np.add.at(held, last + 1, start - stop)
    return int(np.cumsum(held).max(initial=0))


def _used_keys(step: Step) -> tuple[Column, Column]:
    """The key rows that a step computes with or sends on: sorted starts and sorted stops of spans."""
    sent = [m.pieces for m in step.sends if m.kind == "kv"]
    starts = np.concatenate([step.tiles.k_start, *(pieces.start for pieces in sent)])
    stops = np.concatenate([step.tiles.k_stop, *(pieces.stop for pieces in sent)])
    return np.sort(starts), np.sort(stops)
