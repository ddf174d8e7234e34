"""`doctor --measure` on a CPU: what it finds is a machine that `plan --predict` takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cp_fast import ContextParallel
from cp_fast.tools.cli import app
from cp_fast.tools.cost import read_machine
from cp_fast.tools.cost.measure_machine import measure
from cp_ref import SimGroup

runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1", "WORLD_SIZE": "1"})


def test_a_machine_of_one_process_is_one_to_plan_with(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    done = runner.invoke(app, ["doctor", "--measure", "--dims", "32,16", "--out", str(path)])
    assert done.exit_code == 0, done.output
    assert done.stdout == path.read_text()
    here = read_machine(path)
    [rates] = here.kernels
    assert (rates.d_qk, rates.d_v, rates.dtype) == (32, 16, "float32")
    assert 0 < rates.forward.tflops < 100
    assert "the rest is that of h200-nvlink" in here.source
    words = ["plan", "--predict", "--machine", str(path), "--dtype", "float32", "--d-qk", "32", "--d-v", "16"]
    planned = runner.invoke(app, [*words, "--seqlen", "256", "--cp-size", "2"])
    assert planned.exit_code == 0, planned.output
    assert f"on 2 ranks of {here.name}" in planned.output


def test_ranks_measure_their_links_and_agree() -> None:
    start, cpu = read_machine("h200-nvlink"), torch.device("cpu")
    one, other = SimGroup(2).run(lambda rank: measure(ContextParallel(rank), start, d_qk=16, d_v=16, device=cpu))
    assert one == other
    assert one.peer_memory == one.group != start.group
    assert one.network == start.network
    assert "kernels, copies, group, peer_memory;" in one.source


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--measure", "--dims", "64"], "--dims is '64'; it must be two head dims"),
        (["--measure", "--start", "abacus"], "machine is 'abacus'"),
        (["--measure", "--out", "no/such/folder/here.toml"], "--out is 'no/such/folder/here.toml'"),
        (["--out", "here.toml"], "--out is 'here.toml', but --measure is not given"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(options: list[str], words: str) -> None:
    done = runner.invoke(app, ["doctor", *options])
    assert done.exit_code == 2, done.output
    assert words in done.stderr
