"""Run `tests/gpu` on a GPU machine, in time, and write a record: commit, GPUs, versions, counts and seconds by test.

    python -m benchmarks.gpu_tests -j 16 --seconds 240 --out gpu_tests_1x.json

Each failure is printed, and written to the file, as soon as it happens. The file is whole JSON at every moment. So if a
run is cut, the file names the failures, the tests that were running, and those that were not reached. With several
GPUs, the processes share them equally. The tests need nothing of docs/ and of benchmarks/results/. Exit code 1 if a
test failed, 2 if the time was up before the last one.

This file is also the plugin of pytest that writes the record. Pytest runs in a separate process. When the time is up,
that process ends with all that it started.
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

ROOT = Path(__file__).parents[1]
TOLD = "CP_GPU_TESTS"  # the environment variable that tells the plugin its file, and what the record begins with
EVERY_S = 5.0  # the file is written after each failure, and as often as this
LINES = 40  # the last ones of a failure's traceback
SLOWEST = 25


class Recorder:
    """A pytest plugin that counts outcomes by test function, and keeps the failures' last lines, in a file.

    With pytest-xdist it hears of the tests of all processes, and belongs in the one that has started them.
    """

    def __init__(self, out: Path, head: dict[str, Any]) -> None:
        self.out, self.head = out, head
        self.begun, self.written = time.time(), 0.0
        self.first: float | None = None  # seconds until the first test has ended: imports and builds
        self.collected: list[str] = []
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.seconds: dict[str, float] = collections.defaultdict(float)  # by test, all phases
        self.failures: dict[str, str] = {}
        self.skips: collections.Counter[str] = collections.Counter()
        self.running: dict[str, float] = {}
        self.done = set[str]()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Called without pytest-xdist, which collects in its processes."""
        if session.items:
            self.collected = [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Called by pytest-xdist for each process; all of them collect the same."""
        self.collected = list(ids)
        self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Called for each file: one that cannot be imported is a failure, one that skips itself says why."""
        if report.failed:
            self.fail(f"{report.nodeid} (collection)", str(report.longrepr), 0.0)
        if report.skipped and isinstance(report.longrepr, tuple | list):
            self.skips[f"{report.nodeid}: {str(report.longrepr[2]).removeprefix('Skipped: ')}"] = 1

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Called when a test begins."""
        self.running[nodeid] = time.time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Called when a test has ended."""
        self.running.pop(nodeid, None)
        self.done.add(nodeid)
        if self.first is None:
            self.first = time.time() - self.begun
        if time.time() - self.written > EVERY_S:
            self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each phase of each test, and for a process that died in a test."""
        self.seconds[report.nodeid] += getattr(report, "duration", 0.0)
        if report.when in ("setup", "teardown") and report.passed:
            return
        self.counts[report.nodeid.split("[")[0]][report.outcome] += 1
        if report.failed:
            self.running.pop(report.nodeid, None)
            self.fail(report.nodeid, str(report.longrepr), self.seconds[report.nodeid])
        if report.skipped and isinstance(report.longrepr, tuple | list):
            self.skips[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self) -> None:
        """Called at the end."""
        self.write()

    def fail(self, name: str, text: str, took: float) -> None:
        """Keep the text of a failure, print it, and write the file."""
        lines = text.splitlines()
        message = next((line.removeprefix("E ").strip() for line in lines if line.startswith("E ")), lines[-1:])
        self.failures[name] = "\n".join(lines[-LINES:])
        told = [f"\nFAILED {name} after {took:.1f} s: {message}", *lines[-LINES:], ""]
        print("\n".join(told), flush=True)
        self.write()

    def record(self) -> dict[str, Any]:
        """The record up to now."""
        total: collections.Counter[str] = collections.Counter()
        for counts in self.counts.values():
            total.update(counts)
        by_test: dict[str, dict[str, float]] = {name: dict(counts) for name, counts in sorted(self.counts.items())}
        for name, took in self.seconds.items():
            line = by_test.setdefault(name.split("[")[0], {})
            line["seconds"] = round(line.get("seconds", 0.0) + took, 2)
        now, slowest = time.time(), sorted(self.seconds.items(), key=lambda item: -item[1])[:SLOWEST]
        not_reached = collections.Counter(
            name.split("[")[0] for name in self.collected if name not in self.done and name not in self.running
        )
        return {
            **self.head,
            "seconds": round(now - self.begun, 1),
            "seconds until the first test ended": None if self.first is None else round(self.first, 1),
            "total": dict(total),
            "failures": self.failures,
            "running": {name: round(now - begun, 1) for name, begun in self.running.items()},
            "not reached": dict(not_reached),
            "slowest": {name: round(took, 1) for name, took in slowest},
            "skips": dict(self.skips),
            "by_test": by_test,
        }

    def write(self) -> None:
        """Put the record in place of the last one."""
        self.written = time.time()
        replace(self.out, self.record())


def replace(out: Path, record: dict[str, Any]) -> None:
    """Write a record so that whoever reads the file, at any moment, reads a whole one."""
    partial = out.with_name(f".{out.name}.partial")
    with partial.open("w") as file:
        file.write(json.dumps(record, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(out)


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin: begin the record. A process of pytest-xdist takes its GPU instead, before CUDA begins."""
    if TOLD not in os.environ:
        return
    told = json.loads(os.environ[TOLD])
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(told["out"]), told["head"]))
    elif count := len(told["head"]["gpus"]):
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, turned(count, number)))


