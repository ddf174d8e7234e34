"""Processes that run a step: one alone, or the ranks of a group."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from conformance.run.processes import run_together

__all__ = ["Job", "StepError", "run_jobs"]

_PRELOADED = ["conformance.step.process", "torch._dynamo"]


class StepError(RuntimeError):
    """The step could not be run or compared: a process raised, died or did not end, or there is nothing to compare."""


@dataclass(frozen=True)
class Job:
    """One process. `build` and `batch` are the user's, or their names, "module:name", which the process imports.

    Attributes:
        name: in errors.
        folder: where `Runs` puts stores.
        store: a file that the processes of one group share, and no others.
        rank, world: the place in that group. world is dp_size * cp_size; 0 for the one process without a context.
        noise: 0, or the seed of the rounding errors that its weights and gradients are given.
        dtype: whose rounding errors gradients have at least; None: of those in which their weights are used.
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
    dtype: torch.dtype | None = None
    look: bool = False
    without: str = ""
    threads: int = 1
    limit_s: float = 600.0


def run_jobs(jobs: Sequence[Job], on_stage: Callable[[str, str], None]) -> list[Any]:
    """Run the processes at the same time.

    Args:
        on_stage: see `run_together`.

    Returns:
        What each of them found.

    Raises:
        StepError: one of them raised (with its traceback), died, or did not end in `limit_s`. The others are ended.
    """
    context = _context_for(jobs)
    if context.get_start_method() == "fork":
        jobs = [replace(job, threads=1) for job in jobs]  # a copy of this process has none of OpenMP's threads
    limit_s = max(job.limit_s for job in jobs)
    return run_together(context, _run, {job.name: job for job in jobs}, StepError, limit_s, on_stage)


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


def _run(job: Job) -> Any:
    from conformance.step.process import run

    try:
        return run(job)
    except StepError as error:
        raise StepError(f"{job.name}: {error}") from None
    except BaseException:
        raise StepError(f"{job.name} raised:\n{traceback.format_exc()}") from None
