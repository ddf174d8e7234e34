"""The tables of features and of speed in docs/conformance/comparison.md, and the README's lines of them, from records.

    python benchmarks/readme_tables.py --write

`features.csv` has what was read in sources and documents, by library; how many random problems found nothing wrong is
counted in `conformance_1x.json`. A line of the speed table is of one run of `benchmarks/attention.py --peers`, whose
file `LINES` names: all in it were measured in turns, but for libraries that `COLUMNS` takes from an earlier record.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

__all__ = ["LINES", "feature_table", "part_of", "replaced", "speed_table", "tables_of"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCHEDULES = ("p2p", "all_gather", "a2a")


README_FEATURES = ("packed documents of any lengths", "sliding windows", "wrong, and silent, when measured")
README_SPEEDS = ("one causal sequence", "five packed documents", "sixteen short documents")


class Column(NamedTuple):
    """A column of the speed table: a library, its schedules, and the record, where it is not the line's own."""

    library: str
    schedules: Sequence[str]
    file: str | None = None


COLUMNS = {
    "cp-attention": Column("cp_fast", SCHEDULES),
    "ring-flash-attn on FA4, zigzag": Column("ring_flash_attn", ("p2p",)),
    "PyTorch `context_parallel`": Column("pytorch", ("p2p", "all_gather")),
    "TransformerEngine 2.20.2": Column("transformer_engine", SCHEDULES, "side_by_side_2x_h200"),
}
_SIXTEEN = "1024 512 2048 256 4096 1024 512 8192 256 2048 512 1024 64 2048 4096 5056"


class Line(NamedTuple):
    """A line of the speed table: the record's file, and what rows it is made of; `layout` is of ours."""

    file: str
    lengths: str
    heads: str = "32 8"
    dims: str = "128 128"
    window: str = "-1"
    layout: str = "dual_chunk"


LINES = {
    "one causal sequence": Line("speed_peers_2x_h200", "32768"),
    "five packed documents": Line("speed_peers_2x_h200", "16384 8192 4096 2048 2048", layout="balanced"),
    "sixteen short documents": Line("speed_2x_h200", _SIXTEEN, layout="balanced"),
    "head dims 192 and 128": Line("speed_2x_h200", "32768", "32 32", "192 128"),
    "window of 4,096": Line("speed_2x_h200", "32768", window="4096"),
}


def feature_table() -> str:
    """Libraries and features, as Markdown."""
    runs = json.loads((RESULTS / "conformance_1x.json").read_text())["runs"]
    backends = [backend for run in runs for backend in run["backends"].values()]
    counts = {
        "problems": f"{sum(backend['problems'] for backend in backends):,}",
        "late": str(sum(len(backend["failures"]) for backend in backends)),
    }
    with (RESULTS / "features.csv").open(newline="", encoding="utf-8") as file:
        (_, *libraries), *rows = csv.reader(file)
    return _markdown(["", *libraries], [[cell.format(**counts) for cell in row] for row in rows])


def speed_table(folder: Path = RESULTS) -> str:
    """Efficiency, forward and backward, of each library's schedules, as Markdown.

    Raises:
        ValueError: a record does not have a line, or has it twice.
    """
    rows: list[list[str]] = []
    for name, line in LINES.items():
        cells = [_cell(folder, column, line) for column in COLUMNS.values()]
        if cells[0] == "-":
            raise ValueError(f"{line.file}.csv has no row of cp_fast for {name!r}")
        rows.append([name, f"**{cells[0]}**", *cells[1:]])
    return _markdown(["", *COLUMNS], rows)


def _is_of(row: dict[str, str], line: Line) -> bool:
    pairs = [" ".join(row[name] for name in names) for names in (("heads_q", "heads_kv"), ("d_qk", "d_v"))]
    ours = row.get("library", "cp_fast") == "cp_fast"
    shape = row["lengths"], *pairs, row["window"]
    return shape == line[1:5] and (not ours or row.get("layout", line.layout) == line.layout)


def _cell(folder: Path, column: Column, line: Line) -> str:
    """The figures by schedule; "refused" where the library did not take the problem, "-" where it was not run."""
    name, figures = f"{column.file or line.file}.csv", list[str]()
    with (folder / name).open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if _is_of(row, line)]
    for schedule in column.schedules:
        mine = [row for row in rows if (row.get("library", "cp_fast"), row["schedule"]) == (column.library, schedule)]
        if len({row.get("messages") for row in mine}) != len(mine):
            raise ValueError(f"{name} has {column.library} {schedule} more than once for {line}")
        fastest = max((float(row["forward_backward_efficiency"]) for row in mine), default=None)
        refused = any(f"{column.library} {schedule}:" in row.get("not_run", "") for row in rows)
        figures.append("refused" if fastest is None and refused else "-" if fastest is None else f"{fastest:.2f}")
    return figures[0] if len(set(figures)) == 1 and figures[0] in ("-", "refused") else " / ".join(figures)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines) + "\n"


def part_of(table: str, names: Sequence[str]) -> str:
    """A table's head, and the lines that begin with these names.

    >>> part_of("| | a |\\n| --- | --- |\\n| x | 1 |\\n| y | 2 |\\n", ["y"]).splitlines()[2:]
    ['| y | 2 |']
    """
    head, rule, *lines = table.splitlines()
    return "\n".join((head, rule, *(line for line in lines if line.split(" | ")[0].strip("| ") in names))) + "\n"


def tables_of(folder: Path = RESULTS) -> dict[str, list[str]]:
    """The tables of each document."""
    features, speeds = feature_table(), speed_table(folder)
    short = [part_of(features, README_FEATURES), part_of(speeds, README_SPEEDS)]
    return {"README.md": short, "docs/conformance/comparison.md": [features.replace("](docs/", "](../"), speeds]}


def replaced(text: str, table: str) -> str:
    """A text with the table in the place of the one that begins as it does, up to the second column's name.

    Raises:
        ValueError: there is no such table, or more than one.

    >>> replaced("a table:\\n| | a |\\n| --- | --- |\\n| x | 1 |\\n\\nbehind", "| | a |\\n| --- | --- |\\n| x | 2 |\\n")
    'a table:\\n| | a |\\n| --- | --- |\\n| x | 2 |\\n\\nbehind'
    """
    head = table.partition("\n")[0]
    if text.count(head + "\n") != 1:
        raise ValueError(f"the text has {text.count(head)} tables with the head {head}; it must have one")
    before, _, rest = text.partition(head + "\n")
    lines = rest.split("\n")
    end = next(n for n, line in enumerate(lines) if not line.startswith("|"))
    return before + table + "\n".join(lines[end:])


def main(write: Annotated[bool, typer.Option("--write", help="Put them into the documents.")] = False) -> None:
    """Print all tables."""
    for name, tables in tables_of().items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for table in tables:
            text = replaced(text, table)
            print(table)
        if write:
            (ROOT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
