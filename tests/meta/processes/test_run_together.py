"""Processes of one function: what they do now is known, also when they do not end."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
from rich.progress import Progress

from conformance.runner.processes import run_together, say
from conformance.step_command import _Bars


def _twice(job: Any) -> Any:
    say(f"counts to {job}")
    if job == 3:
        time.sleep(600)
    return 2 * job


def test_what_each_process_does_is_told() -> None:
    stages: list[tuple[str, str]] = []
    context = multiprocessing.get_context("fork")
    told = run_together(context, _twice, {"a": 1, "b": 2}, RuntimeError, 60.0, lambda *stage: stages.append(stage))
    assert told == [2, 4]
    assert [stage for name, stage in stages if name == "b"] == ["starts", "counts to 2", "done"]
    late = r"^not ended within 1 s: b \(counts to 3, for [01] s\); the ranks may wait for each other$"
    with pytest.raises(RuntimeError, match=late):
        run_together(context, _twice, {"a": 1, "b": 3}, RuntimeError, 1.0)


def test_the_command_shows_who_runs() -> None:
    with _Bars() as bars:
        progress: Progress = bars._progress
        for stage in (("rank 0", "starts"), ("rank 1", "starts"), ("rank 0", "step 1 of 2"), ("rank 1", "done")):
            bars.went_on("the step", *stage)
        assert [task.description for task in progress.tasks] == ["the step: rank 0, step 1 of 2"]
        bars.went_on("the step, recorded", "rank 0", "starts")
        assert [task.description for task in progress.tasks] == ["the step, recorded: rank 0, starts"]
