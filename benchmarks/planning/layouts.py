"""The layout "balanced" on paper: work, and K/V rows received, for random batches of 16,384 tokens a rank.

    python -m benchmarks.planning.layouts --out benchmarks/results/layouts.csv

No group, no tensor. It prints of each batch

- the largest rank's visible pairs over the mean;
- the K/V rows that ranks receive: of the rank that receives most, and the mean. (A rank needs its documents' rows
  before its last row there, less those it has.)
- a lower bound of the largest number of rows received, for any layout (below);
- the pieces of the rank that has most of them;
- a processor's time to decide ownership.

`dual_chunk` receives all rows but the own.

The lower bound: some rank has the last row of the longest document, and needs all its rows. It holds no more of them
than fit, and no more than see the pairs that a rank may have: m rows of one document see m * m / 2 pairs and more. It
receives the others.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from cp_ref.schedules.areas import Areas
from cp_ref.schedules.balanced import balanced, pairs_before
from cp_ref.schedules.ownership import Fragments
from cp_ref.schedules.table import Column

ROWS = 16_384
CASES = (
    ("powers of two, 64 to 8,192", None, (8,)),
    ("log-normal, median 900, sigma 1.1", (900, 1.1, 10**9), (8, 64)),
    ("log-normal, median 1,000, sigma 1.5, up to 131,072", (1000, 1.5, 131_072), (8, 64)),
    ("log-normal, median 10,000, sigma 1.2, up to 131,072", (10_000, 1.2, 131_072), (8, 64)),
)


def draw(kind: tuple[float, float, int] | None, cp_size: int, generator: np.random.Generator) -> list[int]:
    """Lengths of documents that fill the ranks; the last one is cut off."""
    lengths: list[int] = []
    room = cp_size * ROWS
    while room:
        if kind is None:
            length = int(2 ** generator.integers(6, 14))
        else:
            median, sigma, most = kind
            length = int(min(max(1, generator.lognormal(np.log(median), sigma)), most))
        lengths.append(min(length, room))
        room -= lengths[-1]
    return lengths


class Measured(NamedTuple):
    """One batch: the most work, rows received and pieces of a rank; the mean of the rows received; a lower bound of the
    most rows received, if work is at most 1.02.
    """

    work: float
    received: int
    received_by_all: float
    received_at_least: float
    pieces: int


def measured(own: Fragments, starts: Column, before: Column, cp_size: int) -> Measured:
    """The results for a batch."""
    cut = own.within(starts[:-1], starts[1:])
    document = np.searchsorted(starts, cut.start, side="right") - 1
    pairs, received, pieces = [], [], []
    for rank in range(cp_size):
        mine = cut.rank == rank
        start, stop, of = cut.start[mine], cut.stop[mine], document[mine]
        last = np.zeros(len(starts) - 1, dtype=np.int64)
        np.maximum.at(last, of, stop - starts[of])
        received.append(int(last.sum() - (stop - start).sum()))
        pairs.append(int((before[stop] - before[start]).sum()))
        pieces.append(len(start))
    need = sum(pairs) / cp_size
    at_least = max(int(np.diff(starts).max()) - min(ROWS, (2 * 1.02 * need) ** 0.5), 0.0)
    return Measured(max(pairs) / need, max(received), statistics.mean(received), at_least, max(pieces))


def main(
    out: Annotated[Path | None, typer.Option(help="Write a CSV here too.")] = None,
    draws: Annotated[int, typer.Option(help="Batches of each kind.", min=1)] = 20,
) -> None:
    """Measure every case and print the table."""
    generator = np.random.default_rng(0)
    columns = ("work_most", "received", "received_by_all", "received_at_least", "received_most", "pieces_most", "ms")
    table = Table("documents", "cp", *columns)
    lines: list[dict[str, object]] = []
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    for name, kind, cp_sizes in CASES:
        for cp_size in cp_sizes:
            found: list[Measured] = []
            times: list[float] = []
            numbers: list[int] = []
            for _ in range(draws):
                lengths = draw(kind, cp_size, generator)
                starts = np.append(0, np.cumsum(np.array(lengths, dtype=np.int64)))
                documents = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
                areas = Areas.of_rows([(a, b, a, b, -(2**40), 0) for a, b in documents])
                began = time.process_time()
                own = balanced(starts, np.diff(starts), areas, cp_size)
                times.append((time.process_time() - began) * 1e3)
                found.append(measured(own, starts, pairs_before(areas, int(starts[-1])), cp_size))
                numbers.append(len(lengths))
            line = {
                "documents": name,
                "cp_size": cp_size,
                "draws": draws,
                "number_mean": round(statistics.mean(numbers)),
                "work_most": round(max(one.work for one in found), 4),
                "received": round(statistics.mean(one.received for one in found)),
                "received_by_all": round(statistics.mean(one.received_by_all for one in found)),
                "received_at_least": round(statistics.mean(one.received_at_least for one in found)),
                "received_most": max(one.received for one in found),
                "dual_chunk_receives": ROWS * (cp_size - 1),
                "pieces_most": max(one.pieces for one in found),
                "ms": round(statistics.median(times), 1),
                "commit": commit,
            }
            lines.append(line)
            table.add_row(name, str(cp_size), *(f"{line[column]:,}" for column in columns))
    Console().print(table)
    if out is not None:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    typer.run(main)
