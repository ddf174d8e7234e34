"""The commands of cp_fast import no more than they need; and `python -m cp_fast doctor`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import conformance.cli
import cp_fast.tools.cli
from cp_fast.kernels.attention.choose_backend import BACKENDS
from cp_fast.tools.cli import app
from cp_fast.tools.cli.doctor import doctor
from cp_ref.show.cli.lazy_commands import lazy_commands
from tests.dist.workers import run_module
from tests.marks import HANGS_S

SCRIPTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
LINES = {"cp-attention": cp_fast.tools.cli.command_line, "cp-conformance": conformance.cli.command_line}


def test_an_import_that_refuses_the_environment_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `doctor` with CP_FAST_CHECK=x."""
    (tmp_path / "reads_the_environment.py").write_text("raise ValueError('CP_FAST_CHECK is x; it must be 0 or 1')")
    monkeypatch.syspath_prepend(tmp_path)

    app = lazy_commands("Looks.", {"look": ("reads_the_environment", "Look.")})
    done = CliRunner().invoke(app, ["look"])
    assert done.exit_code == 2
    assert done.stderr == "error: CP_FAST_CHECK is x; it must be 0 or 1\n"


def test_a_word_that_is_not_utf_8_names_a_file(tmp_path: Path) -> None:
    words = ("plan", "--cp-size", "2", "--seqlens", "8", "--svg", "a\udcff.svg")
    code, said = run_module(tmp_path, "cp_fast", *words)
    assert code == 0, said
    assert "picture written to a\\udcff.svg" in said
    assert (tmp_path / "a\udcff.svg").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_console_script_has_completion_and_a_version(name: str) -> None:
    module, function = SCRIPTS[name].split(":")
    assert callable(getattr(importlib.import_module(module), function))
    runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})
    said = runner.invoke(LINES[name](completion=True), ["--help"]).output
    assert "--install-completion" in said
    assert "--install-completion" not in runner.invoke(LINES[name](), ["--help"]).output
    assert runner.invoke(LINES[name](completion=True), ["--version"]).output.startswith("cp-attention ")


@pytest.mark.parametrize(
    ("name", "words", "completed"),
    [
        ("cp-attention", "do", {"doctor"}),
        ("cp-attention", "plan --cp", {"--cp-size", "--cp-comm-type"}),
        pytest.param("cp-conformance", "st", {"step"}, marks=pytest.mark.thorough),
        pytest.param("cp-conformance", "--rep", {"--repro", "--report"}, marks=pytest.mark.thorough),
    ],
)
def test_a_shell_completes_words(name: str, words: str, completed: set[str]) -> None:
    module, function = SCRIPTS[name].split(":")
    code = f"import sys; sys.argv[0] = {name!r}; from {module} import {function}; {function}()"
    asked = {"COMP_WORDS": f"{name} {words}", "COMP_CWORD": str(len(words.split()))}
    asked[f"_{name.replace('-', '_').upper()}_COMPLETE"] = "complete_bash"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == completed, done.stderr


def test_the_suite_lists_its_commands() -> None:
    said = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(conformance.cli.app, ["--help"]).output
    assert "Commands" in said
    assert " step " in said


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


def test_json_for_bug_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CP_FAST_KERNELS", "torch")
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["ready"] == ["cpu (cpu)"]
    assert {"what": "PyTorch", "here": torch.__version__}.items() <= said["installed"][2].items()
    assert [row["backend"] for row in said["attention backends"] if row["works"]] == ["cpu"]
    assert said["kernels"][0]["in use"] == "torch"
    assert said["variables"]["CP_FAST_KERNELS"] == "torch"


BROKEN = """
def is_available():
    return True
def jit(*_, **__):
    raise AttributeError("module 'numpy' has no attribute 'row_stack'")
"""
LOOK = """
import json
from cp_fast.movers.select_movers import chosen, use
from typer.testing import CliRunner
from cp_fast.tools.cli import app
try:
    with use("numba"):
        chosen("cpu")
except RuntimeError as error:
    print(json.dumps(str(error)))
print(json.dumps(chosen("cpu")))
said = json.loads(CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False).stdout)
print(json.dumps(next(row["remark"] for row in said["installed"] if row["what"] == "numba-cuda")))
"""


@pytest.mark.thorough
def test_numba_that_is_there_and_raises_when_kernels_are_loaded(tmp_path: Path) -> None:
    """Seen with a numba-cuda that is older than the NumPy beside it: `import numba.cuda` works, decorating does not."""
    for package in ("numba", "numba_cuda"):
        (tmp_path / package).mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("int64 = float32 = float64 = None")
    (tmp_path / "numba" / "cuda.py").write_text(BROKEN)
    (tmp_path / "numba_cuda" / "__init__.py").write_text("")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), *sys.path])
    environment = {"PYTHONPATH": path, "NUMBA_ENABLE_CUDASIM": "1", "PATH": "", "HOME": str(tmp_path)}  # no compiler
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
    asked, (taken, why), remark = map(json.loads, done.stdout.splitlines())
    assert "asks for the kernels 'numba', which cannot be had" in asked
    assert taken == "torch"
    for said in (asked, why, remark):
        assert "pip install --upgrade numba numba-cuda, or an older NumPy" in said
        assert "AttributeError: module 'numpy' has no attribute 'row_stack'" in said


def doctor_module() -> Any:
    """The module; its package's attribute of that name is the command."""
    return sys.modules[doctor.__module__]
