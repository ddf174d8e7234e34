"""Numba's kernels without a GPU: the suite in the simulator, and all kernels through the compiler."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import HANGS_S

needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="needs the package numba-cuda, which is not installed"
)
ROOT = Path(__file__).parents[3]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.thorough
@needs_numba
def test_the_suite_in_the_simulator() -> None:
    report = run("-m", "pytest", "-q", "tests/cp_fast/kernels/checks/simulated.py", NUMBA_ENABLE_CUDASIM="1")
    assert "skipped" not in report, report


@pytest.mark.thorough
@needs_numba
def test_every_kernel_compiles_for_a_gpu() -> None:
    """To PTX for sm_90, with the device functions; needs CUDA's compiler libraries, and no GPU."""
    missing = [name for name in ("nvvm", "nvrtc") if not _has(name)]
    if missing:
        pytest.skip(f"needs CUDA's compiler libraries: {', '.join(missing)} cannot be found")
    print(run("tests/cp_fast/kernels/compile_numba.py", NUMBA_ENABLE_CUDASIM="0"))


def _has(library: str) -> bool:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib(library)
    except (ImportError, RuntimeError):
        return False
    return True
