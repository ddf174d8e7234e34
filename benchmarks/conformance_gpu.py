"""Random problems for each CUDA backend of cp_fast, all ranks over the simulated group on one GPU, against the oracle.

    python benchmarks/conformance_gpu.py --problems 2000 --workers 12 --out benchmarks/results/conformance_1x.json

Every problem is played in two tiers: `probes` (who sees which key, exactly) and `budget` (errors in units of plain
PyTorch's). Problems are those of `conformance.strategies`, at cp 2, 3, 4 and 8, in bfloat16 and float16; head dims and
softcaps are folded onto a few, since each combination costs FlashAttention 4 seconds of compilation. The work is on
the host, so many processes share the GPU. Exit code 1 if a problem failed.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import time
from dataclasses import dataclass, field, replace
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import hypothesis
import torch
import typer
from hypothesis import HealthCheck, Phase, given, settings

from conformance.adapters.cp_fast import OneBackend
from conformance.capabilities import probe
from conformance.case import Case
from conformance.implementation import as_implementation
from conformance.run import UnsupportedCase
from conformance.strategies import cases
from conformance.tiers import CASE_TIERS
from cp_fast.backends import by_name

os.environ.setdefault("CONFORMANCE_LIMIT_S", "300")  # many processes compile at once
CP_SIZES = (2, 3, 4, 8)
TIERS = ("probes", "budget")
PACKAGES = ("flash-attn-4", "flash-attn", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13")


@dataclass
class Counts:
    """What one worker, or all, found for one backend."""

    problems: int = 0
    right: collections.Counter[str] = field(default_factory=collections.Counter)  # by tier
    unsupported: int = 0
    by_cp_size: collections.Counter[int] = field(default_factory=collections.Counter)
    by_schedule: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists. (`asdict` makes counters of pairs out of counters.)"""
        return {name: dict(x) if isinstance(x, collections.Counter) else x for name, x in vars(self).items()}

    def add(self, other: Counts) -> None:
        self.problems += other.problems
        self.unsupported += other.unsupported
        self.right += other.right
        self.by_cp_size += other.by_cp_size
        self.by_schedule += other.by_schedule
        self.failures += other.failures
        self.seconds = max(self.seconds, other.seconds)


def folded(case: Case) -> Case:
    """The same problem with one of a few head dims and softcaps."""
    p = case.problem
    equal = 64 if p.d_qk <= 16 else 128
    d_qk, d_v = (192, 128) if p.d_qk > p.d_v else (equal, equal)
    softcap = 30.0 if p.softcap else 0.0
    return replace(case, problem=replace(p, d_qk=d_qk, d_v=d_v, softcap=softcap, softmax_scale=None))


def play(backend: str, device: str, seed: int, wanted: int, until: float) -> Counts:
    """Problems of one worker, until there are enough or time is up."""
    torch.set_num_threads(1)
    impl, counts, began = as_implementation(OneBackend(backend)), Counts(), time.monotonic()
    capabilities = probe(impl, device)

    @hypothesis.seed(seed)
    @settings(
        max_examples=20 * wanted,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(cases(capabilities, cp_sizes=CP_SIZES, dtypes=("bfloat16", "float16")).map(folded))
    def one(case: Case) -> None:
        if counts.problems >= wanted or time.time() > until:
            return
        try:
            for tier in TIERS:
                findings = CASE_TIERS[tier].check(impl, case, device)
                sentences = list(getattr(findings, "findings", findings))
                if sentences:
                    counts.failures.append({"tier": tier, "case": str(case), "findings": sentences[:3]})
                else:
                    counts.right[tier] += 1
        except UnsupportedCase:
            counts.unsupported += 1
            return
        except Exception as error:
            counts.failures.append({"tier": "?", "case": str(case), "findings": [f"{type(error).__name__}: {error}"]})
        counts.problems += 1
        counts.by_cp_size[case.problem.cp_size] += 1
        counts.by_schedule[case.problem.cp_comm_type] += 1

    one()
    counts.seconds = time.monotonic() - began
    return counts


def worker(number: int, seed: int, backends: list[str], device: str, wanted: int, until: float, results: Any) -> None:
    try:
        for backend in backends:
            results.put((number, backend, play(backend, device, seed + number, wanted, until)))
    except BaseException as error:  # it is told, and counted as a failure
        results.put((number, "?", f"{type(error).__name__}: {error}"))


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main(
    backends: Annotated[str, typer.Option(help="Backends, with commas.")] = "fa4,fa2,cudnn,torch",
    problems: Annotated[int, typer.Option(help="Problems for each backend.")] = 2000,
    workers: Annotated[int, typer.Option(help="Processes that share the GPU.")] = 12,
    minutes: Annotated[float, typer.Option(help="Stop drawing after so long.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Of the first worker; the next one has the next.")] = 1000,
    device: Annotated[str, typer.Option(help="cuda; cpu to try the script.")] = "cuda",
    commit: Annotated[str, typer.Option(help="The commit that is tested.")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Play random problems on every backend."""
    names = [name for name in backends.split(",") if by_name(name).why_not() is None]
    missing = {name: by_name(name).why_not() for name in backends.split(",") if name not in names}
    context, until = get_context("spawn"), time.time() + 60 * minutes
    results = context.Queue()
    each = -(-problems // workers)
    processes = []
    for number in range(workers):
        order = names[number % len(names) :] + names[: number % len(names)]  # not all on the same library at once
        processes.append(
            context.Process(target=worker, args=(number, seed, order, device, each, until, results), daemon=True)
        )
        processes[-1].start()
    total: dict[str, Counts] = {name: Counts() for name in names}
    died: list[str] = []
    record: dict[str, Any] = {
        "commit": commit,
        "gpu": torch.cuda.get_device_name(0) if device == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {name: version(name) for name in PACKAGES},
        "cp_sizes": CP_SIZES,
        "seeds": [seed + number for number in range(workers)],
        "not here": missing,
        "workers that died": died,
    }
    for _ in range(workers * len(names)):
        try:
            number, backend, counts = results.get(timeout=60 * minutes + 120)
        except Exception:
            died.append("a worker did not report in time")
            break
        if isinstance(counts, Counts):
            total[backend].add(counts)
            print(f"worker {number}, {backend}: {counts.problems} problems in {counts.seconds:.0f} s", flush=True)
        else:
            died.append(f"worker {number}: {counts}")
            print(died[-1], flush=True)
        if out is not None:  # after every report: a long run that is cut short has something to show
            found = {"backends": {name: counts.to_json() for name, counts in total.items()}}
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record | found, indent=2, default=str) + "\n")
    for process in processes:
        process.kill()
    for name, c in total.items():
        print(
            f"{name}: {c.problems} problems, right {dict(c.right)}, failed {len(c.failures)}, refused {c.unsupported}"
        )
        for failure in c.failures[:6]:
            print("   ", failure["tier"], failure["case"], *failure["findings"], sep="\n      ")
    raise typer.Exit(1 if died or any(c.failures for c in total.values()) else 0)


if __name__ == "__main__":
    typer.run(main)
