"""The tables and the picture of docs/how_to/long_context.md, from the record of `long_context.py`.

    python -m benchmarks.long_context_page --write

A cell has tokens/s and the peak memory of a GPU in GiB, or says why it has none. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.parts.performance_tables import markdown

__all__ = ["PAGE", "RECORD", "longest_table", "page_of", "picture", "speed_table"]

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "long_context_libraries_2x_h100.json"
PAGE = ROOT / "docs" / "how_to" / "long_context.md"
PICTURE = ROOT / "docs" / "pictures" / "long_context_memory.svg"
PICTURE_LINE = "![The memory of a GPU over one step](../pictures/long_context_memory.svg)\n"
BEGIN, END = "<!-- by benchmarks/long_context_page.py -->", "<!-- end -->"
LIBRARIES = {
    "cp_fast": "cp-attention",
    "cp_fast+liger": "cp-attention, Liger's loss",
    "cp_fast+no_offload": "cp-attention, no offload",
    "accelerate": "accelerate",
    "pytorch": "PyTorch without accelerate",
    "accelerate+own_loss": "accelerate, loss of Transformers",
    "ring_flash_attn": "ring-flash-attn",
}
Row = dict[str, Any]


def _result(row: Row | None) -> str:
    """The cell of a length: tokens/s and memory, or the reason why there are none.

    >>> _result({"tokens_per_s": 39362, "peak_gib": 13.472}), _result({"error": "torch.OutOfMemoryError: CUDA"})
    ('39,362, 13.5 GiB', 'out of memory')
    """
    if row is None:
        return "-"
    if "error" in row:
        return "out of memory" if "OutOfMemory" in row["error"] else "failed"
    return f"{row['tokens_per_s']:,}, {row['peak_gib']:.1f} GiB"


def speed_table(rows: list[Row]) -> str:
    """Tokens/s and memory: a line for each length and number of layers, a column for each library."""
    rows = [row for row in rows if "TimeoutError" not in row.get("error", "")]  # The machine's time was up.
    shown = [name for name in LIBRARIES if any(row["library"] == name for row in rows)]
    found = {(row["tokens"], row["layers"], row["library"]): row for row in rows}
    cases = sorted({(row["tokens"], row["layers"]) for row in rows}, key=lambda case: (case[1] == 36, case))
    lines = [[f"{n:,}", str(layers), *(_result(found.get((n, layers, name))) for name in shown)] for n, layers in cases]
    return markdown(["tokens", "layers", *(LIBRARIES[name] for name in shown)], lines)


def _tried(row: Row | None) -> str:
    if row is None or "not_run" in row:
        return "not tried"
    result = "fits" if "error" not in row else _result(row)
    return f"{row['tokens']:,}: {result}"


def longest_table(rows: list[Row]) -> str:
    """The longest sequence of each library with all layers, as the memory at two lengths predicts it."""
    lines: list[list[str]] = []
    for row in rows:
        name = LIBRARIES[row["library"]]
        if "predicted" not in row:
            lines.append([name, "-", "-", _result(row), "-"])
            continue
        tried = [_tried(row.get(where)) for where in ("below", "above")]
        lines.append([name, f"{row['predicted']:,}", f"{row['bytes_per_token']:,}", *tried])
    return markdown(["library", "longest, predicted", "bytes a token", "a shorter one", "a longer one"], lines)


def picture(rows: list[Row], path: Path) -> None:
    """Memory over a step: what is allocated at each reading, and above it the most since the reading before."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "long_context"
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for row in rows:
        if "memory" in row:
            label = f"{LIBRARIES[row['library']]}, {row['tokens']:,} tokens, {row['layers']} layers"
            shares = [n / (len(row["memory"]) - 1) for n in range(len(row["memory"]))]
            (line,) = axes.plot(shares, [now for _, now, _ in row["memory"]], linewidth=1.2, label=label)
            now, most = ([reading[n] for reading in row["memory"]] for n in (1, 2))
            axes.fill_between(shares, now, most, color=line.get_color(), alpha=0.2, step="pre")
    axes.set_xlabel("readings of one step: around attention and MLP of each layer, forward, then recomputed")
    axes.set_ylabel("GiB of a GPU")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def page_of(text: str, record: dict[str, Any]) -> str:
    """The page with the tables and the picture between its two marks."""
    before, rest = text.split(BEGIN)
    tables = [speed_table(record["rows"])]
    tables += [longest_table(record["longest"])] if record["longest"] else []
    tables += [PICTURE_LINE] if any("memory" in row for row in record["rows"]) else []
    return "\n".join([before + BEGIN, "", *tables, END + rest.split(END)[1]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put them into the page")
    given = parser.parse_args()
    record = json.loads(RECORD.read_text())
    text = page_of(PAGE.read_text(), record)
    print(text.split(BEGIN)[1].split(END)[0])
    if given.write:
        PAGE.write_text(text)
        if PICTURE_LINE in text:
            picture(record["rows"], PICTURE)


if __name__ == "__main__":
    main()
