r"""Fit a machine of the cost model (`cp_fast.tools.cost`) to rows that `benchmarks/attention.py` measured.

    python -m benchmarks.cost_model.fit_machine --records messages_2x_h200,layouts_2x_h200 \
        --out cp_fast/tools/cost/machines/h200-nvlink.toml

Kernel rates come from the columns of one GPU alone, by least squares of relative errors. The host's times come from
`host_ms`. A search finds the other costs of a launch and of a step: it begins with the given machine, and changes one
number at a time. It does not change bandwidths, and links that the records do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, reduce
from math import log
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.cost_model.records import Record, read_records
from cp_fast.compile.machine import Host, Kernel, Machine, Rates, read_machine
from cp_fast.tools.cost.counts import count_alone
from cp_fast.tools.cost.measure_machine import LIKELY, least_squares
from cp_fast.tools.cost.predict import Counts, counted, priced

Measured = list[tuple[Record, Counts]]


def fitted(start: Machine, records: Iterable[Record]) -> Machine:
    """The machine that the records show, as far as they do."""
    rows = with_counts(records)
    return _searched(replace(start, kernels=_kernels(start, rows), host=_host(start, rows)), rows)


def with_counts(records: Iterable[Record]) -> Measured:
    """Each row and what its ranks do; equal problems are counted once."""
    once = cache(counted)
    return [(one, once(one.problem, one.head_chunks)) for one in records]


def _kernels(start: Machine, rows: Measured) -> tuple[Rates, ...]:
    """Rates of all head dims that were measured alone. There a launch waits for the host; its rate leaves that out."""
    found = {(rates.d_qk, rates.d_v, rates.dtype): rates for rates in start.kernels}
    for dims in {(one.problem.d_qk, one.problem.d_v, one.problem.dtype) for one, _ in rows}:
        alone: dict[tuple[object, ...], list[tuple[float, float]]] = {}
        launches = {}
        for one, _ in rows:
            problem = one.problem
            if (
                (problem.d_qk, problem.d_v, problem.dtype) != dims
                or one.alone_ms is None
                or one.alone_forward_ms is None
            ):
                continue
            key = problem.sequences, problem.window_size, problem.heads_q, problem.heads_kv
            launches[key] = count_alone(problem)
            alone.setdefault(key, []).append((one.alone_forward_ms, one.alone_ms - one.alone_forward_ms))
        flops = 2e-12 * (dims[0] + dims[1])
        columns = [[1.0, x.pairs * x.heads * flops, x.rows * x.heads * flops] for x in launches.values()]
        before = found.get(dims) or start.kernels[0]
        made = []
        for n, (kernel, factor) in enumerate(((before.forward, 1.0), (before.backward, 2.5))):
            _, pairs, edge = least_squares(columns, [1e-3 * median(t[n] for t in times) for times in alone.values()])
            made.append(Kernel(round(factor / pairs, 1), round(edge / pairs, 1), kernel.launch_us))
        found[dims] = Rates(*dims, *made)
    return tuple(found.values())


def _host(start: Machine, rows: Measured) -> Host:
    """Of the slowest rank, both passes; the machine's own where no row has the host's time."""
    columns, measured = [], []
    for one, counts in rows:
        if one.host_ms is not None:
            by_rank = [
                (2.0, len(steps), sum(len(s.launches) for s in steps), sum(s.tensors for s in steps))
                for steps in ((*rank.forward, *rank.backward) for rank in counts.ranks.values())
            ]
            columns.append(max(by_rank, key=sum))
            measured.append(1e3 * one.host_ms)
    near = [max(x, 1.0) for x in vars(start.host).values()]
    return Host(*(round(x, 1) for x in least_squares(columns, measured, near))) if columns else start.host


def errors(machine: Machine, rows: Measured) -> list[float]:
    """Relative errors of all rows: forward, and forward and backward."""
    found = []
    for one, counts in rows:
        said = priced(counts, machine, one.messages)
        found += [1e3 * said.forward_s / one.forward_ms - 1, 1e3 * said.seconds / one.both_ms - 1]
    return found


_KNOBS: dict[str, Callable[[Machine, float], Machine]] = {
    "a step": lambda m, x: replace(m, step_us=m.step_us * x),
    "a launch forward": lambda m, x: replace(m, kernels=tuple(_launch(r, "forward", x) for r in m.kernels)),
    "a launch backward": lambda m, x: replace(m, kernels=tuple(_launch(r, "backward", x) for r in m.kernels)),
    "latency of peer memory": lambda m, x: replace(
        m, peer_memory=replace(m.peer_memory, latency_us=m.peer_memory.latency_us * x)
    ),
    "latency of the group": lambda m, x: replace(m, group=replace(m.group, latency_us=m.group.latency_us * x)),
    "what the group slows": lambda m, x: replace(m, group=replace(m.group, slows=m.group.slows * x)),
}


def _launch(rates: Rates, name: str, factor: float) -> Rates:
    kernel: Kernel = getattr(rates, name)
    return replace(rates, **{name: replace(kernel, launch_us=kernel.launch_us * factor)})


def _searched(start: Machine, rows: Measured) -> Machine:
    """One number after another by a factor, as long as the mean of squared errors falls by more than what the numbers
    become less likely by.
    """
    factors = dict.fromkeys(_KNOBS, 1.0)

    def machine(factors: dict[str, float]) -> Machine:
        return reduce(lambda m, name: _KNOBS[name](m, factors[name]), factors, start)

    def loss(factors: dict[str, float]) -> float:
        off = errors(machine(factors), rows)
        unlikely = sum(log(x) ** 2 for x in factors.values())
        return sum(x * x for x in off) / len(off) + LIKELY**2 * unlikely / len(off)

    best = loss(factors)
    for by in (1.5, 1.1, 1.02):
        improved = True
        while improved:
            improved = False
            for name, x in [(name, x) for name in _KNOBS for x in (by, 1 / by)]:
                tried = factors | {name: factors[name] * x}
                if (found := loss(tried)) < best * (1 - 1e-6):
                    factors, best, improved = tried, found, True
    return machine(factors)


def main(
    records: Annotated[str, typer.Option(help="Files of benchmarks/results, without .csv, with commas.")],
    out: Annotated[Path, typer.Option(help="The TOML file.")],
    start: Annotated[str, typer.Option(help="The machine to begin with.")] = "h200-nvlink",
) -> None:
    """Fit, and say how well."""
    rows = [one for name in records.split(",") for one in read_records(name)]
    commits = ", ".join(sorted({one.commit for one in rows}))
    source = f"fitted by benchmarks/cost_model/fit_machine.py to {records.replace(',', ', ')} ({commits})"
    machine = replace(fitted(read_machine(start), rows), source=source)
    out.write_text(str(machine), encoding="utf-8")
    off = errors(machine, with_counts(rows))
    within = sum(abs(x) <= 0.1 for x in off)
    print(f"{out}: {within} of {len(off)} times within 10 %, the worst {max(off, key=abs):+.1%}")


if __name__ == "__main__":
    typer.run(main)
