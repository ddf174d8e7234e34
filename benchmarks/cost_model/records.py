"""Rows that `benchmarks/attention.py` measured, as `benchmarks/results/*.csv` have them, and their problems."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from cp_ref.schedules.problem import Problem, Sequence

__all__ = ["RESULTS", "Record", "read_records"]

_ALL_HEADS_AT_ONCE = ("8cac8b6", "591eac7", "c5159b5", "d73cb83", "d847298")  # commits before there were head chunks
_RENAMED = {"peers": "peer_memory"}  # The transport's name in older records.
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Record:
    """One row. Times in ms, None if its commit did not measure them. `messages`: "peer_memory", "group" or "graph"."""

    file: str
    commit: str
    library: str
    problem: Problem
    messages: str
    forward_ms: float
    both_ms: float
    alone_forward_ms: float | None
    alone_ms: float | None
    host_ms: float | None
    peak_gib: float
    efficiency: float

    @property
    def head_chunks(self) -> tuple[int, ...] | None:
        """The head chunks of its a2a schedule: all heads at once, or those that are chosen today (None)."""
        return () if self.commit in _ALL_HEADS_AT_ONCE else None

    @property
    def name(self) -> str:
        """The measurement in few words."""
        problem = self.problem
        lengths = problem.lengths.len_q
        shape = f"{sum(lengths):,} tokens" + (f" in {len(lengths)} documents" if len(lengths) > 1 else "")
        window = f", window {problem.window_size[0]:,}" if problem.window_size[0] >= 0 else ""
        return f"{problem.cp_size} x {problem.cp_comm_type} {problem.layout} {self.messages}: {shape}{window}"


def read_records(name: str) -> list[Record]:
    """The rows of `name`.csv.

    >>> first = read_records("messages_2x_h200")[0]
    >>> first.name, first.both_ms
    ('2 x p2p dual_chunk peer_memory: 32,768 tokens', 27.094)
    """
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [_record(name, row) for row in csv.DictReader(file)]


def _record(file: str, row: dict[str, str]) -> Record:
    gpus, comm = int(row["gpus"]), row["schedule"]
    problem = Problem(
        gpus,
        tuple(Sequence(n, n, n, n) for n in map(int, row["lengths"].split())),
        comm,
        {"a2a": gpus, "a2a+p2p": 2}.get(comm, 1),
        layout=row.get("layout", "dual_chunk"),
        qkv_format="thd",
        attn_mask_type="padding_causal",
        window_size=(int(row["window"]), 0),
        heads_q=int(row["heads_q"]),
        heads_kv=int(row["heads_kv"]),
        d_qk=int(row["d_qk"]),
        d_v=int(row["d_v"]),
        dtype="bfloat16",
    )

    def maybe(column: str) -> float | None:
        return float(row[column]) if row.get(column) else None

    return Record(
        file,
        row["commit"][:7],
        row.get("library", "cp_fast"),
        problem,
        _RENAMED.get(row.get("messages", ""), row.get("messages")) or "group",
        float(row["forward_ms"]),
        float(row["forward_backward_ms"]),
        maybe("one_gpu_forward_ms"),
        maybe("one_gpu_forward_backward_ms"),
        maybe("host_ms"),
        float(row["peak_gib_above_inputs"]),
        float(row["forward_backward_efficiency"]),
    )
