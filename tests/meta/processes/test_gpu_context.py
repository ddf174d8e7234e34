"""Processes whose GPU no longer answers, without a GPU: the error is a stand-in's."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch

import cp_ref
from conformance.draw.capabilities import EVERYTHING
from conformance.implementation import as_implementation
from conformance.judge.run_record import Played
from conformance.levels import LEVEL_TIERS, helpers
from conformance.run.global_state import ASSERTED, context_error
from conformance.run.play_problem import InProcess, Task
from conformance.run.pool import Answer, Worker
from conformance.run.run_tiers import PROFILES, run_tier
from conformance.run.workers import WorkerRunner

ASSERTION = f"CUDA error: {ASSERTED} triggered\nand much more"
TASK = Task("helpers", "helpers-malformed", 'Malformed(name="thd_read_half_tensor", slots=(2,), real=(4,))')
RIGHT = Played("helpers", "helpers-malformed", TASK.text, "right", ())


@pytest.fixture
def lost_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise RuntimeError(ASSERTION)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


def test_what_ended_it(lost_gpu: None) -> None:
    assert context_error("cpu") == ""
    assert context_error("cuda:0") == f"CUDA error: {ASSERTED} triggered"


def test_nothing_more_is_played_in_this_process(lost_gpu: None) -> None:
    runner = InProcess(cp_ref, "cuda")
    played = runner.play(TASK)
    assert played.verdict == "missing"
    assert "play in worker processes" in played.findings[0]


class Silent:
    """A helper that computes what has no right answer, and the GPU's word about it, later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, later: str) -> None:
        monkeypatch.setattr(helpers, "context_error", lambda device: later)
        names = {name: lambda **_: None for name in helpers.HELPER_NAMES}
        self.thd = SimpleNamespace(**names)


@pytest.mark.parametrize(
    ("later", "finding"), [(ASSERTION, ""), ("CUDA error: an illegal memory access", "ended in"), ("", "returned")]
)
def test_an_assertion_is_a_refusal(later: str, finding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = helpers.check_malformed(
        as_implementation(Silent(monkeypatch, later)), helpers.Malformed.parse(TASK.text), "cpu"
    )
    assert [finding in f for f in found] == ([True] if finding else [])


class ContextLost(Worker):
    """A worker that answers once."""

    def __init__(self) -> None:
        self.stopped = False
        self.connection, self.theirs = Pipe()
        self.theirs.send(Answer(RIGHT, None, True))

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize("size", [None, 2])
def test_a_worker_without_its_context_is_started_again(size: int | None) -> None:
    runner = WorkerRunner("cp_ref", "cuda", 1.0, size)
    workers = [ContextLost() for _ in range(size or 1)]
    runner.workers = list(workers)
    assert runner.play(TASK) == RIGHT
    assert all(worker.stopped for worker in workers)
    assert not runner.workers


def test_on_a_gpu_a_few_malformed_calls_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    class Few:
        def play(self, task: Task) -> Played:
            drawn.append(1)
            return RIGHT

    few = LEVEL_TIERS["helpers-malformed"].most_on_gpu
    assert few is not None
    result = run_tier(Few(), "helpers-malformed", replace(EVERYTHING, device="cuda"), PROFILES["quick"])
    assert result.run == few * len(helpers.MAY_BE_MALFORMED)
