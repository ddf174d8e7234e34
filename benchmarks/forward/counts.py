"""Counts of each rank's forward pass, from its program: no GPU is needed.

    python -m benchmarks.forward.counts                     # all problems on all schedules
    python -m benchmarks.forward.counts --names block-causal --schedules p2p --out counts.csv

A line is one rank: its launches with their segments, and the times that a model of FlashAttention 4 on an H200 gives
them. A tile of the kernel is 128 rows, which are 32 tokens of the 4 query heads of a kv head; it visits blocks of 128
keys. A multiprocessor takes the next tile in the order of the launch when it has finished one. `waves` is the number of
tiles over 132 multiprocessors. `tail` is the time until the last one has finished, over that in which all are busy.
Gathers, and merges, move bytes at the memory's speed.
"""

from __future__ import annotations

import csv
import heapq
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.forward.cases import SCHEDULES, Case, cases_of
from benchmarks.parts.ranks import Schedules, switched
from cp_fast.compile.index_tables import Tables
from cp_fast.compile.program import Accumulate, Copy, Launch, Send
from cp_fast.tools.cost.counts import PassBytes, count_rank, is_gathered
from cp_ref.groups.group import PaperGroup
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.table import Column

_PROCESSORS = 132
_TILE = 128
_BLOCK_US = 1.66  # A block of 128 keys for a tile: 669.8 Tflop/s on all multiprocessors.
_TILE_US = 1.8  # A tile reads its queries before, and writes its results after its blocks.
_LAUNCH_US = 5.0
_BYTES_US = 3.9e6  # A microsecond's bytes of copies.


class Kernel(NamedTuple):
    """One launch."""

    segments: int
    rows: int
    keys: int
    tiles: int
    busy_us: float  # The mean multiprocessor's.
    us: float

    def __str__(self) -> str:
        tail = self.us / self.busy_us if self.busy_us else 1.0
        return (
            f"{self.segments} x q {self.rows:,} k {self.keys:,}: {self.tiles / _PROCESSORS:.2f} waves, "
            f"tail {tail:.3f}, {self.us / 1e3:.2f} ms"
        )


