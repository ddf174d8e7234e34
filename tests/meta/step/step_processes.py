"""Processes that compare training steps. They begin once, and import PyTorch once, for all steps of a file of tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.step import StepError, StepReport
from conformance.step.compare_step import report_of
from conformance.step.process import found_of
from conformance.step.runs import Runs
from conformance.step.step_record import Job
from tests.dist.workers import Processes

__all__ = ["StepProcesses", "found_in"]


def found_in(jobs: Sequence[Job]) -> Any:
    """What this rank's process found, or the error's text."""
    job = jobs[dist.get_rank()]
    os.environ |= {"RANK": str(job.rank), "LOCAL_RANK": str(job.rank), "WORLD_SIZE": str(job.world or 1)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(job.world or 1)}
    torch._dynamo.reset()
    return found_of(job)


class StepProcesses:
    """Compares steps in processes that are there already: one alone, and groups, each begun when it is first needed."""

    def __init__(self) -> None:
        self._groups: dict[int, Processes] = {}

    def compare(
        self,
        build: Any,
        batch: Any,
        cp_size: int = 2,
        *,
        dp_size: int = 1,
        loss: str = "mean",
        bits: bool = False,
        alone: Callable[[Job], Any] | None = None,
        **how: Any,
    ) -> StepReport:
        """`compare_step`; `alone` says what the one process found, where that is known."""
        found_alone = alone or self.found_alone

        def run(jobs: Sequence[Job], on_stage: Callable[..., None]) -> list[Any]:
            found = [found_alone(each) for each in jobs if not each.world]
            found += self._group(world).run(found_in, [each for each in jobs if each.world])
            for each in found:
                if isinstance(each, BaseException):
                    raise StepError(str(each)) from each
            return found

        world = cp_size * dp_size
        job = Job(build, batch, "", Path(), "", cp_size=cp_size, **how)
        return report_of(Runs(job, world, lambda *_: None, run), loss, bits=bits)

    def found_alone(self, job: Job) -> Any:
        """What the one process finds."""
        return self._group(1).run(found_in, [job])[0]

    def _group(self, size: int) -> Processes:
        if size not in self._groups:
            self._groups[size] = Processes(size)
        return self._groups[size]

    def close(self) -> None:
        """End the processes."""
        for group in self._groups.values():
            group.close()
