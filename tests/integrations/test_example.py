"""The examples, at a small size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_gpt_is_trained_alike_by_two_processes_and_one() -> None:
    given = ["--processes", "2", "--steps", "4", "--tokens", "256", "--check"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes and one: losses at most" in done.stdout
    assert "after 4 steps" in done.stdout
