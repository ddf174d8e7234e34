"""Random problems for each CUDA backend of cp_fast against the oracle: all ranks over the simulated group on one GPU,
or a process for each GPU over NCCL.

    python -m benchmarks.conformance_gpu -j 16 --problems 300 --seconds 400 --seed 1 --out conformance_areas_1x.json
    python -m benchmarks.conformance_gpu --ranks 4 -j 3 --kinds anything --problems 100 --seconds 240 --out nccl_4x.json
    python -m benchmarks.conformance_gpu --ranks 2 -j 4 --kinds linear --problems 100 --seconds 100 --out linear_2x.json
    python -m benchmarks.conformance_gpu --device cpu --backends cpu -j 2 --problems 8 --seconds 60    # to try it

Every problem of attention is played forward and backward in two tiers: `probes` (who sees which key, exactly) and
`budget` (errors in units of plain PyTorch's). Kinds of problems, at cp 2, 3, 4 and 8 in bfloat16 and float16:

    anything   `conformance.problems.strategies`
    layouts    these without areas, with more self-attention; of it half has a table of the user's for a
               layout, where one can be
    areas      `tests.spec.problems.problems_of_areas`, every layout, of up to some 700 rows
    common_keys
               masks of blocks, of up to some 2,000 rows, whose launches have segments with common keys
    alibi, score_mod, dropout
               cases without areas and windows, in bfloat16, each with this one score of places. A kind has five parts
               with a class of kernels each (`benchmarks.parts.random_cases`): one process compiles them
    linear     `conformance.problems.linear`: linear attention and causal convolutions, in bfloat16, in the suite's
               tiers. Triton's tuners take their first configuration
    sparse     `conformance.problems.sparse`: attention to chosen keys, an indexer's choice and its loss, in bfloat16,
               with the dims of models

No other kind has scores of places.

Over NCCL groups have two ranks and more, up to `--ranks`; cp_fast chooses the backend, and carries messages through
peer memory where it can (`CP_FAST_MESSAGES`). Most work is on the host, so several processes share a GPU. Where there
are fewer GPUs than ranks, ranks share one, and NCCL sends through sockets.

Exit code 1 if a problem failed or a worker died, 2 if the time was up before all were played.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from multiprocessing import Value, get_context
from pathlib import Path
from queue import Empty
from typing import Annotated, Any, NamedTuple

import hypothesis
import torch
import typer
from hypothesis import HealthCheck, Phase, given, settings

from benchmarks.parts.linear_layers.tuning import use_few_kernels
from benchmarks.parts.random_cases import KINDS, parts_of
from benchmarks.parts.ranks import Commit, Device, JsonOut, version
from conformance.adapters.cp_fast import OneBackend
from conformance.case import Case
from conformance.problems.problem import CaseProblem
from conformance.runner.play_problem import InProcess, Runner, Task, tasks_of
from conformance.runner.workers import WorkerRunner
from cp_fast.kernels.attention.choose_backend import by_name

os.environ.setdefault("CONFORMANCE_LIMIT_S", "300")  # of one call; a problem has several
CP_SIZES = (2, 3, 4, 8)
PROCESSES = "conformance.adapters.cp_fast:processes"
LINEAR_PROCESSES = "benchmarks.parts.linear_layers.few_kernels:processes"
TIERS = ("probes", "budget")
PACKAGES = ("flash-attn-4", "flash-attn", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13")
LIMIT_S, LIMIT_OF_RANKS_S = 300.0, 120.0  # of one problem: many processes compile at once
GRACE_S = 60.0  # for the last problems, when the time is up
TOLD_S = 30.0  # between two lines of progress
Job = tuple[str, str]  # backend, kind


class Part(NamedTuple):
    """Problems of one kind for one backend; `number` says which kernels they need."""

    job: Job
    number: int

    def __str__(self) -> str:
        return f"{', '.join(self.job)}, part {self.number}"


class Left:
    """How many problems of a part nobody has begun: one number for all workers."""

    def __init__(self, count: int, made: Callable[[str, int], Any] = Value) -> None:
        self._count = made("i", count)

    def take(self) -> bool:
        """Begin one, if there is one."""
        with self._count.get_lock():
            self._count.value -= (taken := self._count.value > 0)
            return taken

    def give_back(self) -> None:
        """It does not count."""
        with self._count.get_lock():
            self._count.value += 1

    def __int__(self) -> int:
        return self._count.value


@dataclass
class Counts:
    """The findings of one worker, or of all, for problems of one kind on one backend."""

    problems: int = 0
    right: collections.Counter[str] = field(default_factory=collections.Counter)  # by tier
    unsupported: int = 0
    by_cp_size: collections.Counter[int] = field(default_factory=collections.Counter)
    by_schedule: collections.Counter[str] = field(default_factory=collections.Counter)
    by_layout: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists. (`asdict` makes counters of pairs out of counters.)"""
        return {name: dict(x) if isinstance(x, collections.Counter) else x for name, x in vars(self).items()}

    def add(self, other: Counts) -> None:
        """Add what another worker found; seconds: the longest."""
        for name, value in vars(other).items():
            setattr(self, name, max(self.seconds, value) if name == "seconds" else getattr(self, name) + value)

    @property
    def wrong(self) -> int:
        """How many problems failed."""
        return len({failure["case"] for failure in self.failures})


