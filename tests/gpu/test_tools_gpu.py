"""Commands that need a GPU: `doctor --measure` and `build --shapes`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cp_fast.compile.machine import read_machine
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.tools.cli import app

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1", "WORLD_SIZE": "1"})


def test_one_gpu_is_measured_and_planned_with(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    done = runner.invoke(app, ["doctor", "--measure", "--out", str(path)])
    assert done.exit_code == 0, done.output
    here = read_machine(path)
    [rates] = here.kernels
    assert rates.dtype == "bfloat16"
    assert 10 < rates.backward.tflops < 5000
    assert 10 < rates.forward.tflops < 5000
    assert here.copy_gbytes_s > 100
    assert here.host.pass_us + here.host.step_us > 0
    said = runner.invoke(app, ["plan", "--predict", "--cp-size", "2", "--seqlen", "32768", "--machine", str(path)])
    assert said.exit_code == 0, said.output
    assert "take " in said.output


@pytest.mark.skipif(by_name("fa4").why_not() is not None, reason="needs FlashAttention 4")
def test_kernels_are_compiled_ahead() -> None:
    done = runner.invoke(app, ["build", "--shapes", "4,2,64,64", "--window", "128,0"])
    assert done.exit_code == 0, done.output
    assert "bfloat16 64/64, 4 query heads over 2, window 0:*" in done.output
    assert "kept " in done.output
