"""How long a plan takes on the host, part by part.

    python -m benchmarks.planning.planning --out benchmarks/results/planning.csv

A plan is made as `make_plan` makes it, for one rank of a group that is only pretended (every other rank says the same):

    read      arguments to a checked problem, from cu_seqlens tensors on the host
    agree     the fingerprint that the ranks compare; without the network
    program   this rank's steps: messages and tiles, of both passes; for `balanced` also who has which rows; for an
              a2a also the choice of its head chunks
    lower     rows of buffers, windows, launches
    pack      the tables into one buffer on the host
    spread    the buffer to the device, and there the row numbers of its spans; with --device cpu the host spreads them
    link      the plan that refers to them

Sequences are packed (thd), causal, of random lengths around --mean tokens, padded to a multiple of 2 * cp_size; with
`lengths full` they need no padding. The medians of several plans are reported. The wall time is by part. Other work may
share the processor; so there is the processor's time of this thread too, which is nearer to an idle machine's: of all
parts but `spread` (`host_cpu_ms`), and of `spread` (`spread_cpu_ms`), which a GPU does if there is one. A shared
machine is slow for seconds at a time: with --repeats the whole table is measured several times, and each line is the
fastest of its repeats.
"""

from __future__ import annotations

import csv
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from cp_fast.compile.chosen_schedule import choose, chosen_rank_schedule
from cp_fast.compile.packing import Packing
from cp_fast.compile.pipeline import linked, lowered
from cp_fast.compile.program import Launch
from cp_fast.kernels.attention.choose_backend import required
from cp_ref.groups.agreement import agreed
from cp_ref.groups.group import PaperGroup
from cp_ref.problems.arguments import SCORE_OPTIONS
from cp_ref.problems.read_problem import Sizes, read_problem
from cp_ref.problems.room import Agreement
from cp_ref.schedules.planners.make_schedule import saved_kinds
from cp_ref.schedules.problem import Problem

SCHEDULES = ("p2p", "all_gather", "a2a", "a2a+p2p")
PARTS = ("read", "agree", "program", "lower", "pack", "spread", "link")


@dataclass(frozen=True)
class Row:
    """One line of the table: times in milliseconds."""

    commit: str
    sequences: int
    cp_size: int
    cp_comm_type: str
    layout: str
    window: int  # -1 for none
    lengths: str  # "full", "padded"
    read_ms: float
    agree_ms: float
    program_ms: float
    lower_ms: float
    pack_ms: float
    spread_ms: float
    link_ms: float
    total_ms: float
    host_cpu_ms: float  # of all parts but spread
    spread_cpu_ms: float
    launches: int  # of the forward pass
    device: str
    processor: str
    load: float  # of the machine, one minute's average, while this was measured


def main(
    out: Annotated[Path | None, typer.Option(help="A CSV file for the table.")] = None,
    shapes: Annotated[str, typer.Option(help="Numbers of sequences and group sizes.")] = "100:8,1000:8,10000:64",
    schedules: Annotated[str, typer.Option(help="Schedules.")] = ",".join(SCHEDULES),
    layouts: Annotated[str, typer.Option(help="Layouts.")] = "dual_chunk",
    windows: Annotated[str, typer.Option(help="Left windows; -1 for none.")] = "-1,4096",
    mean: Annotated[int, typer.Option(help="Tokens of a sequence, on average.")] = 1024,
    rounds: Annotated[int, typer.Option(help="Plans per line.")] = 9,
    repeats: Annotated[int, typer.Option(help="How often the whole table is measured.")] = 1,
    device: Annotated[str, typer.Option(help="Where the tables go.")] = "cpu",
    commit: Annotated[str, typer.Option(help="What is measured.")] = "",
) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    lines = [
        (*_shape(shape), *of_problem)
        for shape in shapes.split(",")
        for of_problem in product(schedules.split(","), layouts.split(","), _numbers(windows), ("full", "padded"))
    ]
    fastest: dict[tuple[int, int, str, str, int, str], Row] = {}
    for _ in range(repeats):
        for line in lines:
            row = _measure(*line, mean, rounds, torch.device(device), commit)
            if line not in fastest or row.host_cpu_ms < fastest[line].host_cpu_ms:
                fastest[line] = row
            print(".", end="", flush=True)
    print()
    rows = list(fastest.values())
    Console(width=200).print(_table(rows))  # no column is cut, wherever it is printed
    if out is not None:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


