"""The scripts that play problems on GPUs, tried on the CPU: what is right is counted, and what is wrong is told."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks import conformance_gpu
from benchmarks.conformance_gpu import Counts, play, summary
from conformance.case import Case
from conformance.run import UnsupportedCase


@pytest.mark.parametrize("kind", conformance_gpu.KINDS)
def test_problems_of_each_kind_are_right(kind: str) -> None:
    counts = play("cpu", kind, "cpu", 5, 4, time.time() + 60)
    assert counts.problems == 4
    assert counts.right == dict.fromkeys(conformance_gpu.TIERS, 4)
    assert summary({("cpu", kind): counts}, 4, []) == 0


def test_what_is_wrong_refused_or_not_reached_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts: list[Any] = [["one row too many"], [], UnsupportedCase("no"), RuntimeError("broken")]

    class Tier:
        @staticmethod
        def check(impl: Any, case: Case, device: str) -> list[str]:
            found = verdicts.pop(0) if verdicts else []
            if isinstance(found, Exception):
                raise found
            return found

    monkeypatch.setattr(conformance_gpu, "CASE_TIERS", dict.fromkeys(conformance_gpu.TIERS, Tier))
    counts = play("cpu", "layouts", "cpu", 5, 4, time.time() + 60)
    assert (counts.problems, counts.unsupported, len(counts.failures)) == (4, 1, 2)
    assert summary({("cpu", "layouts"): counts}, 6, []) == 1
    said = capsys.readouterr().out
    assert "right 2, WRONG 2, refused 1, NOT REACHED 2" in said
    assert "one row too many" in said
    assert "RuntimeError: broken" in said
    assert "FAILED: 2 findings" in said
    assert summary({("cpu", "layouts"): Counts()}, 6, []) == 2
    assert summary({("cpu", "layouts"): Counts(problems=6)}, 6, ["worker 1 died"]) == 1
