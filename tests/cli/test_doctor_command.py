"""`python -m cp_fast doctor`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cp_fast.backends import BACKENDS
from cp_fast.cli import app, doctor

runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1"})


def test_it_names_everything() -> None:
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for words in (
        "Python",
        "PyTorch",
        torch.__version__,
        "CUDA",
        "numpy",
        "numba",
        "ninja",
        "nvcc",
        "C++ compiler",
        "gloo",
    ):
        assert words in result.output
    assert "flash-attn-4" in result.output
    assert "nvidia-cudnn-frontend" in result.output
    for backend in BACKENDS:
        assert backend.name in result.output
    assert "kernels that move and merge" in result.output
    assert "ready: attention runs here on" in result.output
    assert "cpu (cpu)" in result.output


def test_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module(), "probe", lambda backend, device: "row 3 sees 4.00 columns instead of 5")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "sees 4.00 columns instead of 5" in result.output
    assert "no attention backend works here" in result.output


def test_a_library_that_throws_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(backend: Any, device: str) -> str:
        raise OSError("libcudart.so.12: cannot open [shared] object file")

    monkeypatch.setattr(doctor_module(), "probe", explode)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "OSError: libcudart.so.12: cannot open [shared] object file" in " ".join(result.output.split())


def test_a_choice_of_kernels_that_cannot_be_had_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CP_FAST_KERNELS", "carrier_pigeon")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "CP_FAST_KERNELS is 'carrier_pigeon'" in " ".join(result.output.split())
    assert "no kernels move and merge for the backends that work here" in result.output
    assert "ready" not in result.output


def doctor_module() -> Any:
    """The module; its package's attribute of that name is the command."""
    import sys

    return sys.modules[doctor.__module__]
