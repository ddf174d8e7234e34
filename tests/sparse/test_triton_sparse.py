"""Triton's kernels over chosen keys, in its interpreter: what they compute, not how. tests/gpu has them compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.marks import HANGS_S

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


def interpreted(dtype: str, seeds: list[int]) -> subprocess.CompletedProcess[str]:
    """`interpreted_kernels` in a Python of its own: Triton asks for the interpreter when it is imported."""
    return subprocess.run(
        [sys.executable, "-m", "tests.sparse.interpreted_kernels", dtype, *map(str, seeds)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )


@pytest.mark.parametrize(
    ("dtype", "seeds"),
    [
        ("float32", list(range(4))),
        ("float16", list(range(4, 8))),
    ],
)
@pytest.mark.thorough
def test_random_problems(dtype: str, seeds: list[int]) -> None:
    """Selection, rows, attention, its gradients in both ways, the indexer's loss and its gradients."""
    ran = interpreted(dtype, seeds)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("right") == len(seeds)


@pytest.mark.thorough
def test_a_workspace_with_few_rows() -> None:
    ran = interpreted("float32", [])
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.thorough
def test_tiles_of_columns() -> None:
    """The worked examples, where Triton can be imported."""
    code = "import doctest, cp_fast.kernels.sparse.triton_sparse.tiles as t; print(doctest.testmod(t))"
    code += "; import cp_fast.kernels.sparse.sparse_kernels as s; print(doctest.testmod(s))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "failed=0, attempted=1" in ran.stdout, ran.stdout  # of widths
    assert "failed=0, attempted=6" in ran.stdout, ran.stdout  # of shared memory and of Visible
