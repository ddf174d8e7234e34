"""Random problems for each CUDA backend of cp_fast against the oracle: all ranks over the simulated group on one GPU,
or a process for each GPU over NCCL.

    python -m benchmarks.conformance_gpu -j 16 --problems 300 --seconds 400 --seed 1 --out conformance_areas_1x.json
    python -m benchmarks.conformance_gpu --ranks 4 -j 3 --kinds anything --problems 100 --seconds 240 --out nccl_4x.json
    python -m benchmarks.conformance_gpu --device cpu --backends cpu -j 2 --problems 8 --seconds 60    # to try it

Every problem is played forward and backward in two tiers: `probes` (who sees which key, exactly) and `budget` (errors
in units of plain PyTorch's). What is drawn, at cp 2, 3, 4 and 8 in bfloat16 and float16:

    anything   `conformance.draw.strategies`
    layouts    these without attention slices, with more self-attention; of it half has a table of the user's for a
               layout, where one can be
    areas      `tests.masks.problems`, every layout, of up to some 700 rows
    alibi, score_mod, dropout
               cases without attention slices and windows, in bfloat16, each with this one score of places

No other kind has scores of places.

Over NCCL groups have two ranks and more, up to the number of GPUs; cp_fast chooses the backend, and carries messages
through peer memory where it can (`CP_FAST_MESSAGES`). Head dims and softcaps are folded onto a few, since each
combination costs FlashAttention 4 seconds of compilation. The work is on the host, so many processes share the GPUs.

Exit code 1 if a problem failed or a worker died, 2 if the time was up before all were played.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Annotated, Any

import hypothesis
import torch
import typer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from benchmarks.parts.ranks import Commit, Device, JsonOut
from conformance.adapters.cp_fast import OneBackend
from conformance.case import Case
from conformance.draw.capabilities import Capabilities
from conformance.draw.strategies import cases, tables
from conformance.run.play_problem import InProcess, Runner, Task
from conformance.run.workers import WorkerRunner
from cp_fast.backends import by_name
from cp_ref.spec import LAYOUTS, Problem
from cp_ref.spec import Sequence as Lengths
from tests.masks.problems import problems as problems_of_areas

os.environ.setdefault("CONFORMANCE_LIMIT_S", "300")  # of one call, of which a problem has several
CP_SIZES = (2, 3, 4, 8)
DTYPES = ("bfloat16", "float16")
PROCESSES = "conformance.adapters.cp_fast:processes"
TIERS = ("probes", "budget")
PACKAGES = ("flash-attn-4", "flash-attn", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13")
LIMIT_S, LIMIT_OF_RANKS_S = 300.0, 120.0  # of one problem: many processes compile at once
GRACE_S = 60.0  # for the problem that a worker is at when the time is up


@dataclass
class Counts:
    """What one worker, or all, found for problems of one kind on one backend."""

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
        for name, value in vars(other).items():
            setattr(self, name, max(self.seconds, value) if name == "seconds" else getattr(self, name) + value)


def folded(case: Case) -> Case:
    """The same problem with one of a few head dims and softcaps."""
    p = case.problem
    equal = 64 if p.d_qk <= 16 else 128
    d_qk, d_v = (192, 128) if p.d_qk > p.d_v else (equal, equal)
    softcap = 30.0 if p.softcap else 0.0
    problem = replace(p, d_qk=d_qk, d_v=d_v, softcap=softcap, softmax_scale=None, score_mod="", dropout_p=0.0)
    return replace(case, problem=problem, alibi="")


def scaled(problem: Problem, times: int) -> Problem:
    """The problem with so many rows for each of its rows: attention slices that share no pair share none then
    either.
    """
    sequences = tuple(
        Lengths(*(times * n for n in (s.len_q, s.len_kv, s.slots_q, s.slots_kv))) for s in problem.sequences
    )
    areas = tuple(tuple(n if n < 0 else times * n for n in area) for area in problem.areas or ())
    return replace(problem, sequences=sequences, areas=areas)


@st.composite
def of_layouts(draw: st.DrawFn, capabilities: Capabilities, cp_sizes: Sequence[int]) -> Case:
    """Cases without attention slices, half of them of self-attention, half of which may have a table."""
    if draw(st.booleans()):
        lengths = tuple(choice for choice in capabilities.choices["lengths"] if choice != "cross")
        capabilities = replace(capabilities, choices=capabilities.choices | {"lengths": lengths})
    case = draw(cases(capabilities, cp_sizes=cp_sizes, dtypes=DTYPES).filter(lambda case: case.problem.areas is None))
    p = case.problem
    itself = all((s.len_q, s.slots_q) == (s.len_kv, s.slots_kv) for s in p.sequences)
    if itself and (p.qkv_format == "thd" or p.attn_mask_type.startswith("padding")) and draw(st.booleans()):
        case = replace(case, problem=replace(p, layout=draw(tables(p.lengths.slots_q, p.cp_size))))
    return folded(case)


@st.composite
def of_areas(draw: st.DrawFn, capabilities: Capabilities, cp_sizes: Sequence[int]) -> Case:
    """Cases of a few attention slices, from a dozen rows to hundreds."""
    problem = draw(problems_of_areas(cp_sizes, (*LAYOUTS, "balanced")))
    dims: dict[str, Any] = {"d_qk": 64, "d_v": 64, "softcap": 0.0, "dtype": draw(st.sampled_from(DTYPES))}
    problem = replace(scaled(problem, draw(st.sampled_from([1, 1, 7, 13]))), **dims)
    tail = draw(st.integers(0, 1)) * problem.cp_size
    return Case(
        problem, tail, tail, use_plan=draw(st.booleans()), return_lse=True, return_max_logit=True, loss="out+lse"
    )


def of_scores(
    alibi: Sequence[str] = ("",), score_mods: Sequence[str] = ("",), dropout: Sequence[float] = (0.0,)
) -> Callable[[Capabilities, Sequence[int]], st.SearchStrategy[Case]]:
    """Cases with one score of places, on few kernels: 8 heads over 2 or 6 over 3, head dim 128, no window."""

    @st.composite
    def drawn(draw: st.DrawFn, capabilities: Capabilities, cp_sizes: Sequence[int]) -> Case:
        plain = replace(capabilities, choices=capabilities.choices | {"window": (), "areas": (), "softcap": ("off",)})
        case = folded(draw(cases(plain, cp_sizes=cp_sizes, dtypes=("bfloat16",))))
        scores: dict[str, Any] = {"score_mod": draw(st.sampled_from(score_mods)), "softcap": 0.0}
        scores |= {"dropout_p": draw(st.sampled_from(dropout))}
        heads = (6, 3) if case.problem.a2a_size == 3 else (8, 2)
        problem = replace(case.problem, heads_q=heads[0], heads_kv=heads[1], d_qk=128, d_v=128, **scores)
        return replace(case, problem=problem, alibi=draw(st.sampled_from(alibi)), deterministic=False)

    return drawn


KINDS: dict[str, Callable[[Capabilities, Sequence[int]], st.SearchStrategy[Case]]] = {
    "anything": lambda capabilities, cp_sizes: cases(capabilities, cp_sizes=cp_sizes, dtypes=DTYPES).map(folded),
    "layouts": of_layouts,
    "areas": of_areas,
    "alibi": of_scores(alibi=("head", "document")),
    "score_mod": of_scores(score_mods=("near", "hidden")),
    "dropout": of_scores(dropout=(0.25, 0.5)),
}


class Enough(KeyboardInterrupt):
    """Ends the drawing: Hypothesis takes any other exception for a finding, and would go on."""


def play(
    runner: Runner,
    kind: str,
    cp_sizes: Sequence[int],
    seed: int,
    wanted: int,
    until: float,
    tell: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Problems of one worker, until there are enough or time is up. tell: is told how it stands after each."""
    counts, began = Counts(), time.monotonic()

    @hypothesis.seed(seed)
    @settings(
        max_examples=2 * wanted,  # what is refused is not counted
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(KINDS[kind](runner.capabilities(), cp_sizes))
    def one(case: Case) -> None:
        if counts.problems >= wanted or time.time() > until:
            raise Enough
        played = [runner.play(Task("schedule", tier, str(case))) for tier in TIERS]
        verdicts = {p.verdict for p in played}
        if verdicts == {"unsupported"}:
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


Job = tuple[str, str]  # backend, kind


@dataclass(frozen=True)
class Work:
    """What every worker does."""

    jobs: list[Job]
    device: str
    ranks: int  # processes of a group; 0: the simulated group
    wanted: int
    until: float

    def runner(self, backend: str) -> Runner:
        if self.ranks:
            return WorkerRunner(PROCESSES, self.device, LIMIT_OF_RANKS_S, self.ranks)
        return InProcess(OneBackend(backend), self.device, LIMIT_S)

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """The full size as often as all others together."""
        fewer = tuple(range(2, self.ranks))
        return (*fewer, *[self.ranks] * max(len(fewer), 1)) if self.ranks else CP_SIZES


def worker(number: int, seed: int, work: Work, results: Any) -> None:
    """Tells (number, job, counts) after each problem, (number, job, None) at the end, or a text of what went wrong."""
    torch.set_num_threads(1)
    begin = number % max(len(work.jobs), 1)  # not all on the same library at once
    for job in work.jobs[begin:] + work.jobs[:begin]:
        backend, kind = job

        def tell(counts: Counts, job: Job = job) -> None:
            results.put((number, job, deepcopy(counts)))  # which is pickled later, in another thread

        try:
            with closing(work.runner(backend)) as runner:
                tell(play(runner, kind, work.cp_sizes, seed + number, work.wanted, work.until, tell))
            results.put((number, job, None))
        except BaseException as error:
            results.put((number, job, f"{type(error).__name__}: {error}"))


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
    context, until = get_context("spawn"), time.time() + seconds
    results = context.Queue()
    work = Work(jobs, device, ranks, -(-problems // workers), until)
    processes = [context.Process(target=worker, args=(n, seed, work, results), daemon=True) for n in range(workers)]
    for process in processes:
        process.start()
    died: list[str] = [f"{name} is not here: {reason}" for name, reason in missing.items()]
    record: dict[str, Any] = {
        "commit": commit,
        "gpus": [torch.cuda.get_device_name(n) for n in range(max(ranks, 1))] if device == "cuda" else [],
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
    latest: dict[tuple[int, Job], Counts] = {}
    at_work = {(number, job) for number in range(workers) for job in jobs}
    while at_work:
        try:
            number, job, found = results.get(timeout=5)
        except Empty:
            gone = [n for n, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if time.time() > until + GRACE_S or len(gone) == workers:
                died.append(f"did not come to an end: {sorted(at_work)}; workers that ended early: {gone}")
                break
            continue
        if isinstance(found, Counts):
            latest[number, job] = found
            continue
        at_work.discard((number, job))
        if found is not None:
            died.append(f"worker {number}, {', '.join(job)}: {found}")
        print(f"worker {number}, {', '.join(job)}: {found or 'done'}", flush=True)
        write(out, record, added(jobs, latest))  # a long run that is cut short has something to show
    for process in processes:
        process.kill()
    total = added(jobs, latest)
    write(out, record, total)
    raise typer.Exit(summary(total, problems, died))


def added(jobs: list[Job], latest: dict[tuple[int, Job], Counts]) -> dict[Job, Counts]:
    """What all workers found."""
    total = {job: Counts() for job in jobs}
    for (_, job), counts in latest.items():
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
        wrong = len({failure["case"] for failure in c.failures})
        right, unplayed = c.problems - wrong, max(problems - c.problems, 0)
        late += unplayed
        print(
            f"{', '.join(job):16} right {right}, WRONG {wrong}, refused {c.unsupported}, NOT REACHED {unplayed}; "
            f"{dict(c.by_cp_size)} {dict(c.by_schedule)} {dict(c.by_layout)}"
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


if __name__ == "__main__":
    typer.run(main)
