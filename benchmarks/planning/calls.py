"""How much host time a call of `attention` without a plan costs more than one with, from a batch's second layer on.

    python -m benchmarks.planning.calls --out benchmarks/results/calls.csv

One rank, on a CPU, packed documents of two tokens. Calls with and without a plan are made in turns. Medians of the time
that this thread had a processor, as other work may share it; of several repeats the fastest:

    planned     `attention` with a plan
    unplanned   the same without one, which an earlier layer has made: the lengths are read, compared, and found
    lookup      that finding alone, which is what the two differ by; a call's computing does not hide it
    first       the call that plans, for another window each time; its agreement meets no network
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import cp_fast
from benchmarks.planning.planning import load, processor
from cp_fast.api.calls import on_host, plan_of_call
from cp_ref import SimGroup
from cp_ref.calls.attention_call import AttentionCall, CallFlags
from cp_ref.calls.scores import PLAIN
from cp_ref.problems.arguments import problem_arguments
from cp_ref.reference.simulator import SimMember


@dataclass(frozen=True)
class Row:
    """One line of the table: times in microseconds."""

    documents: int
    planned_us: float
    unplanned_us: float
    lookup_us: float
    first_us: float
    processor: str
    load: float  # of the machine, one minute's average


def main(
    out: Annotated[Path | None, typer.Option(help="A CSV file for the table.")] = None,
    documents: Annotated[str, typer.Option(help="Numbers of documents.")] = "4,100,1000,10000",
    rounds: Annotated[int, typer.Option(help="Calls per line; fewer where they are long.")] = 200,
    repeats: Annotated[int, typer.Option(help="How often each line is measured.")] = 5,
) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for n in map(int, documents.split(",")):
        calls = max(5, min(rounds, 10_000 // n))
        found = [SimGroup(1).run(lambda member, n=n, calls=calls: measure(member, n, calls))[0] for _ in range(repeats)]
        rows.append(min(found, key=lambda row: row.lookup_us))
    for row in rows:
        print(row)
    if out is not None:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


def measure(member: SimMember, documents: int, rounds: int) -> Row:
    """One line."""
    cp, x = cp_fast.ContextParallel(member), torch.randn(2 * documents, 2, 8)
    cu = torch.arange(documents + 1, dtype=torch.int32) * 2
    lengths: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": cu, "cu_seqlens_q_padded": cu.clone()}
    sizes: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": x.dtype, "device": "cpu"}
    plan = cp_fast.make_plan(cp=cp, **lengths, **sizes)
    given, flags = {"q": x, "k": x, "v": x}, CallFlags(False, False, False)
    arguments = problem_arguments(lengths)

    def another(number: int) -> None:
        cp_fast.attention(x, x, x, cp=cp, **lengths, window_size=(number + 1, -1))

    first = times([lambda n=n: another(n) for n in range(9)])
    calls = {
        "planned": lambda: cp_fast.attention(x, x, x, cp=cp, plan=plan),
        "unplanned": lambda: cp_fast.attention(x, x, x, cp=cp, **lengths),
        "lookup": lambda: plan_of_call(
            AttentionCall(cp, None, flags, given, (x, x, x), None, PLAIN, on_host(arguments))
        ),
    }
    calls["unplanned"]()
    spent = times([call for _ in range(rounds) for call in calls.values()])
    medians = {f"{name}_us": median(spent[n :: len(calls)]) for n, name in enumerate(calls)}
    return Row(documents, **medians, first_us=median(first), processor=processor(), load=round(load(), 1))


def times(calls: list[Callable[[], Any]]) -> list[float]:
    """Of each call, in microseconds of this thread."""
    marks = [time.thread_time()]
    for call in calls:
        call()
        marks.append(time.thread_time())
    return [1e6 * (after - before) for before, after in pairwise(marks)]


def median(spent: list[float]) -> float:
    """Rounded to a tenth."""
    return round(statistics.median(spent), 1)


if __name__ == "__main__":
    typer.run(main)
