"""The tables of docs/performance.md and of the pages on scores and linear layers, from records:
`benchmarks/readme_tables.py` puts them into the pages.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "RESULTS",
    "SCHEDULES",
    "SIXTEEN",
    "Line",
    "is_of",
    "linear_tables",
    "markdown",
    "performance_tables",
    "record",
    "rounded",
    "score_table",
]

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


# ---- docs/performance.md

Key = tuple[str, str]  # library, schedule
_ALL_OURS: dict[str, Key] = {f"`{schedule}`": ("cp_fast", schedule) for schedule in (*SCHEDULES, "a2a+p2p")}
_THREE = dict([*_ALL_OURS.items()][:3])
_AND_MAGI = _THREE | {"MagiAttention": ("magi_attention", "p2p")}
_AND_RING = _THREE | {"ring-flash-attn": ("ring_flash_attn", "p2p")}


def _both_layouts(title: str, line: Line) -> list[tuple[str, Line]]:
    return [(title, line), ("the same, `balanced`", line._replace(layout="balanced"))]


def _on_h100s(file: str, gpus: int, short: tuple[str, str]) -> list[tuple[str, Line]]:
    documents = " ".join(str(gpus * n) for n in (8192, 4096, 2048, 1024, 1024))
    whole = Line(file, str(16384 * gpus))
    return [
        ("one sequence", whole),
        ("five documents, 8:4:2:1:1, `balanced`", whole._replace(lengths=documents, layout="balanced")),
        (f"{short[0]}, `balanced`", whole._replace(lengths=short[1], layout="balanced")),
        *([("d_qk 192, d_v 128, 32 heads", whole._replace(heads="32 32", dims="192 128"))] if gpus == 2 else []),
        ("window 4,096", whole._replace(window="4096")),
    ]


def _on_h200s(file: str, gpus: int, short: tuple[str, str]) -> list[tuple[str, Line]]:
    (one, whole), (_, documents), *_, window = _on_h100s(file, gpus, short)
    powers = whole._replace(lengths="4096 2048 1024 256 256 64 64 64 128 4096 2048 8192 1024 1024 8192 192")
    latent = whole._replace(dims="192 128")
    two = [
        *_both_layouts("powers of two", powers),
        ("d_qk 192, d_v 128, 32 heads", latent._replace(heads="32 32")),
        ("the same, 64 heads over 4", latent._replace(heads="64 4")),
    ]
    return [
        (one, whole),
        ("one sequence, 8,192 a GPU", whole._replace(lengths=str(8192 * gpus))),
        *_both_layouts("five documents, 8:4:2:1:1", documents._replace(layout="dual_chunk")),
        *_both_layouts(short[0], whole._replace(lengths=short[1])),
        *(two if gpus == 2 else []),
        window,
    ]


def _later(file: str) -> list[tuple[str, Line]]:
    *some, window = _on_h100s(file, 4, _SHORT[1])
    return [*some, *_both_layouts(*window)]


_SHORT = ("sixteen documents of 64 to 8,192", SIXTEEN), ("32 documents of 64 to 8,192", f"{SIXTEEN} {SIXTEEN}")
EFFICIENCIES = {
    "2 x H100": (_AND_MAGI, _on_h100s("speed_peers_2x_h100", 2, _SHORT[0])),
    "4 x H100": (_AND_MAGI, _on_h100s("speed_peers_4x_h100", 4, _SHORT[1])),
    "2 x H200": (_THREE, _on_h200s("speed_2x_h200", 2, _SHORT[0])),
    "4 x H200": (_ALL_OURS, _on_h200s("speed_4x_h200", 4, _SHORT[1])),
    "4 x H200, later": (_THREE, _later("attention_by_heads_4x_h200")),
}


def _passes(row: Mapping[str, str]) -> str:
    """Efficiency forward, then of both passes."""
    return f"{rounded(row['forward_efficiency'])}, {rounded(row['forward_backward_efficiency'])}"


def efficiency_table(gpus: str) -> str:
    """A table of `EFFICIENCIES`: a cell is empty where ours was not run, and "refused" where others were not."""
    (columns, lines), rows = EFFICIENCIES[gpus], list[list[str]]()
    for title, line in lines:
        mine = [row for row in record(f"{line.file}.csv") if is_of(row, line)]
        of = {(row.get("library", "cp_fast"), row["schedule"]): _passes(row) for row in mine}
        cells = [of.get(key, "" if key[0] == "cp_fast" else "refused") for key in columns.values()]
        rows.append([title, *cells])
    return markdown([gpus, *columns], rows)


def shorter_table() -> str:
    """Shorter sequences, with the host's milliseconds."""
    of = {(r["case"], r["library"], r["schedule"]): r for r in record("speed_turns_2x_h100.csv")}
    rows = [
        [
            f"one sequence, {case}",
            *(f"{_passes(r)}; {r['host_ms']}" for key in _AND_RING.values() for r in [of[case, *key]]),
        ]
        for case in ("16,384 a GPU", "8,192 a GPU", "4,096 a GPU")
    ]
    return markdown(["", *_AND_RING], rows)


