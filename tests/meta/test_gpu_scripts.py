"""The scripts that play problems on GPUs, tried on the CPU: what is right is counted, and what is wrong is told."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import pytest

from benchmarks import conformance_gpu
from benchmarks.conformance_gpu import Counts, Work, play, summary
from conformance.adapters.cp_fast import cpu
from conformance.record import Played
from conformance.runner import InProcess, Task


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 0) for kind in conformance_gpu.KINDS), ("areas", 2)])
def test_problems_of_each_kind_are_right(kind: str, ranks: int) -> None:
    """Simulated, and by two processes over gloo."""
    work = Work([], "cpu", ranks, 3, time.time() + 60)
    with closing(work.runner("cpu")) as runner:
        counts = play(runner, kind, work.cp_sizes, 5, work.wanted, work.until)
    assert counts.failures == []
    assert counts.problems == 3
    assert counts.right == dict.fromkeys(conformance_gpu.TIERS, 3)
    assert summary({("cpu", kind): counts}, 3, []) == 0


class Wrong(InProcess):
    """What it plays has other verdicts."""

    verdicts: tuple[Any, ...] = ("wrong", "right", "unsupported", "unsupported", "hung", "missing")

    def play(self, task: Task) -> Played:
        verdict, *rest = self.verdicts
        self.verdicts = (*rest, "right")
        return Played(task.level, task.tier, task.text, verdict, (f"it was {verdict}",))


def test_what_is_wrong_refused_or_not_reached_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    counts = play(Wrong(cpu), "layouts", (2,), 5, 4, time.time() + 60)
    assert (counts.problems, counts.unsupported, len(counts.failures)) == (4, 1, 3)
    assert summary({("cpu", "layouts"): counts}, 6, []) == 1
    said = capsys.readouterr().out
    assert "right 2, WRONG 2, refused 1, NOT REACHED 2" in said
    assert all(f"it was {verdict}" in said for verdict in ("wrong", "hung", "missing"))
    assert "FAILED: 3 findings" in said
    assert summary({("cpu", "layouts"): Counts()}, 6, []) == 2
    assert summary({("cpu", "layouts"): Counts(problems=6)}, 6, ["worker 1 died"]) == 1
