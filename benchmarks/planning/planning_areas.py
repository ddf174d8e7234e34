"""How long areas take to read and to plan, where many share queries or keys.

    python -m benchmarks.planning.planning_areas --commit "$(git rev-parse --short HEAD)" --out planning_areas.csv

Areas are read as `make_plan` reads them; one rank of four is planned and lowered, p2p. Times are processor time of this
thread in seconds, the least of --rounds; a machine that is shared makes them longer. "-": not tried.

    nested    area i: the first i blocks of queries, key block i
    holes     the same, with keys between the blocks that nobody sees
    prefixes  query block i, the first i blocks of keys
    sparse    every block of queries sees eight random blocks of keys
    squares   causal squares one behind the other, which share nothing
"""

from __future__ import annotations

import csv
import time
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from cp_fast.compile.chosen_schedule import choose, chosen_rank_schedule
from cp_fast.compile.packing import Packing
from cp_fast.compile.pipeline import lowered
from cp_fast.compile.program import Launch
from cp_ref.groups.group import PaperGroup
from cp_ref.problems.arguments import SCORE_OPTIONS
from cp_ref.problems.read_problem import Sizes, read_problem
from cp_ref.schedules.planners.make_schedule import saved_kinds
from cp_ref.schedules.problem import Problem

CASES = ("nested", "holes", "prefixes", "sparse", "squares")
RANKS = PaperGroup(4, 1)


def areas_of(case: str, count: int) -> torch.Tensor:
    """The areas of a case, int64 [count, 6]."""
    i, zero = np.arange(count), np.zeros(count, dtype=np.int64)
    blocks = max(count // 8, 8)
    random = np.random.default_rng(0)
    keys = np.concatenate(
        [random.choice(blocks, 8, replace=False) for _ in range(blocks if case == "sparse" else 0)] or [zero]
    )
    columns = {
        "nested": (zero, 2 * i + 2, 2 * i, 2 * i + 2, zero - 1),
        "holes": (zero, 2 * i + 2, 4 * i, 4 * i + 2, zero - 1),
        "prefixes": (2 * i, 2 * i + 2, zero, 2 * i + 2, zero - 1),
        "sparse": (i // 8 * 64, i // 8 * 64 + 64, keys * 64, keys * 64 + 64, zero - 1),
        "squares": (4 * i, 4 * i + 4, 4 * i, 4 * i + 4, zero),
    }[case]
    return torch.from_numpy(np.stack([*columns[:4], zero - 1, columns[4]], axis=1))


def measured(case: str, count: int, planned: bool) -> tuple[float, float, int]:
    """Seconds to read and to plan, and the launches of the forward pass."""
    areas = areas_of(case, count)
    began = time.thread_time()
    problem = _read(areas)
    read = time.thread_time() - began
    if not planned:
        return read, float("nan"), 0
    steps = chosen_rank_schedule(problem, RANKS.rank, choose(problem))
    draft = lowered(Packing(problem), RANKS.rank, steps, saved_kinds(problem))
    return read, time.thread_time() - began, sum(1 for _ in draft.programs.forward.of(Launch))


def _read(areas: torch.Tensor) -> Problem:
    length = int(areas[:, [1, 3]].max())
    arguments: dict[str, Any] = {
        "cp_size": RANKS.size, "cp_comm_type": "p2p", "a2a_size": 1, "layout": "dual_chunk", "qkv_format": "thd",
        "attn_mask_type": None, "window_size": (-1, -1), "areas": areas,
        "cu_seqlens_q": torch.tensor([0, length], dtype=torch.int32), "cu_seqlens_kv": None,
        "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None, "sizes": Sizes(8, 8, 64, 64, "bfloat16"),
    }  # fmt: skip
    scores = {one.name: one.default for one in fields(Problem) if one.name in SCORE_OPTIONS}
    return read_problem(**scores, **arguments)


def main(
    commit: Annotated[str, typer.Option(help="What is measured.")],
    out: Annotated[Path, typer.Option(help="A CSV file, to which lines are added.")],
    cases: Annotated[str, typer.Option(help="Cases.")] = ",".join(CASES),
    plan: Annotated[str, typer.Option(help="Numbers of areas that are read and planned.")] = "10000,100000",
    read: Annotated[str, typer.Option(help="Numbers of areas that are only read.")] = "1000000",
    rounds: Annotated[int, typer.Option(help="Measurements of each.")] = 2,
) -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    new = not out.exists()
    with out.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(["commit", "case", "areas", "read_s", "plan_s", "launches"])
        for numbers, planned in ((plan, True), (read, False)):
            for count in map(int, filter(None, numbers.split(","))):
                for case in cases.split(","):
                    found = [measured(case, count, planned) for _ in range(rounds)]
                    seconds = [f"{min(x[n] for x in found):.2f}" for n in (0, 1)]
                    writer.writerow(
                        [commit, case, count, seconds[0], *([seconds[1], found[0][2]] if planned else "--")]
                    )
                    file.flush()


if __name__ == "__main__":
    typer.run(main)
