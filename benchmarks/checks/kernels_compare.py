"""The kernels of two trees in turns, on one machine: no case may be slower by more than 3 %.

    git archive COMMIT | tar -x -C OLD
    python benchmarks/checks/kernels_compare.py OLD . --turns 3 --out kernels_compare.csv

Each turn runs `benchmarks/kernels.py` of both trees, one after the other, so that both see the same clocks. Reported is
the median over the turns of each case, and the ratio of the new tree to the old one.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

LIMIT = 1.03
Key = tuple[str, str, str]


def timed(tree: Path, options: list[str]) -> dict[Key, float]:
    """One run of a tree's benchmark: microseconds by kernel, case and implementation."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.csv"
        command = [sys.executable, "benchmarks/kernels.py", *options, "--out", str(out)]
        done = subprocess.run(
            command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree.resolve())}, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{tree}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        with out.open(newline="") as file:
            return {
                (row["kernel"], row["case"], row["implementation"]): float(row["us"]) for row in csv.DictReader(file)
            }


def main(
    old: Path,
    new: Path,
    turns: Annotated[int, typer.Option(help="Runs of each tree.")] = 3,
    implementations: Annotated[str, typer.Option(help="Which, with commas.")] = "native,numba",
    only: Annotated[str, typer.Option(help="Cases whose kernel begins so.")] = "",
    rounds: Annotated[int, typer.Option(help="Samples of each case in a run.")] = 40,
    device: str = "cuda",
    scale: int = 1,
    out: Annotated[Path | None, typer.Option(help="CSV file to write.")] = None,
) -> None:
    """Compare two trees."""
    options = ["--device", device, "--scale", str(scale), "--implementations", implementations]
    options += ["--only", only, "--rounds", str(rounds)]
    times: dict[Key, tuple[list[float], list[float]]] = {}
    for _ in range(turns):
        for side, tree in enumerate((old, new)):
            for key, us in timed(tree, options).items():
                times.setdefault(key, ([], []))[side].append(us)
    rows = []
    for (kernel, case, name), (before, after) in times.items():
        us, was = median(after), median(before)
        rows.append(
            [kernel, case, name, f"{was:.2f}", f"{us:.2f}", f"{us / was:.4f}", "yes" if us <= LIMIT * was else "no"]
        )
        print(*rows[-1])
    if out is not None:
        with out.open("w", newline="") as file:
            csv.writer(file).writerows(
                [["kernel", "case", "implementation", "old_us", "new_us", "ratio", "within_3_%"], *rows]
            )
    slower = [row for row in rows if row[-1] == "no"]
    print(f"{len(slower)} of {len(rows)} cases are slower by more than 3 %")
    raise typer.Exit(bool(slower))


if __name__ == "__main__":
    typer.run(main)
