"""Triton's kernels of linear layers in its interpreter: what they compute, not how. tests/gpu has them compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.marks import HANGS_S

pytestmark = [
    pytest.mark.extras,
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


@pytest.mark.parametrize(("dtype", "seeds"), [("float32", range(6)), ("float16", range(6, 9))])
def test_random_problems(dtype: str, seeds: range) -> None:
    """Maps of fragments and their composition, gradients inside chunks, convolutions. In a Python of its own: Triton
    asks for the interpreter when it is imported.
    """
    ran = subprocess.run(
        [sys.executable, "-m", "tests.linear.interpreted_kernels", dtype, *map(str, seeds)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("right") == len(seeds)
