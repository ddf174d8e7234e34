"""What ends a command before its own code runs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import conformance.cli
import cp_fast.tools.cli
from cp_ref.contract.cli.lazy_commands import lazy_commands
from tests.dist.workers import run_module

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
