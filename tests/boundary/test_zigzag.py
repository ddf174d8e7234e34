"""`zigzag` is another name of the layout `dual_chunk`, wherever users name a layout; prints say dual_chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

import cp_fast
import cp_ref
from conformance.case import Case
from conformance.implementation import Context
from conformance.step.compare_step import compare_step
from cp_fast.tools.cli import app as fast_app
from cp_fast.tools.cli.demo import Job
from cp_fast.tools.cost import candidates
from cp_ref.cli import app as ref_app
from cp_ref.contract.group import PaperGroup
from cp_ref.schedules.problem import Problem, Sequence

_RUNNER = CliRunner(env={"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"})
_SEQUENCES = (Sequence(16, 16, 16, 16),)


def _planned(package: Any, layout: Any) -> str:
    cp = package.ContextParallel(PaperGroup(2), layout=layout)
    sizes = {"batch_size": 1, "seqlen_q": 16, "heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32}
    plan = package.make_plan(cp=cp, device="cpu", **sizes)
    return f"{cp}\n{plan.problem}\n{plan}"


def _said(app: Any, *options: str) -> str:
    done = _RUNNER.invoke(app, list(options))
    assert done.exit_code == 0, done.output
    return done.output


def _step(layout: Any) -> Any:
    """The layout that `compare_step` gives to its ranks; none is started."""
    to_runs = patch("conformance.step.compare_step.Runs", side_effect=InterruptedError)
    with to_runs as runs, pytest.raises(InterruptedError):
        compare_step(lambda cp: None, None, 1, layout=layout)
    return runs.call_args.args[0].layout


ENTRIES: dict[str, Callable[[Any], object]] = {
    "cp_ref": lambda layout: _planned(cp_ref, layout),
    "cp_fast": lambda layout: _planned(cp_fast, layout),
    "compare_layouts": lambda layout: cp_fast.compare_layouts(
        [16], cp_size=2, heads_q=2, heads_kv=2, layouts=[layout], cp_comm_types=["p2p"]
    ),
    "candidates": lambda layout: candidates(Problem(2, _SEQUENCES), 8, [layout]),
    "Problem": lambda layout: Problem(2, _SEQUENCES, layout=layout).slots,
    "Case": lambda layout: Case.parse(f"Case(Problem(cp_size=2, sequences=[(16, 16, 16, 16)], layout='{layout}'))"),
    "plan": lambda layout: _said(fast_app, "plan", "--layout", layout, "--cp-size", "2", "--seqlen", "16"),
    "plan --predict": lambda layout: _said(fast_app, "plan", "--predict", "--layout", layout, "--cp-size", "2"),
    "explain": lambda layout: _said(ref_app, "explain", "--layout", layout, "--cp-size", "2", "--seqlens", "5"),
    "demo": lambda layout: Job(layout=layout),
    "conformance context": lambda layout: Context(PaperGroup(2), layout=layout),
    "conformance step": lambda layout: _step(layout),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_zigzag_is_dual_chunk(entry: str) -> None:
    said = str(ENTRIES[entry]("zigzag"))
    assert "zigzag" not in said
    assert said == str(ENTRIES[entry]("dual_chunk")) != str(ENTRIES[entry]("contiguous"))