def mask_table() -> str:
    """Other masks: of each library's layouts the better one."""
    masks = {
        "causal": "causal",
        "a prefix of 8,192": "prefix_lm",
        "a prompt with answers": "shared_prefix",
        "block-causal, blocks of 2,048": "block_causal",
        "first tokens and a window of 4,096": "first_and_window",
    }
    columns = {f"`{schedule}`": schedule for schedule in SCHEDULES}
    columns |= {"MagiAttention": "magi_attention", "FlexAttention, one GPU": "flex_attention"}
    found = record("masks_2x_h100.csv")
    rows = [
        [
            title,
            *(
                rounded(max((r["share"] for r in found if (r["mask"], r["what"]) == (mask, what)), key=float))
                for what in columns.values()
            ),
        ]
        for title, mask in masks.items()
    ]
    return markdown(["", *columns], rows)


def forward_table() -> str:
    """Forward passes of a simulated group, in parts of the kernel's own rate."""
    lines = [
        ("one sequence", "dense"),
        ("one sequence, 8,192 a GPU", "dense, 8,192 a GPU"),
        ("one sequence, 4,096 a GPU", "dense, 4,096 a GPU"),
        ("five documents, 8:4:2:1:1, `balanced`", "8:4:2:1:1"),
        ("sixteen documents of 64 to 8,192, `balanced`", "sixteen documents"),
        ("window 4,096", "window 4,096"),
        ("the same, `balanced`", "window 4,096, balanced"),
        ("block-causal, blocks of 2,048", "block-causal"),
        ("a prefix of 8,192", "prefix-LM"),
        ("the same, with wide sums", "prefix-LM"),
        ("the same, `balanced`", "prefix-LM, balanced"),
        ("the same, `balanced`, with wide sums", "prefix-LM, balanced"),
        ("a prompt of 8,192 with 24 answers, `balanced`", "a prompt with answers"),
    ]
    found = json.loads((RESULTS / "forward_sums_1x_h200.json").read_text())["rows"]
    shares = {(row["case"], row["schedule"], row["sums"]): rounded(str(row["share"])) for row in found}

    def cells(title: str, case: str) -> list[str]:
        return [shares.get((case, schedule, "wide" if "wide" in title else "now"), "") for schedule in SCHEDULES]

    return markdown(["forward", *_THREE], [[title, *cells(title, case)] for title, case in lines])


