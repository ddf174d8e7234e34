"""What the makers of tables share: rows of records, figures and Markdown."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import NamedTuple

__all__ = ["RESULTS", "SCHEDULES", "SIXTEEN", "Line", "is_of", "markdown", "record", "rounded"]

RESULTS = Path(__file__).parents[1] / "results"
SCHEDULES = ("p2p", "all_gather", "a2a")
SIXTEEN = "1024 512 2048 256 4096 1024 512 8192 256 2048 512 1024 64 2048 4096 5056"


class Line(NamedTuple):
    """A line of a speed table: the record's file, and what rows it is made of; `layout` is of ours."""

    file: str
    lengths: str
    heads: str = "32 8"
    dims: str = "128 128"
    window: str = "-1"
    layout: str = "dual_chunk"


def record(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    """The rows of a file."""
    with (folder / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def is_of(row: dict[str, str], line: Line) -> bool:
    """Whether a row of the line's record is of its problem, and of its layout where it is of ours."""
    pairs = [" ".join(row[name] for name in names) for names in (("heads_q", "heads_kv"), ("d_qk", "d_v"))]
    ours = row.get("library", "cp_fast") == "cp_fast"
    shape = row["lengths"], *pairs, row["window"]
    return shape == line[1:5] and (not ours or row.get("layout", line.layout) == line.layout)


def rounded(value: str) -> str:
    """To two digits as people do it.

    >>> rounded("0.845")
    '0.85'
    """
    return str(Decimal(value).quantize(Decimal("0.01"), ROUND_HALF_UP))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines) + "\n"
