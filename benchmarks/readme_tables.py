"""The tables of features and of speed in docs/conformance/comparison.md, the README's lines of speed, the tables of
docs/performance.md, of docs/support.md and of two pages of docs/how_to, and the table of commits in
benchmarks/results/README.md, from records.

    python -m benchmarks.readme_tables --write
    python -m benchmarks.readme_tables --check

`features.csv` has the features of each library, from its sources and documents. `conformance_1x.json` counts the random
problems that were right. A line of a speed table is of one run of `benchmarks/attention.py --peers`, whose file
`SPEEDS` names. All libraries in it were measured in turns, except those whose column names an earlier record.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from benchmarks.parts.architecture_tables import architecture_tables
from benchmarks.parts.performance_tables import (
    RESULTS,
    SCHEDULES,
    SIXTEEN,
    Line,
    is_of,
    linear_tables,
    markdown,
    performance_tables,
    record,
    rounded,
    score_table,
)

__all__ = [
    "MEASURED",
    "SPEEDS",
    "commit_table",
    "feature_table",
    "part_of",
    "replaced",
    "speed_table",
    "tables_of",
]

ROOT = Path(__file__).parents[1]


README_SPEEDS = ("one causal sequence", "five packed documents", "sixteen short documents", "window of 4,096")


class Column(NamedTuple):
    """A column of a speed table: a library, its schedules, and the record, where it is not the line's own."""

    library: str
    schedules: Sequence[str]
    file: str | None = None


class Speeds(NamedTuple):
    """A speed table: of some GPUs, in one run or several."""

    columns: dict[str, Column]
    lines: dict[str, Line]


