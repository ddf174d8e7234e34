"""What the suite refuses before it plays: options, names and the environment, each named."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from conformance.checks.play import _limit_s
from conformance.cli import app
from conformance.implementation import LoadError, load
from cp_ref.schedules.problem import Problem


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--device", "tpu"], 2, "Invalid value for --device: 'tpu' is neither cpu nor cuda"),
        (["--device", "cuda:x"], 2, "Invalid value for --device: 'cuda:x' is neither cpu nor cuda"),
        (["--impl", ""], 3, "the implementation's name is empty"),
        (["--repro", "Case(Problem(cp_size=2))"], 2, "sequences is missing"),
    ],
)
def test_options(options: list[str], code: int, words: str) -> None:
    done = CliRunner().invoke(app, ["--impl", "cp_ref", *options], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    assert words in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu() -> None:
    done = CliRunner().invoke(app, ["--device", "cuda"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "Invalid value for --device: 'cuda', but PyTorch sees no CUDA device" in done.stderr


def test_a_module_of_the_folder_that_python_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `pytest`, which unlike `python -m pytest` does not look into the current folder."""
    (tmp_path / "my_attention.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=r"my_attention is in this folder, .*`python -m pytest`, or set PYTHONPATH"):
        load("my_attention")
    with pytest.raises(LoadError, match=r"No module named 'no_such_module'$"):
        load("no_such_module")


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan"])
def test_the_limit_of_a_call(text: str) -> None:
    with patch.dict(os.environ, CONFORMANCE_LIMIT_S=text), pytest.raises(ValueError, match=f"LIMIT_S is '{text}'; it"):
        _limit_s("cpu")
    with patch.dict(os.environ, CONFORMANCE_LIMIT_S="7.5"):
        assert _limit_s("cpu") == 7.5


def test_a_problem_without_sequences() -> None:
    with pytest.raises(ValueError, match=r"cannot read a problem from 'Problem\(cp_size=2\)': sequences is missing"):
        Problem.parse("Problem(cp_size=2)")