class Enough(KeyboardInterrupt):
    """Ends the drawing: Hypothesis takes any other exception for a finding, and would go on."""


def tasks_of_case(case: Case | CaseProblem) -> list[Task]:
    """A problem in every tier that plays it."""
    if isinstance(case, CaseProblem):
        return tasks_of(str(case))
    return [Task("schedule", tier, str(case)) for tier in TIERS]


def play(
    runner: Runner,
    part: Part,
    cp_sizes: Sequence[int],
    seed: int,
    left: Left,
    until: float,
    tell: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Problems of one worker, until none is left or time is up. tell: is told how it stands after each."""
    counts, began = Counts(), time.monotonic()

    @hypothesis.seed(seed)
    @settings(
        max_examples=2 * int(left) + 1,  # what is refused is not counted
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(KINDS[part.job[1]](runner, cp_sizes, part.number))
    def one(case: Case | CaseProblem) -> None:
        if time.time() > until or not left.take():
            raise Enough
        played = [runner.play(task) for task in tasks_of_case(case)]
        verdicts = {p.verdict for p in played}
        if verdicts == {"unsupported"}:
            left.give_back()
            counts.unsupported += 1
            return
        for p in played:
            if p.verdict == "right":
                counts.right[p.tier] += 1
            else:
                findings = list(p.findings[:3])
                counts.failures.append({"tier": p.tier, "verdict": p.verdict, "case": p.text, "findings": findings})
        counts.problems += 1
        counts.by_cp_size[case.problem.cp_size] += 1
        counts.by_schedule[case.problem.cp_comm_type] += 1
        counts.by_layout[case.problem.layout_name] += 1
        counts.seconds = time.monotonic() - began
        tell(counts)

    with suppress(Enough):
        one()
    return counts


@dataclass(frozen=True)
class Work:
    """The work of all workers."""

    parts: dict[Part, Left]
    device: str
    ranks: int  # processes of a group; 0: the simulated group
    until: float

    def runner(self, job: Job) -> Runner:
        backend, kind = job
        if self.ranks:
            name = LINEAR_PROCESSES if kind == "linear" else PROCESSES
            return WorkerRunner(name, self.device, LIMIT_OF_RANKS_S, self.ranks)
        if kind == "linear":
            use_few_kernels()
        return InProcess(OneBackend(backend), self.device, LIMIT_S)

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """The full size as often as all others together."""
        fewer = tuple(range(2, self.ranks))
        return (*fewer, *[self.ranks] * max(len(fewer), 1)) if self.ranks else CP_SIZES


def worker(number: int, seed: int, work: Work, results: Any) -> None:
    """Play the worker's own part, and then help with those that have the most left. Tells (number, part, counts) after
    each problem, a text in place of counts if something went wrong, and (number, None, None) at the end.
    """
    torch.set_num_threads(1)
    parts = list(work.parts)
    while parts:
        own = len(parts) == len(work.parts)
        part = parts[number % len(parts)] if own else max(parts, key=lambda one: int(work.parts[one]))
        parts.remove(part)

        def tell(counts: Counts, part: Part = part) -> None:
            results.put((number, part, deepcopy(counts)))  # which is pickled later, in another thread

        try:
            if int(work.parts[part]) and time.time() < work.until:
                with closing(work.runner(part.job)) as runner:
                    of_part = seed + number + 1000 * part.number
                    tell(play(runner, part, work.cp_sizes, of_part, work.parts[part], work.until, tell))
        except BaseException as error:
            results.put((number, part, f"{type(error).__name__}: {error}"))
    results.put((number, None, None))


# ---- what was found


def added(jobs: list[Job], found: Iterable[tuple[Job, Counts]]) -> dict[Job, Counts]:
    """The findings of all workers."""
    total = {job: Counts() for job in jobs}
    for job, counts in found:
        total[job].add(counts)
    return total


def write(out: Path | None, record: dict[str, Any], total: dict[Job, Counts]) -> None:
    """The record, and what was found."""
    if out is not None:
        found = {"backends": {", ".join(job): counts.to_json() for job, counts in total.items()}}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record | found, indent=2, default=str) + "\n")


def summary(total: dict[Job, Counts], problems: int, died: list[str]) -> int:
    """Print what was found, the worst last; the exit code."""
    late = 0
    for job, c in total.items():
        late += (unplayed := max(problems - c.problems, 0))
        print(
            f"{', '.join(job):16} right {c.problems - c.wrong}, WRONG {c.wrong}, refused {c.unsupported}, "
            f"NOT REACHED {unplayed}; {dict(c.by_cp_size)} {dict(c.by_schedule)} {dict(c.by_layout)}"
        )
        for failure in c.failures[:6]:
            print("   ", failure["tier"], failure["verdict"], failure["case"], *failure["findings"], sep="\n      ")
    failed = sum(len(c.failures) for c in total.values())
    print(*died, sep="\n")
    if failed or died:
        print(f"FAILED: {failed} findings, {len(died)} parts that did not run")
        return 1
    print(f"NOT REACHED: {late} problems; those that were played are right" if late else "ALL RIGHT")
    return 2 if late else 0


def main(
    backends: Annotated[str, typer.Option(help="Backends, with commas.")] = "fa4,torch",
    kinds: Annotated[str, typer.Option(help=f"Some of {', '.join(KINDS)}.")] = "areas,layouts",
    problems: Annotated[int, typer.Option(help="Problems of each kind for each backend.")] = 300,
    workers: Annotated[int, typer.Option("--workers", "-j", help="Processes that share the GPU.")] = 12,
    seconds: Annotated[float, typer.Option(help="Stop drawing after so long.")] = 480.0,
    ranks: Annotated[int, typer.Option(help="GPUs, each with a process; 0: the simulated group on one GPU.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the first worker; the next one has the next.")] = 1000,
    device: Device = "cuda",
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Play random problems on every backend."""
    names = ["auto"] if ranks else backends.split(",")
    missing = {name: reason for name in names if not ranks and (reason := by_name(name).why_not()) is not None}
    jobs = [(name, kind) for kind in kinds.split(",") for name in names if name not in missing]
    context, began = get_context("spawn"), time.time()
    results = context.Queue()
    parts = dict[Part, Left]()
    for number in range(max((parts_of(kind) for _, kind in jobs), default=0)):  # Neighbours are of different jobs.
        for job in jobs:
            if number < (count := parts_of(job[1])):
                parts[Part(job, number)] = Left((problems + number) // count, context.Value)
    work = Work(parts, device, ranks, began + seconds)
    processes = [context.Process(target=worker, args=(n, seed, work, results)) for n in range(workers)]
    for process in processes:
        process.daemon = not ranks  # a daemon may have no processes of its own
        process.start()
    died: list[str] = [f"{name} is not here: {reason}" for name, reason in missing.items()]
    record: dict[str, Any] = {
        "commit": commit,
        "gpus": [torch.cuda.get_device_name(n) for n in range(min(max(ranks, 1), torch.cuda.device_count()))],
        "ranks": ranks or "simulated",
        "messages": os.environ.get("CP_FAST_MESSAGES", "auto"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {name: version(name) for name in PACKAGES},
        "cp_sizes": work.cp_sizes,
        "seeds": [seed + number for number in range(workers)],
        "asked for": problems,
        "died or not here": died,
    }
    latest: dict[tuple[int, Part], Counts] = {}

    def total() -> dict[Job, Counts]:
        return added(jobs, ((part.job, counts) for (_, part), counts in latest.items()))

    at_work, told = set(range(workers)), began
    while at_work:
        if time.time() > told + TOLD_S:
            told = time.time()
            how = (f"{', '.join(job)} {counts.problems} ({counts.wrong} wrong)" for job, counts in total().items())
            print(f"{told - began:.0f} s:", *how, sep="  ", flush=True)
            write(out, record, total())  # a long run that is cut short has something to show
        try:
            number, part, found = results.get(timeout=5)
        except Empty:
            gone = [n for n in at_work if processes[n].exitcode is not None]
            if time.time() > work.until + GRACE_S or len(gone) == len(at_work):
                died.append(f"did not come to an end: workers {sorted(at_work)}; of these ended early: {gone}")
                break
            continue
        if isinstance(found, Counts):
            latest[number, part] = found
        elif part is None:
            at_work.discard(number)
        else:
            died.append(f"worker {number}, {part}: {found}")
            print(died[-1], flush=True)
    for process in processes:
        process.kill()
    record["seconds"] = time.time() - began
    write(out, record, total())
    raise typer.Exit(summary(total(), problems, died))


if __name__ == "__main__":
    typer.run(main)
