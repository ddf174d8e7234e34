"""The examples, at a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