def blocks_of(rows: int, keys: int, left: int | None, right: int | None, packed: int) -> Column:
    """The blocks of keys that each tile of a segment visits, in the order of the launch: with a window the last tile
    comes first.

    >>> blocks_of(64, 256, None, None, 4).tolist(), blocks_of(256, 256, None, 0, 4).tolist()
    ([2, 2], [2, 2, 2, 2, 1, 1, 1, 1])
    """
    tokens = _TILE // packed
    first = np.arange(0, rows, tokens)
    last = np.minimum(first + tokens, rows) - 1
    stop = np.full_like(first, keys) if right is None else np.minimum(last + keys - rows + right + 1, keys)
    start = np.zeros_like(first) if left is None else np.maximum(first + keys - rows - left, 0)
    found = np.maximum(-(-stop // _TILE) - start // _TILE, 1)
    return found if left is None and right is None else found[::-1]


def finished_us(tiles: Sequence[float]) -> float:
    """Microseconds until all tiles are finished, each taken by the first multiprocessor that is free.

    >>> finished_us([2.0] * 132 + [1.0])
    3.0
    """
    free = [0.0] * _PROCESSORS
    for tile in tiles:
        heapq.heapreplace(free, free[0] + tile)
    return max(free)


def kernel_of(one: Launch[Any], tables: Tables, packed: int) -> Kernel:
    """A launch's tiles. `packed`: the query heads of a kv head."""
    q, k = (np.diff(tables.cumulative(key)).tolist() for key in (one.batch.cu_q, one.batch.cu_kv))
    each = [blocks_of(*lengths, one.batch.left, one.batch.right, packed) for lengths in zip(q, k, strict=True)]
    us = _TILE_US + _BLOCK_US * np.concatenate(
        [np.tile(blocks, one.operands[1].heads[1] - one.operands[1].heads[0]) for blocks in each]
    )
    busy = float(us.sum()) / _PROCESSORS
    return Kernel(len(q), sum(q), sum(k), len(us), busy, _LAUNCH_US + finished_us(us.tolist()))


class Rank(NamedTuple):
    """The forward pass of one rank."""

    kernels: list[Kernel]
    gathered: tuple[int, int]  # Rows of q, and of k and v, that launches read by index.
    copied: int  # Rows of buffers that are copied for launches.
    merged: int  # Rows of partial results that are merged into others.
    moved_us: float

    @property
    def us(self) -> float:
        """The time of its kernels."""
        return sum(one.us for one in self.kernels) + self.moved_us


def count(problem: Problem, rank: int) -> Rank:
    """Count a rank's forward pass."""
    counted = count_rank(problem, rank)
    program, tables = counted.draft.programs.forward, counted.draft.tables
    sizes = PassBytes(problem, program, tables)
    gathered, merged, copied, begun = [0, 0], 0, 0, set[int]()
    moved = sum(step.moved for step in counted.forward)
    for one in program.instructions:
        if isinstance(one, Launch):
            for n, view in enumerate(one.operands):
                gathered[n] += sizes.rows(view) if is_gathered(view) else 0
        elif isinstance(one, Accumulate):
            merged += sizes.rows(one.source) if one.target.buffer in begun else 0
            begun.add(one.target.buffer)
        elif isinstance(one, Copy) and program.buffers[one.target.buffer].role == "operand":
            copied += sizes.rows(one.source)
        elif isinstance(one, Send):  # The copy into a staging buffer, which the transport makes beside the kernels.
            spec = program.buffers[one.source.buffer]
            moved -= 2 * sizes.rows(one.source) * (spec.heads[1] - spec.heads[0]) * sizes.row(spec.kind)
    kernels = [kernel_of(one, tables, problem.heads_q // problem.heads_kv) for one in program.of(Launch)]
    return Rank(kernels, (gathered[0], gathered[1]), copied, merged, moved / _BYTES_US)


def alone_us(case: Case, pairs: int) -> float:
    """The time of all visible pairs on one GPU: of documents by their launch, of other masks at the dense rate."""
    lengths = case.lengths
    left = None if case.window < 0 else case.window
    each = [np.tile(blocks_of(n, n, left, 0, 4), 8) for n in lengths]
    us = _LAUNCH_US + finished_us((_TILE_US + _BLOCK_US * np.concatenate(each)).tolist())
    return us if case.areas is None else us * pairs / (case.tokens * (case.tokens + 1) / 2)


def problem_of(case: Case, schedule: str) -> Problem:
    """The problem as `make_plan` reads it."""
    return case.plan(PaperGroup(2, 0), schedule, "cpu")[1].problem


def main(
    names: Annotated[str, typer.Option(help="Problems, with semicolons; all unless given.")] = "",
    schedules: Schedules = SCHEDULES,
    without: Annotated[str, typer.Option(help="Compiler passes switched off, with commas.")] = "-",
    scale: Annotated[int, typer.Option(help="Divides all lengths.")] = 1,
    out: Annotated[Path | None, typer.Option(help="A CSV file to write.")] = None,
) -> None:
    """Count and print."""
    columns = ("case", "schedule", "rank", "launches", "gathered q, kv", "copied", "merged", "moved ms", "ms", "share")
    shown, lines, cases = Table(*columns), list[tuple[Any, ...]](), cases_of(scale)
    for name, schedule in product(names.split(";") if names else cases, schedules.split(",")):
        with switched(without)():
            problem = problem_of(cases[name], schedule)
            ranks = [count(problem, rank) for rank in range(problem.cp_size)]
        ideal = alone_us(cases[name], problem.pairs) / problem.cp_size
        for n, rank in enumerate(ranks):
            kernels = "\n".join(map(str, rank.kernels))
            row = rank.gathered, rank.copied, rank.merged, round(rank.moved_us / 1e3, 3), round(rank.us / 1e3, 2)
            lines.append((name, schedule, n, kernels, *row, round(ideal / rank.us, 3)))
            shown.add_row(*map(str, lines[-1]), end_section=n == len(ranks) - 1)
    Console(width=190).print(shown)
    if out is not None:
        with out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *lines])


if __name__ == "__main__":
    typer.run(main)
