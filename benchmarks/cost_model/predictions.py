"""The cost model against what was measured, and what it says of many ranks.

    python -m benchmarks.cost_model.predictions   # predictions.csv, predictions.png and predictions_1024.png in results

Each row of the records is predicted by `cp_fast.tools.cost` on the machine that was fitted to some of them
(`benchmarks/cost_model/fit_machine.py`; its `source` says to which). `FARTHER` names what is more than 10 % off,
and why.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cost_model.records import RESULTS, Record, read_records
from cp_fast.compile.machine import Machine, read_machine
from cp_fast.tools.cost.predict import MESSAGES, candidates, counted, predict, priced
from cp_ref.schedules.problem import Problem, Sequence

FILES = ("speed_2x_h200", "speed_4x_h200")  # of the executor as it is; older records are of slower ones
WITHIN = 0.1
FARTHER = {  # (commit, schedule, layout, documents, window, GPUs; None for any): why
    ("eb9db46", None, None, None, None, 4): "four GPUs, measured once; the machine is fitted to records of two",
    (None, "a2a", "balanced", 16, None, None): "measured before short documents stayed on their rank",
    (None, "all_gather", "balanced", 5, None, 2): "measured while own keys attended first in the forward pass too",
}


@dataclass(frozen=True)
class Compared:
    """A record, and what is predicted for it; ms and GiB."""

    record: Record
    forward_ms: float
    both_ms: float
    peak_gib: float

    @property
    def off(self) -> tuple[float, float]:
        """Relative errors of forward, and of forward and backward."""
        return self.forward_ms / self.record.forward_ms - 1, self.both_ms / self.record.both_ms - 1

    @property
    def within(self) -> bool:
        """Whether both are within 10 %."""
        return max(map(abs, self.off)) <= WITHIN

    @property
    def kind(self) -> tuple[str, str, str, int, bool, int]:
        """The key of `FARTHER`."""
        problem = self.record.problem
        window = problem.window_size[0] >= 0
        documents = len(problem.sequences)
        return self.record.commit, problem.cp_comm_type, problem.layout_name, documents, window, problem.cp_size


def compared(machine: Machine, names: Iterable[str] = FILES) -> list[Compared]:
    """Every row of cp_fast's in these files."""
    once, found = cache(counted), []
    for record in (one for name in names for one in read_records(name) if _ours(one)):
        said = priced(once(record.problem, record.head_chunks), machine, record.messages)
        found.append(Compared(record, 1e3 * said.forward_s, 1e3 * said.seconds, said.peak_bytes / 2**30))
    return found


def _ours(one: Record) -> bool:
    return one.library == "cp_fast" and one.messages in MESSAGES


def why_farther(one: Compared) -> str:
    """The reason that `FARTHER` gives for a row; nothing if it has none."""
    for kind, why in FARTHER.items():
        if all(wanted in (None, got) for wanted, got in zip(kind, one.kind, strict=True)):
            return why
    return ""


def write(rows: list[Compared], path: Path) -> None:
    """A line for each row: what was measured, what is predicted, and why they differ by more than 10 %."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        measured = "forward_ms", "forward_backward_ms", "peak_gib"
        both = [name for one in measured for name in (one, f"predicted_{one}")]
        writer.writerow(["file", "commit", "what", *both, "within_10_percent", "why_not"])
        for one in rows:
            record = one.record
            numbers = [record.forward_ms, one.forward_ms, record.both_ms, one.both_ms, record.peak_gib, one.peak_gib]
            why = "" if one.within else why_farther(one)
            cells = [f"{x:.3f}" for x in numbers]
            writer.writerow([record.file, record.commit, record.name, *cells, one.within, why])


def _against_measured(rows: list[Compared], path: Path) -> None:
    """Predicted over measured, by measured time."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.axhspan(0.9, 1.1, color="#3b6fb6", alpha=0.12, label="within 10 %")
    for gpus, colour in ((2, "#3b6fb6"), (4, "#e08a1e")):
        some = [one for one in rows if one.record.problem.cp_size == gpus]
        for n, (name, marker) in enumerate((("forward", "x"), ("forward and backward", "o"))):
            measured = [(one.record.forward_ms, one.record.both_ms)[n] for one in some]
            ratio = [1 + one.off[n] for one in some]
            axes.scatter(measured, ratio, s=18, marker=marker, color=colour, alpha=0.7, label=f"{gpus} GPUs, {name}")
    axes.set_xscale("log")
    axes.set_xlabel("measured, ms a call")
    axes.set_ylabel("predicted / measured")
    axes.legend(fontsize=7)
    _save(figure, path)


def _to_many_ranks(machine: Machine, tokens: int, path: Path) -> None:
    """Efficiency by number of ranks and schedule, of one causal sequence whose tokens grow with the ranks."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    lines: dict[str, list[tuple[int, float]]] = {}
    for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        one = (Sequence(*[ranks * tokens] * 4),)
        problem = Problem(ranks, one, heads_q=32, heads_kv=8, d_qk=128, d_v=128, dtype="bfloat16")
        for found in candidates(problem, machine.domain, ["dual_chunk"]):
            if not found.refused:
                said = predict(found.problem, machine)
                lines.setdefault(found.problem.cp_comm_type, []).append((ranks, said.efficiency))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1)
    axes.set_xlabel(
        f"GPUs, {tokens:,} tokens each; {machine.domain} share NVLink, else {machine.network.gbytes_s:g} GB/s"
    )
    axes.set_ylabel("kernel alone / predicted")
    axes.set_title("one causal sequence, 32 heads over 8, d 128, bf16, forward and backward: predicted", fontsize=9)
    axes.legend(fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(
    machine: Annotated[str, typer.Option(help="A machine of the cost model.")] = "h200-nvlink",
    tokens: Annotated[int, typer.Option(help="Tokens a rank in the plot of many ranks.")] = 16384,
    out: Annotated[Path, typer.Option(help="Folder.")] = RESULTS,
) -> None:
    """Write the table and both plots."""
    import matplotlib  # an extra: only pictures need it

    matplotlib.use("Agg")
    known = read_machine(machine)
    rows = compared(known)
    write(rows, out / "predictions.csv")
    _against_measured(rows, out / "predictions.png")
    _to_many_ranks(known, tokens, out / "predictions_1024.png")
    print(f"{sum(one.within for one in rows)} of {len(rows)} rows within 10 %; farther:")
    for one in rows:
        if not one.within:
            print(f"  {one.record.commit} {one.record.name}: {one.off[0]:+.1%}, {one.off[1]:+.1%}: {why_farther(one)}")


if __name__ == "__main__":
    typer.run(main)
