"""The data-moving kernels against a copy of the same bytes and against the memory's limit, for every implementation.

    python -m benchmarks.kernels --out benchmarks/results/kernels_h200.csv --plot benchmarks/results/kernels_h200.svg
    python -m benchmarks.kernels --device cpu --scale 16 --implementations native,torch

Each kernel's result is checked first; if it is wrong, nothing is reported. Then the implementations and
`torch.Tensor.copy_` of the same bytes are timed in turns in the same run. On a GPU, CUDA graphs are replayed, each of
several launches on different tensors (together many times the L2); the median of the replays counts. On a CPU the clock
counts, and `torch.index_select` with a ready index is timed too.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.parts.kernels_cases import Case, cases
from benchmarks.parts.ranks import Commit, Device
from cp_fast.movers.select_movers import movers_for, why_not

LIMIT = 4.2e12  # bytes a second, read and written, of an H200


def measure(case: Case, names: Sequence[str], device: str, rounds: int) -> list[dict[str, Any]]:
    """A row for every implementation; checked first."""
    works = [case.make(device) for _ in range(sets_for(case.moved, device))]
    for name in names:
        try:
            works[0].check(movers_for(device, name))
        except AssertionError as error:
            raise SystemExit(f"{name}, {case.kernel}, {case.name}: {error}; nothing is reported") from error
    runs = [[partial(work.run, movers_for(device, name)) for work in works] for name in names]
    times = medians([*runs, [w.copy for w in works], [w.select for w in works]], device, rounds)
    copy, select = times[-2:]
    rows = []
    for name, us in zip(names, times, strict=False):
        rate = case.moved / us * 1e6
        row = {"kernel": case.kernel, "case": case.name, "implementation": name, "us": us, "gb_per_s": rate / 1e9}
        row |= {"copy_us": copy, "ratio_to_copy": us / copy, "index_select_us": select}
        rows.append(row | {"share_of_limit": rate / LIMIT})
    return rows


def judge(rows: Sequence[dict[str, Any]], table: Sequence[Case], device: str) -> None:
    """Add target and met to every row."""
    times = {(row["kernel"], row["case"], row["implementation"]): row["us"] for row in rows}
    targets = {(case.kernel, case.name): case.target for case in table}
    for row in rows:
        name, us, target = row["implementation"], row["us"], targets[row["kernel"], row["case"]]
        text, met = "", True
        if name == "torch" or target is None:
            row |= {"target": "", "met": ""}
            continue
        if device == "cpu":
            text, met = "at most torch.index_select", us <= row["index_select_us"]
        elif name == "numba":
            native = times.get((row["kernel"], row["case"], "native"))
            text, met = "at most 1.3 x native", native is not None and us <= 1.3 * native
        else:
            text = target.text
            met = us <= target.most_us and row["ratio_to_copy"] <= target.most_of_copy
            met = met and row["share_of_limit"] >= target.least_share
            if target.most_of_case is not None:
                other, factor = target.most_of_case
                met = met and us <= factor * times[row["kernel"], other, name]
        row |= {"target": text, "met": "yes" if met else "no"}


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars: the rate of each case and implementation; the limit and each case's copy as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = list(dict.fromkeys(f"{row['kernel']}  {row['case']}" for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(13, 0.28 * len(labels) * max(len(names), 2) ** 0.6 + 1.5))
    height = 0.8 / len(names)
    for n, name in enumerate(names):
        mine = {f"{row['kernel']}  {row['case']}": row for row in rows if row["implementation"] == name}
        places = [i + (n - (len(names) - 1) / 2) * height for i, label in enumerate(labels) if label in mine]
        rates = [mine[label]["gb_per_s"] / 1e3 for label in labels if label in mine]
        axes.barh(places, rates, height=0.9 * height, label=name)
    for i, label in enumerate(labels):
        row = next(row for row in rows if f"{row['kernel']}  {row['case']}" == label)
        copy = row["gb_per_s"] * row["ratio_to_copy"] / 1e3
        axes.plot([copy, copy], [i - 0.45, i + 0.45], color="black", linewidth=1.5, label="copy_" if i == 0 else None)
    axes.axvline(LIMIT / 1e12, color="gray", linestyle="--", label="4.2 TB/s")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("TB/s, bytes read and written")
    axes.legend(loc="lower center", ncols=5, bbox_to_anchor=(0.3, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main(
    device: Device = "cuda",
    scale: Annotated[int, typer.Option(help="Divide every size by this; 16 on a CPU.")] = 1,
    implementations: Annotated[str, typer.Option(help="Which, with commas; those that cannot be had are left out.")] = (
        "native,numba,torch"
    ),
    only: Annotated[str, typer.Option(help="Cases whose kernel begins so.")] = "",
    rounds: Annotated[int, typer.Option(help="Samples of each.")] = 60,
    commit: Commit = "",
    out: Annotated[Path | None, typer.Option(help="CSV file to write.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Picture to write, SVG or PNG.")] = None,
) -> None:
    """Measure the kernels on this machine."""
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "--device cuda needs a GPU, and PyTorch sees none; --device cpu --scale 16 goes without"
        )
    names = []
    for name in implementations.split(","):
        if (reason := why_not(name, device)) is None:
            names.append(name)
        else:
            print(f"without {name}: {reason}")
    table = [case for case in cases(scale) if case.kernel.startswith(only)]
    rows: list[dict[str, Any]] = []
    for case in table:
        rows += measure(case, names, device, rounds)
        if device == "cuda":
            torch.cuda.empty_cache()
    judge(rows, table, device)
    machine: dict[str, Any] = {"device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu"}
    machine |= {"threads": torch.get_num_threads()} if device == "cpu" else {}
    machine |= {"torch": torch.__version__, "commit": commit, "rounds": rounds}
    for row in rows:
        print(f"{row['kernel']:17} {row['case']:70} {row['implementation']:6}", end=" ")
        print(f"{row['us']:8.2f} us {row['gb_per_s']:5.0f} GB/s copy x {row['ratio_to_copy']:.3f}", end=" ")
        print(f"limit {row['share_of_limit']:5.1%}  {row['target']} {row['met']}")
    rounded = [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    if out is not None:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rounded[0], *machine])
            writer.writeheader()
            writer.writerows(row | machine for row in rounded)
    if picture is not None:
        plot(rows, picture)


# ---- times of launches
#
# In turns: by CUDA graphs of several launches on a GPU, by the clock on a CPU. Each launch in a row has tensors of its
# own, many times the size of the caches in all. A sample is the time of all of them over their number.


MOST_BYTES, LEAST_BYTES = 3 << 30, 1 << 30  # of all sets together, on a GPU
CPU_BYTES = 256 << 20


def sets_for(moved: int, device: str) -> int:
    """The number of sets of tensors, for launches that move `moved` bytes each."""
    if device == "cpu":
        return min(max(CPU_BYTES // max(moved, 1), 2), 16)
    return min(max(LEAST_BYTES // max(moved, 1), min(8, MOST_BYTES // max(moved, 1))), 48)


class Graph:
    """All launches of one kind, captured. What they return is kept, so that each has a result of its own."""

    def __init__(self, launches: Sequence[Callable[[], object]]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launches[0]()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._results = [launch() for launch in launches]
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._launches = len(launches)
        self._graph.replay()

    def sample(self) -> None:
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        self._graph.replay()
        events[1].record()
        self._events.append(events)

    def microseconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) / self._launches for begin, end in self._events]


class Clock:
    """The same by the host's clock; with one thread, by that thread's, which leaves other programs' turns out."""

    def __init__(self, launches: Sequence[Callable[[], object]]) -> None:
        self._launches = launches
        self._samples: list[float] = []
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        # what is freed stays with the process from here on: else large results cost page faults on some calls
        torch.empty(31 << 20, dtype=torch.uint8)
        for launch in launches:
            launch()

    def sample(self) -> None:
        begin = self._now()
        for launch in self._launches:
            launch()
        self._samples.append(1e6 * (self._now() - begin) / len(self._launches))

    def microseconds(self) -> list[float]:
        return self._samples


def medians(kinds: Sequence[Sequence[Callable[[], object]]], device: str, rounds: int) -> list[float]:
    """The median time of a launch of each kind, in microseconds; in turns, A B A B."""
    timers = [(Clock if device == "cpu" else Graph)(launches) for launches in kinds]
    for _ in range(rounds):
        for timer in timers:
            timer.sample()
    return [statistics.median(timer.microseconds()) for timer in timers]


if __name__ == "__main__":
    typer.run(main)