def _measure(
    count: int, cp_size: int, comm: str, layout: str, window: int, lengths: str, mean: int, rounds: int,
    device: torch.device, commit: str,
) -> Row:  # fmt: skip
    read = _reader(count, cp_size, comm, layout, window, lengths, mean)
    rank = cp_size // 3
    group = PaperGroup(cp_size, rank)
    times: list[dict[str, float]] = []
    launches = 0
    for _ in range(rounds + 1):
        marks = [_now()]
        problem = read()
        required(problem, device.type)
        marks.append(_now())
        agreed([group], "a plan", lambda problem=problem: problem, Agreement)
        marks.append(_now())
        steps = chosen_rank_schedule(problem, rank, choose(problem))
        marks.append(_now())
        draft = lowered(Packing(problem), rank, steps, saved_kinds(problem))
        marks.append(_now())
        host = draft.tables.on_host(pinned=device.type == "cuda")
        marks.append(_now())
        tables = draft.tables.on_device(host.to(device, non_blocking=True))
        if device.type == "cuda":
            torch.cuda.synchronize()
        marks.append(_now())
        programs = linked(draft.programs, tables)
        marks.append(_now())
        wall, cpu = (1e3 * np.diff(column) for column in zip(*marks, strict=True))
        spread = PARTS.index("spread")
        spent = dict(zip(PARTS, wall.tolist(), strict=True)) | {"total": float(wall.sum())}
        times.append(spent | {"host_cpu": float(cpu.sum() - cpu[spread]), "spread_cpu": float(cpu[spread])})
        launches = sum(1 for _ in programs.forward.of(Launch))
        del host, tables, draft, programs  # so that giving their memory back is not in the next plan's time
    medians = {f"{name}_ms": round(statistics.median(t[name] for t in times[1:]), 3) for name in times[0]}
    return Row(
        commit, count, cp_size, comm, layout, window, lengths, **medians, launches=launches,
        device=str(device), processor=processor(), load=round(load(), 1),
    )  # fmt: skip


def _now() -> tuple[float, float]:
    """Wall time, and the time that this thread had a processor."""
    return time.perf_counter(), time.thread_time()


def _reader(
    count: int, cp_size: int, comm: str, layout: str, window: int, lengths: str, mean: int
) -> Callable[[], Problem]:
    """The call of `read_problem` that `make_plan` would make."""
    random, unit = np.random.default_rng(count), 2 * cp_size
    real = random.integers(1, 2 * mean, count)
    slots = -(-real // unit) * unit
    if lengths == "full":
        real = slots
    cu, cu_padded = (torch.from_numpy(np.concatenate([[0], np.cumsum(x)]).astype(np.int32)) for x in (real, slots))
    sizes = Sizes(64, 8, 128, 128, "bfloat16")
    a2a_size = {"a2a": cp_size, "a2a+p2p": min(8, cp_size // 2)}.get(comm, 1)
    arguments: dict[str, Any] = {
        "cp_size": cp_size,
        "cp_comm_type": comm,
        "layout": layout,
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "window_size": (window, -1),
        "areas": None,
        "cu_seqlens_q": cu,
        "cu_seqlens_kv": None,
        "cu_seqlens_q_padded": cu_padded if lengths == "padded" else None,
        "cu_seqlens_kv_padded": None,
        "sizes": sizes,
        "a2a_size": a2a_size,
    }
    scores = {one.name: one.default for one in fields(Problem) if one.name in SCORE_OPTIONS}
    return lambda: read_problem(**scores, **arguments)


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    table = Table(title=f"One rank's plan, milliseconds: {first.device}, {first.processor}, load {first.load}")
    for name in ("sequences", "cp", "schedule", "layout", "window", "lengths"):
        table.add_column(name)
    for name in (*PARTS, "total", "cpu", "launches"):
        table.add_column(name, justify="right")
    for row in rows:
        window = "-" if row.window < 0 else row.window
        names = (row.sequences, row.cp_size, row.cp_comm_type, row.layout, window, row.lengths)
        times = [getattr(row, f"{part}_ms") for part in (*PARTS, "total")]
        cpu = row.host_cpu_ms + row.spread_cpu_ms
        table.add_row(*map(str, names), *(f"{x:.2f}" for x in (*times, cpu)), str(row.launches))
    return table


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _shape(text: str) -> tuple[int, int]:
    """Sequences and ranks of "100:8"."""
    count, colon, cp_size = text.partition(":")
    if not (colon and count.isdecimal() and cp_size.isdecimal()):
        raise typer.BadParameter(f"--shapes has {text!r}; it must be sequences and ranks, as in 100:8,1000:8")
    return int(count), int(cp_size)


def processor() -> str:
    """The processor's model, as Linux names it."""
    info = Path("/proc/cpuinfo")
    names = (
        [x.split(":", 1)[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor()


def load() -> float:
    load = Path("/proc/loadavg")
    return float(load.read_text().split()[0]) if load.exists() else float("nan")


if __name__ == "__main__":
    typer.run(main)
