"""The examples, at a small size."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.dist.workers import run_program
from tests.marks import HANGS_S

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]


def test_a_gpt_is_trained_alike_by_two_processes_and_one() -> None:
    given = ["--processes", "2", "--steps", "4", "--tokens", "256", "--check"]
    command = [sys.executable, "examples/train_gpt.py", *given]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANGS_S, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes and one: losses at most" in done.stdout
    assert "after 4 steps" in done.stdout


def test_a_megatron_layer_is_the_same_on_two_ranks_and_one() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install '.[test-integrations]'")
    said = run_program(ROOT / "examples" / "megatron_layer.py", 2, "--tokens", "128")
    assert "2 ranks and one: out and" in said


@pytest.mark.parametrize("documents", [1, 3])
def test_long_context_says_what_a_step_takes(documents: int) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    program, given = ROOT / "examples" / "long_context.py", ["--tiny", "--documents", str(documents)]
    losses = []
    for more in ([], ["--no-offload"]):
        said = run_program(program, 2, *given, *more)
        assert f"256 tokens in {documents} documents" in said
        assert all(word in said for word in ("tokens/s over 2 ranks", "GFLOP/s", "peak memory", "of the step"))
        losses.append(next(line for line in said.splitlines() if line.startswith("losses")))
    alone = run_program(program, 1, *given)
    assert losses[0] == losses[1]
    one = next(line for line in alone.splitlines() if line.startswith("losses")).split()[1:]
    for mine, theirs in zip(losses[0].split()[1:], one, strict=True):
        assert abs(float(mine) - float(theirs)) < 1e-3


def test_long_context_finds_the_longest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    program = runpy.run_path(str(ROOT / "examples" / "long_context.py"))
    find = program["find_longest"]
    for limit, most in ((1000, 4096), (100, 4096), (9999, 4096)):
        monkeypatch.setitem(find.__globals__, "run_alone", lambda given, tokens, limit=limit: tokens <= limit)
        find(Namespace(tokens=256, most=most))
        found = int(capsys.readouterr().out.splitlines()[-1].removeprefix("longest: ").removesuffix(" tokens"))
        fitting = min(limit, most)
        assert fitting / (1 + 1 / 16) <= found <= fitting


def test_long_context_runs_each_length_in_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    program = runpy.run_path(str(ROOT / "examples" / "long_context.py"))
    given = Namespace(tiny=True, no_offload=False, documents=1, layers=1, steps=1, processes=1, optimizer="adamw")
    given.cp_comm_type, given.peak_tflops = "p2p", 1.0
    run_alone: Any = program["run_alone"]
    assert run_alone(given, 64)

    def ends_with(said: str) -> None:
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", said))

    ends_with(f"torch.{program['OUT_OF_MEMORY']}: no memory is left")
    assert not run_alone(given, 64)
    ends_with("the driver is too old")
    with pytest.raises(RuntimeError, match=r"64 tokens(?s:.*)the driver is too old"):
        run_alone(given, 64)


def test_the_notebook_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, with a stand-in for the notebook's display."""
    shown: list[str] = []
    display: Any = ModuleType("IPython.display")
    display.SVG, display.display = str, shown.append
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    cells = json.loads((ROOT / "examples" / "pictures.ipynb").read_text())["cells"]
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    exec(compile(program, "pictures.ipynb", "exec"), {"__name__": "notebook"})
    assert len(shown) == 4
    assert all(picture.startswith("<svg") and "</svg>" in picture for picture in shown)
