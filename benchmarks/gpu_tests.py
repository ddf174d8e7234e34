"""Run `tests/gpu` on a GPU machine and write a record: commit, GPUs, versions, counts by test, what failed.

python benchmarks/gpu_tests.py --commit "$(git rev-parse HEAD)" --out benchmarks/results/gpu_tests_1x.json
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from torch.cuda import nccl


class Recorder:
    """A pytest plugin that counts outcomes by test function and keeps the failures' last lines."""

    def __init__(self) -> None:
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.failures: dict[str, str] = {}
        self.skips: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for each phase of each test."""
        if report.when != "call" and report.passed:
            return
        self.counts[report.nodeid.split("[")[0]][report.outcome] += 1
        if report.failed:
            self.failures[report.nodeid] = str(report.longrepr)[-2000:]
        if report.skipped and isinstance(report.longrepr, tuple | list):
            self.skips[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(
    commit: Annotated[str, typer.Option(help="The commit that is tested.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    only: Annotated[str, typer.Option(help="Which tests: a pytest path.")] = "tests/gpu",
    workers: Annotated[int, typer.Option(help="Processes that share the GPU (pytest-xdist); 0: this one.")] = 0,
) -> None:
    """Run the tests and write the record; exits with pytest's code."""
    recorder, start = Recorder(), time.time()
    arguments = [only, "-q", "-p", "no:cacheprovider", "-W", "ignore", "--durations=8"]
    code = pytest.main(arguments + (["-n", str(workers)] if workers else []), plugins=[recorder])
    total: collections.Counter[str] = collections.Counter()
    for counts in recorder.counts.values():
        total.update(counts)
    record: dict[str, Any] = {
        "commit": commit,
        "tests": only,
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if torch.cuda.is_available() else None,
        **{name: version(name) for name in ("flash-attn-4", "flash-attn", "nvidia-cudnn-frontend")},
        "seconds": round(time.time() - start, 1),
        "total": dict(total),
        "by_test": {name: dict(counts) for name, counts in sorted(recorder.counts.items())},
        "skips": dict(recorder.skips),
        "failures": recorder.failures,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n")
    raise typer.Exit(int(code))


if __name__ == "__main__":
    typer.run(main)