_TWO = "speed_peers_2x_h100"
_FOUR = "speed_peers_4x_h100"
_H200 = "speed_libraries_2x_h200"
_OURS = Column("cp_fast", SCHEDULES)
_RING = Column("ring_flash_attn", ("p2p",))
_PYTORCH = Column("pytorch", ("p2p", "all_gather"))
_MAGI = Column("magi_attention", ("p2p",))
SPEEDS = {
    "2 x H100": Speeds(
        {
            "cp-attention": _OURS,
            "MagiAttention 1.1.1": _MAGI,
            "ring-flash-attn on FA4, zigzag": _RING,
            "TransformerEngine 2.20.2": Column("transformer_engine", SCHEDULES),
            "PyTorch `context_parallel`": _PYTORCH,
        },
        {
            "one causal sequence": Line(_TWO, "32768"),
            "five packed documents": Line(_TWO, "16384 8192 4096 2048 2048", layout="balanced"),
            "sixteen short documents": Line(_TWO, SIXTEEN, layout="balanced"),
            "head dims 192 and 128": Line(_TWO, "32768", "32 32", "192 128"),
            "window of 4,096": Line(_TWO, "32768", window="4096"),
        },
    ),
    "4 x H100": Speeds(
        {
            "cp-attention": _OURS,
            "MagiAttention 1.1.1": _MAGI,
            "ring-flash-attn on FA4, zigzag": _RING,
            "PyTorch `context_parallel`": _PYTORCH,
        },
        {
            "one causal sequence": Line(_FOUR, "65536"),
            "five packed documents": Line(_FOUR, "32768 16384 8192 4096 4096", layout="balanced"),
            "32 short documents": Line(_FOUR, f"{SIXTEEN} {SIXTEEN}", layout="balanced"),
            "window of 4,096": Line(_FOUR, "65536", window="4096"),
        },
    ),
    "2 x H200": Speeds(
        {
            "cp-attention": _OURS,
            "MagiAttention 1.1.1": _MAGI,
            "ring-flash-attn on FA4, zigzag": _RING,
            "PyTorch `context_parallel`": _PYTORCH,
            "TransformerEngine 2.20.2": Column("transformer_engine", SCHEDULES, "side_by_side_2x_h200"),
        },
        {
            "one causal sequence": Line(_H200, "32768"),
            "five packed documents": Line(_H200, "16384 8192 4096 2048 2048", layout="balanced"),
            "sixteen short documents": Line(_H200, SIXTEEN, layout="balanced"),
            "head dims 192 and 128": Line("speed_2x_h200", "32768", "32 32", "192 128"),
            "window of 4,096": Line(_H200, "32768", window="4096"),
        },
    ),
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
    return markdown(["", *libraries], [[cell.format(**counts) for cell in row] for row in rows])


def speed_table(gpus: str, folder: Path = RESULTS) -> str:
    """Efficiency, forward and backward, of each library's schedules, as Markdown.

    Args:
        gpus: a table of `SPEEDS`.

    Raises:
        ValueError: a record does not have a line, or has it twice.
    """
    (columns, lines), rows = SPEEDS[gpus], list[list[str]]()
    for name, line in lines.items():
        cells = [_cell(folder, column, line) for column in columns.values()]
        if cells[0] == "-":
            raise ValueError(f"{line.file}.csv has no row of cp_fast for {name!r}")
        rows.append([name, f"**{cells[0]}**", *cells[1:]])
    return markdown([gpus, *columns], rows)


def _cell(folder: Path, column: Column, line: Line) -> str:
    """The figures by schedule; "refused" where the library did not take the problem, "-" where it was not run."""
    name, figures = f"{column.file or line.file}.csv", list[str]()
    rows = [row for row in record(name, folder) if is_of(row, line)]
    for schedule in column.schedules:
        mine = [row for row in rows if (row.get("library", "cp_fast"), row["schedule"]) == (column.library, schedule)]
        if len({row.get("messages") for row in mine}) != len(mine):
            raise ValueError(f"{name} has {column.library} {schedule} more than once for {line}")
        fastest = max((row["forward_backward_efficiency"] for row in mine), key=float, default=None)
        why = [reason for row in rows for reason in row.get("not_run", "").split("; ")]
        of_problem = [reason for reason in why if "this adapter needs" not in reason]  # It was not installed.
        refused = any(reason.startswith(f"{column.library} {schedule}:") for reason in of_problem)
        figures.append("refused" if fastest is None and refused else "-" if fastest is None else rounded(fastest))
    return figures[0] if len(set(figures)) == 1 and figures[0] in ("-", "refused") else " / ".join(figures)


def part_of(table: str, names: Sequence[str]) -> str:
    """A table's head, and the lines that begin with these names.

    >>> part_of("| | a |\\n| --- | --- |\\n| x | 1 |\\n| y | 2 |\\n", ["y"]).splitlines()[2:]
    ['| y | 2 |']
    """
    head, rule, *lines = table.splitlines()
    return "\n".join((head, rule, *(line for line in lines if line.split(" | ")[0].strip("| ") in names))) + "\n"


def tables_of(folder: Path = RESULTS) -> dict[str, list[str]]:
    """The tables of each document."""
    features, speeds = feature_table(), {gpus: speed_table(gpus, folder) for gpus in SPEEDS}
    return {
        "README.md": [part_of(speeds["2 x H100"], README_SPEEDS)],
        "docs/conformance/comparison.md": [features.replace("](docs/", "](../"), *speeds.values()],
        "docs/performance.md": performance_tables(),
        "docs/how_to/scores.md": [score_table()],
        "docs/how_to/hybrid.md": linear_tables(),
        "docs/support.md": architecture_tables(),
    }


# The files and folders that a record measures, by its name. The first pattern that fits counts.
_SPEC = ("cp_ref/schedules", "cp_ref/problems", "cp_ref/calls", "cp_ref/groups", "cp_ref/batches")
_CALLS = ("cp_fast", *_SPEC, "csrc")
MEASURED: Mapping[str, tuple[str, ...]] = {
    "features.csv": (),  # read in other libraries' sources
    "one_launch_*": (),  # a prototype, which is not in this package
    "peers_*": ("conformance",),
    "sweep.json": ("cp_fast/integrations", "benchmarks/parts/sweep_cases.py", "benchmarks/parts/tiny_models.py"),
    "diffusers_*": ("cp_fast/integrations/diffusers.py", "cp_fast/integrations/diffusion"),
    "pytorch_by_hand.txt": ("benchmarks/checks/pytorch_by_hand.py",),
    "kernels_*": ("csrc", "cp_fast/movers"),
    "gpu_kernels_*": ("csrc", "cp_fast/movers"),
    "gpu_thd_*": ("csrc", "cp_fast/movers", "cp_fast/thd.py"),
    "sanitizers_cpu.json": ("csrc",),
    "selective_scan_*": ("cp_fast/layers", "cp_fast/kernels/linear"),
    "linear_*": ("cp_fast/layers", "cp_fast/kernels/linear", "cp_fast/movers", *_SPEC),
    "hybrid_*": ("cp_fast", *_SPEC),
    "convolution_*": ("cp_fast/layers", "cp_fast/kernels/convolution"),
    "layouts.csv": _SPEC,
    "planning*": ("cp_fast/compile", "cp_fast/tiles", *_SPEC),
    "attack_schedules.json": ("cp_ref", "cp_fast"),
    "attack_calls.md": ("cp_ref", "cp_fast"),
    "conformance.md": ("cp_ref", "cp_fast", "conformance"),
    "predictions*": ("cp_fast/tools/cost", "cp_fast/compile", "cp_fast/tiles", *_SPEC),
    "*": _CALLS,
}
# Records that name no commit, and the commit that brought them.
_BROUGHT_BY = {
    "attack_calls.md": "eead0cfd",
    "calls.csv": "91e41b5e",
    "conformance.md": "e1e4c14a",
    "features.csv": "abbe32d1",
    "kernels_h200.svg": "3cc1ce79",
    "predictions.png": "1efb6a77",
    "predictions_1024.png": "1efb6a77",
    "side_by_side_2x_h200.csv": "b99bdef4",
    "training_4x_h200.csv": "d932ded0",
    "training_4x_h200.png": "d932ded0",
    "training_cpu.csv": "5b440161",
    "training_cpu.png": "5b440161",
}
_HEX = r"(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}"


def _git(root: Path, *words: str, stdin: str = "") -> list[str]:
    """The lines that a git command prints; none where it fails, or where there is no git."""
    try:
        done = subprocess.run(["git", *words], cwd=root, input=stdin, capture_output=True, text=True)
    except OSError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _named_in(path: Path, page: str) -> list[list[str]]:
    """Commits of a record: those in the file; else in its line on the page; else the one that brought it."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.suffix in (".json", ".csv") else ""
    own = re.findall(rf'"commit": "({_HEX})', text)
    if path.suffix == ".csv" and "commit" in text.partition("\n")[0].split(","):
        own = [row["commit"] for row in csv.DictReader(text.splitlines())]
    lines = [line for line in page.splitlines() if line[:1] == "|" and f"`{path.name}`" in line.split("|")[1]]
    said = [word for line in lines for word in re.findall(rf"\b{_HEX}\b", line)]
    brought = [_BROUGHT_BY[path.name]] if path.name in _BROUGHT_BY else []
    return [[word.strip(",") for word in dict.fromkeys(words)] for words in (own, said, brought)]


def _measured(name: str) -> tuple[str, ...]:
    return next(paths for pattern, paths in MEASURED.items() if fnmatch(name, pattern))


def commit_table(page: str, root: Path = ROOT) -> str | None:
    """The table of all records: the newest commit that each is of, its day, the files and folders that it measures, and
    whether these are not those of the working tree any more.

    Args:
        page: the text of benchmarks/results/README.md.

    Returns:
        Markdown; None where git does not have the whole history, as in a shallow clone, or is not there.
    """
    if _git(root, "rev-parse", "--is-shallow-repository") != ["false"]:
        return None
    folder = root / "benchmarks" / "results"
    records = [path for path in sorted(folder.iterdir()) if path.name != "README.md" and path.name[0] != "."]
    named = {path.name: _named_in(path, page) for path in records}
    history = dict(line.split() for line in _git(root, "log", "--format=%H %cs", "HEAD"))
    newest_first = {commit: n for n, commit in enumerate(history)}
    newest: dict[str, str] = {}
    for name, words in named.items():
        of = [[full for full in history if full.startswith(tuple(some))] for some in words if some]
        if found := next((some for some in of if some), []):
            newest[name] = min(found, key=newest_first.__getitem__)
    changed = _changed(root, {(commit, path) for name, commit in newest.items() for path in _measured(name)})
    rows: list[list[str]] = []
    for name in named:
        paths, commit = _measured(name), newest.get(name)
        of, since = "none of this history", "unknown"
        if commit is not None:
            of = f"{commit[:8]}, {history[commit]}"
            since = "yes" if any((commit, path) in changed for path in paths) else "no"
        rows.append([f"`{name}`", of, ", ".join(paths) or "-", since if paths else "-"])
    return markdown(["record", "commit", "measures", "changed since"], rows)


def _changed(root: Path, wanted: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of (commit, path) whose path has changed since the commit."""
    pairs = sorted(wanted)
    asked = [f"{commit}:{path}\nHEAD:{path}\n" for commit, path in pairs]
    found = _git(root, "cat-file", "--batch-check=%(objectname)", stdin="".join(asked))
    found = ["missing" if line.endswith(" missing") else line for line in found]
    at_work = _git(root, "diff", "--name-only", "HEAD")
    return {
        (commit, path)
        for (commit, path), then, now in zip(pairs, found[::2], found[1::2], strict=True)
        if then != now or any(name == path or name.startswith(f"{path}/") for name in at_work)
    }


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


def main(
    write: Annotated[bool, typer.Option("--write", help="Put them into the documents.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a document has another table.")] = False,
) -> None:
    """Print all tables that a document does not have."""
    pages = tables_of()
    records = "benchmarks/results/README.md"
    commits = commit_table((ROOT / records).read_text(encoding="utf-8"))
    pages |= {records: [] if commits is None else [commits]}
    differ = False
    for name, tables in pages.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        new = text
        for table in tables:
            if table not in new:
                print(f"{name} has another table:\n\n{table}")
            new = replaced(new, table)
        differ = differ or new != text
        if write:
            (ROOT / name).write_text(new, encoding="utf-8")
    if commits is None:
        print(f"{records}: the table of commits stays as it is, since git does not have the whole history")
    raise typer.Exit(1 if check and differ else 0)


if __name__ == "__main__":
    typer.run(main)
