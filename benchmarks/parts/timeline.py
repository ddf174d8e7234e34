"""The GPUs' work during calls in a row: a Chrome trace a rank, and one picture of kernels, transfers and gaps.

`benchmarks/attention.py --trace FOLDER` writes both. The picture is of one of the calls. In it every rank has a line
for each stream; the time begins with the rank's first event of that call, so that lines of different ranks are not
aligned to each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

__all__ = ["Span", "gaps", "one_call", "pictures", "record", "spans"]

_CALLS = 5  # in a row
_COLOURS = {"attention": "#3b6fb6", "transfer": "#e08a1e", "NCCL": "#c2402c", "other kernel": "#6fa86a"}


class Span(NamedTuple):
    """Something that a stream did; microseconds from the rank's first."""

    kind: str
    name: str
    stream: int
    start: float
    stop: float


def record(folder: Path, name: str, call: Callable[[], Any], rank: int) -> None:
    """Profile calls in a row, as layers follow each other, and write them as FOLDER/NAME.rank.json. What the host does
    is left out, as that would slow it down until the GPUs wait for it.
    """
    call()
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_CALLS):
            call()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(folder / f"{name.replace(' ', '_')}.{rank}.json"))


def one_call(found: list[Span]) -> list[Span]:
    """The last but one of the calls that were recorded: all have equally many spans."""
    count = len(found) // _CALLS
    cut = found[(_CALLS - 2) * count : (_CALLS - 1) * count]
    first = cut[0].start if cut else 0.0
    return [span._replace(start=span.start - first, stop=span.stop - first) for span in cut]


def spans(trace: dict[str, Any]) -> list[Span]:
    """The GPU's part of a Chrome trace, by start.

    >>> event = {"ph": "X", "cat": "kernel", "name": "flash_bwd", "ts": 5.0, "dur": 2.0, "args": {"stream": 7}}
    >>> spans({"traceEvents": [event, {**event, "cat": "gpu_memcpy", "ts": 6.0}, {"ph": "M"}]})[1]
    Span(kind='transfer', name='flash_bwd', stream=7, start=1.0, stop=3.0)
    """
    events = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events.sort(key=lambda e: e["ts"])
    return [
        Span(
            _kind(e["cat"], e["name"]),
            e["name"],
            e["args"]["stream"],
            e["ts"] - events[0]["ts"],
            e["ts"] + e["dur"] - events[0]["ts"],
        )
        for e in events
    ]


def _kind(category: str, name: str) -> str:
    low = name.lower()
    if "nccl" in low:
        return "NCCL"
    if category == "gpu_memcpy":
        return "transfer"
    return "attention" if "flash" in low or "attention" in low or "fmha" in low else "other kernel"


def gaps(found: list[Span]) -> float:
    """Microseconds in which no attention kernel ran, from the first event to the last.

    >>> at = lambda kind, start, stop: Span(kind, "", 7, start, stop)
    >>> gaps([at("transfer", 0, 4), at("attention", 1, 5), at("attention", 4, 6), at("attention", 8, 9)])
    3.0
    """
    busy, until = 0.0, 0.0
    for span in found:
        if span.kind == "attention":
            busy += max(span.stop - max(span.start, until), 0.0)
            until = max(until, span.stop)
    return max((span.stop for span in found), default=0.0) - busy


def pictures(folder: Path, ranks: int) -> list[Path]:
    """One picture for each call that was recorded: FOLDER/NAME.svg."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    made = []
    for first in sorted(folder.glob("*.0.json")):
        name = first.name.removesuffix(".0.json")
        lines = []
        for rank in range(ranks):
            found = one_call(spans(json.loads((folder / f"{name}.{rank}.json").read_text())))
            streams = sorted({span.stream for span in found})
            lines += [(rank, stream, [s for s in found if s.stream == stream], gaps(found)) for stream in streams]
        figure, axes = pyplot.subplots(figsize=(12, 0.6 + 0.5 * len(lines)))
        for row, (_, _, line, _) in enumerate(lines):
            bars = [(s.start / 1e3, max(s.stop - s.start, 1.0) / 1e3) for s in line]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=[_COLOURS[s.kind] for s in line])
        labels = [
            f"rank {rank}, stream {stream}\n{idle / 1e3:.2f} ms without attention" for rank, stream, _, idle in lines
        ]
        axes.set_yticks(range(len(lines)), labels, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(name.replace("_", " "), fontsize=9)
        axes.legend(handles=[Patch(color=c, label=kind) for kind, c in _COLOURS.items()], fontsize=7, ncols=4)
        figure.tight_layout()
        made.append(folder / f"{name}.svg")
        figure.savefig(made[-1])
        pyplot.close(figure)
    return made
