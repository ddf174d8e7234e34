"""Triton's kernels are compiled for an H100, on a machine without a GPU: what only its compiler sees."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.marks import HANGS_S

pytestmark = [
    pytest.mark.extras,
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


@pytest.mark.parametrize(("layers", "seeds", "launches"), [("linear", "012345", 90), ("sparse", "05", 48)])
def test_random_problems(layers: str, seeds: str, launches: int) -> None:
    """A global that is no constant, an argument of another kind, and too much shared memory are errors here."""
    command = [sys.executable, "-m", "tests.cp_fast.kernels.compiled_kernels", layers, *seeds]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(ran.stdout.split()[0]) >= launches
