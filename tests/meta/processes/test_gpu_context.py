"""Processes that share a GPU, and those whose GPU no longer answers: without a GPU, by stand-ins."""

from __future__ import annotations

import os
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cp_ref
from conformance.checks.hygiene import ASSERTED, context_error
from conformance.cli import cp_sizes_of
from conformance.implementation import as_implementation
from conformance.problems import helpers
from conformance.problems.capabilities import EVERYTHING
from conformance.problems.helpers import Malformed
from conformance.record import Played
from conformance.runner.play_problem import InProcess, Task
from conformance.runner.processes import own_gpu
from conformance.runner.run_tiers import PROFILES, run_tier
from conformance.runner.tiers import TIERS
from conformance.runner.workers import Answer, Worker, WorkerRunner
from conformance.step import process
from conformance.step.step_record import Job

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
        names = {name: lambda **_: None for name in helpers.HELPERS}
        self.thd = SimpleNamespace(**names)


@pytest.mark.parametrize(
    ("later", "finding"), [(ASSERTION, ""), ("CUDA error: an illegal memory access", "ended in"), ("", "returned")]
)
def test_an_assertion_is_a_refusal(later: str, finding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Malformed.parse(TASK.text).check(as_implementation(Silent(monkeypatch, later)))
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

    tier = TIERS["helpers-malformed"]
    few = tier.most_on_gpu
    assert few is not None
    result = run_tier(Few(), "helpers-malformed", replace(EVERYTHING, device="cuda"), PROFILES["quick"])
    assert result.run == few * len(tier.items(EVERYTHING))


@pytest.mark.parametrize(("gpus", "place", "shared"), [(1, "cuda:0", True), (2, "cuda:1", False)])
def test_ranks_share_a_gpu_where_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch, gpus: int, place: str, shared: bool
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("NCCL_HOSTID", "as before")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "")
    assert [own_gpu(1, 2)] == chosen == [torch.device(place)]
    assert os.environ["NCCL_HOSTID"] == ("rank 1" if shared else "as before")
    assert cp_sizes_of(None, "process", "cuda") == (1, 2)
    assert cp_sizes_of("4", "process", "cuda") == (4,)


@pytest.mark.parametrize(("gpus", "world", "local"), [(1, 2, 0), (2, 2, 1), (2, 0, 1)])
def test_a_step_s_process_sends_from_the_cpu_and_from_its_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, world: int, local: int
) -> None:
    joined: list[Any] = []
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: joined.append(backend))
    monkeypatch.setattr(process, "found_of", lambda job: {})
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NCCL_HOSTID"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "")
    device = "cuda" if world else "cuda:1"
    process.run(Job(None, None, "", tmp_path, "", rank=min(world, 1), world=world, device=device))
    assert joined == ["cpu:gloo,cuda:nccl"]
    assert torch.device("cuda", local) == torch.device("cuda", current[-1])
    assert os.environ["LOCAL_RANK"] == str(local)
    assert os.environ["NCCL_HOSTID"] == ("rank 1" if world > gpus else "")