def pass_table() -> str:
    """Plans without one compiler pass: time, launches and memory beside those of the whole plan."""
    found = {(row["case"], row["schedule"], row["without"]): row for row in record("passes_1x_h200.csv")}
    cases = ("one sequence", "five documents", "sixteen documents", "window 4096", "a prompt with 28 answers")
    columns = [(case, "p2p") for case in cases]
    columns.insert(2, ("five documents", "a2a"))
    gone = {"-", "hoist_copies", "prepend_keys", "split_queries"}  # passes that saved less than 1 %, and went

    def cell(column: tuple[str, str], name: str) -> str:
        without, whole = found[*column, name], found[*column, "-"]
        time, memory = (float(without[figure]) / float(whole[figure]) for figure in ("ms", "peak_gib"))
        return f"{time:.2f}, {int(without['launches']) - int(whole['launches']):+d}, {memory:.2f}"

    names = [name for name in dict.fromkeys(name for *_, name in found) if name not in gone]
    titles = {name: "all of them" if name == "all" else f"`{name}`" for name in names}
    rows = [[titles[name], *(cell(column, name) for column in columns)] for name in names]
    return markdown(["switched off", *(f"{case}, `{schedule}`" for case, schedule in columns)], rows)


def performance_tables() -> list[str]:
    """All of them."""
    return [*map(efficiency_table, EFFICIENCIES), shorter_table(), mask_table(), forward_table(), pass_table()]


# ---- docs/how_to


def score_table() -> str:
    """Launches with scores of places, as multiples of plain ones."""
    found = {row["case"]: row for row in record("scores_1x_h200.csv")}
    by_hand = "the same as FlashAttention 4's own `score_mod`, by hand"
    lines = [
        ("ALiBi", "alibi"),
        (by_hand, "alibi, the library's score_mod"),
        ("a scaled score and a bias by head and distance, traced", "bias, traced"),
        (by_hand, "bias, the library's score_mod"),
        ("dropout", "dropout"),
        ("ALiBi and dropout", "alibi and dropout"),
        ("ALiBi with places by row", "alibi by rows"),
        ("dropout with places by row", "dropout by rows"),
    ]

    def ratio(case: str, direction: str) -> str:
        return f"{float(found[case][direction]) / float(found['plain'][direction]):.2f}"

    rows = [[title, ratio(case, "forward_ms"), ratio(case, "backward_ms")] for title, case in lines]
    return markdown(["", "forward", "backward"], rows)


def linear_tables() -> list[str]:
    """Linear attention as a share of the kernel's speed alone, and milliseconds of scans and convolutions."""
    times = json.loads((RESULTS / "linear_1x_h200.json").read_text())["speed"]["ms"]
    layers: list[list[str]] = []
    for name, row in times.items():
        if name.startswith("cp_fast, "):
            alone = times["kernel alone, documents" if "documents" in name else "kernel alone"]
            forward, both, gpu_forward, gpu_both, *_ = (f"{a / b:.2f}" for a, b in zip(alone, row, strict=True))
            layers.append([name.removeprefix("cp_fast, "), f"{gpu_forward}, {gpu_both}", f"{forward}, {both}"])
    record = json.loads((RESULTS / "selective_scan_1x_h200.json").read_text())
    scans = [
        [title, *(f"{ms:.2f}" for model in ("mamba", "rg-lru") for ms in record[model]["ms"][name][:2])]
        for title, name in {"Triton": "cp_fast, contiguous", "plain PyTorch": "cp_fast, contiguous, torch"}.items()
    ]
    names = {
        "ours": "cp_fast, contiguous",
        "flash-linear-attention, one sequence": "flash-linear-attention",
        "plain PyTorch": "cp_fast, contiguous, torch",
    }
    times = json.loads((RESULTS / "convolution_1x_h200.json").read_text())["ms"]
    convolutions = [[title, *(f"{ms:.3f}" for ms in times[name][:2])] for title, name in names.items()]
    return [
        markdown(["sequences, layout", "time of the GPU alone", "calls in a row"], layers),
        markdown(["ms", "Mamba, forward", "both passes", "RG-LRU, forward", "both passes"], scans),
        markdown(["ms", "forward", "both passes"], convolutions),
    ]
