"""Processes that run a step: one alone, or the ranks of a group. Each writes what it found into a file."""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

__all__ = ["Job", "StepError", "run_jobs"]

_PRELOADED = ["conformance.step.process", "torch._dynamo"]


class StepError(RuntimeError):
    """The step could not be run or compared: a process raised, died or did not end, or there is nothing to compare."""


@dataclass(frozen=True)
class Job:
    """One process. `build` and `batch` are the user's, or their names, "module:name", which the process imports.

    Attributes:
        name: of the file that it writes, and in what is said of it.
        store: a file that the processes of one group share, and no others.
        rank, world: the place in that group. world is dp_size * cp_size; 0 for the one process without a context.
        noise: 0, or the seed of the rounding errors that its weights are given.
        look: whether modules, losses and gradients on their way are recorded too.
        without: an experiment: "", "random", "positions" or "clipping", which the step then does not have.
    """

    build: Any
    batch: Any
    name: str
    folder: Path
    store: str
    rank: int = 0
    world: int = 0
    cp_size: int = 1
    cp_comm_type: str = "p2p"
    layout: str = "dual_chunk"
    device: str = "cpu"
    noise: int = 0
    look: bool = False
    without: str = ""
    threads: int = 1
    limit_s: float = 600.0

    @property
    def file(self) -> Path:
        """Where its findings go."""
        return self.folder / f"{self.name}.pt"


def run_jobs(jobs: Sequence[Job]) -> list[Any]:
    """Run the processes at the same time.

    Returns:
        What each of them found.

    Raises:
        StepError: one of them raised (with its traceback), died, or did not end in `limit_s`. The others are ended.
    """
    context = _context_for(jobs)
    if context.get_start_method() == "fork":
        jobs = [replace(job, threads=1) for job in jobs]  # a copy of this process has none of OpenMP's threads
    started = [context.Process(target=_main, args=(job,), daemon=False) for job in jobs]
    try:
        for process in started:
            process.start()
        _wait(started, jobs)
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()
    return [torch.load(job.file, weights_only=False, map_location="cpu") for job in jobs]


def _context_for(jobs: Sequence[Job]) -> Any:
    """Processes from a server that has imported PyTorch; copies of this one for functions that only it knows."""
    build, batch = jobs[0].build, jobs[0].batch
    try:
        pickle.dumps((build, batch))
        given = [getattr(each, "func", each) for each in (build, batch)]  # of a partial function
        if not any(getattr(each, "__module__", "") == "__main__" for each in given):
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
            return context
    except Exception:  # a local function, a lambda
        pass
    if torch.cuda.is_initialized():
        raise StepError(
            "build is a function of the main program or a local one, and this process uses the GPU already; "
            "put build into a module of its own, or call compare_step before anything touches the GPU"
        )
    return multiprocessing.get_context("fork")


def _wait(started: list[Any], jobs: Sequence[Job]) -> None:
    deadline = time.monotonic() + max(job.limit_s for job in jobs)
    while any(process.is_alive() for process in started):
        failed = [job for job, process in zip(jobs, started, strict=True) if process.exitcode not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    said = [job.file.with_suffix(".error") for job in jobs]
    time.sleep(0.1 * any(process.exitcode for process in started))  # the first to fail may not be the first to end
    for job, process, error in sorted(zip(jobs, started, said, strict=True), key=lambda each: _when(each[2])):
        if error.exists():
            raise StepError(f"{job.name} raised:\n{error.read_text()}")
        if process.exitcode not in (None, 0):
            raise StepError(f"{job.name} died with exit code {process.exitcode}")
    for job, process in zip(jobs, started, strict=True):
        if process.is_alive():
            raise StepError(f"{job.name} did not end within {job.limit_s:g} s; the ranks may wait for each other")


def _when(error: Path) -> float:
    return error.stat().st_mtime if error.exists() else float("inf")


def _main(job: Job) -> None:
    from conformance.step.process import run

    try:
        found = run(job)
        torch.save(found, job.file)
    except BaseException:
        job.file.with_suffix(".error").write_text(traceback.format_exc())
        raise SystemExit(1) from None