def turned(count: int, first: int) -> list[int]:
    """The numbers of all GPUs, from another one on: processes share them equally, and each sees them all.

    >>> turned(4, 6)
    [2, 3, 0, 1]
    """
    return [(first + n) % count for n in range(count)]


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def here() -> dict[str, Any]:
    """GPUs and versions."""
    import torch
    from torch.cuda import nccl

    names = ("flash-attn-4", "flash-attn", "nvidia-cudnn-frontend", "triton", "numba-cuda", "numpy", "transformers")
    return {
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if torch.cuda.is_available() else None,
        **{name: version(name) for name in (*names, "flash-linear-attention", "megatron-core")},
    }


def commit_of(root: Path) -> str:
    """The commit that a folder has checked out; "unknown" where that is not a checkout."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def main(
    out: Annotated[Path, typer.Option(help="The JSON file to write, from the first second on.")],
    commit: Annotated[str, typer.Option(help="The commit that is tested; the checkout's own if left out.")] = "",
    only: Annotated[str, typer.Option(help="Which tests: pytest's paths, with spaces.")] = "tests/gpu",
    workers: Annotated[
        int, typer.Option("-j", "--workers", help="Processes that share the GPU (pytest-xdist); 0: one.")
    ] = 0,
    seconds: Annotated[float, typer.Option(help="When the run is cut; 0: never.")] = 0.0,
) -> None:
    """Run the tests and write the record; exits with pytest's code, or 2 if the time was up."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    head = {"commit": commit or commit_of(ROOT), "tests": only, "processes": workers, "ended": "not yet", **here()}
    command = [sys.executable, "-m", "pytest", *only.split(), "-q", "-p", "benchmarks.gpu_tests", "-W", "ignore"]
    command += ["-p", "no:cacheprovider", "-r", "f", "--tb=short", "-m", "", "--continue-on-collection-errors"]
    command += ["-n", str(workers), "--dist", "worksteal"] if workers else []
    if seconds:  # what a test hangs in is printed before it is cut
        command += ["-o", f"faulthandler_timeout={0.6 * seconds:.0f}"]
    told = {**os.environ, TOLD: json.dumps({"out": str(out), "head": head}), "PYTHONUNBUFFERED": "1"}
    begun = time.time()
    replace(out, head)
    run = subprocess.Popen(command, cwd=ROOT, env=told, start_new_session=True)
    try:
        code = run.wait(seconds or None)
        ended = "with its last test" if code in (0, 1) else f"by pytest's exit code {code}"
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        code, ended = 2, f"cut after {time.time() - begun:.0f} s"
    finally:
        end_all(run.pid)
        run.wait()
    record = json.loads(out.read_text())
    record |= {"ended": ended, "seconds": round(time.time() - begun, 1)}
    replace(out, record)
    print_summary(record, out)
    raise typer.Exit(1 if code == 2 and record.get("failures") else code)


def end_all(session: int) -> None:
    """End what is left of a session's first group of processes, which this program has started."""
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        return


def print_summary(record: dict[str, Any], out: Path) -> None:
    """The end of what is printed: all that a reader of the output alone needs."""
    failures, running, left = (record.get(name, {}) for name in ("failures", "running", "not reached"))
    print(f"\n{record['seconds']} s, ended {record['ended']}: {record.get('total', {})}; record in {out}")
    for name, took in list(record.get("slowest", {}).items())[:12]:
        print(f"  {took} s: {name}")
    for name, took in running.items():
        print(f"WAS RUNNING for {took} s: {name}")
    for name, count in left.items():
        print(f"NOT REACHED: {count} of {name}")
    for name in failures:
        print(f"FAILED {name}")
    sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
