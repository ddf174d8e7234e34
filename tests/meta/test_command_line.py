"""The command line: what it prints, its exit codes, and that the printed command plays the failing case again."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from conformance.cli import app
from conformance.implementation import load
from conformance.mutants import MUTANTS

_RUN = CliRunner()


def _play(*arguments: str) -> tuple[int, str]:
    result = _RUN.invoke(app, ["--impl", "cp_ref", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_right_implementation() -> None:
    code, output = _play("--tier", "plan", "--tier", "probes", "--max-examples", "5", "--cp-size", "2,3")
    assert code == 0, output
    assert "plan" in output
    assert "probes" in output
    assert "logic" not in output


def test_a_wrong_one_and_its_replay() -> None:
    with MUTANTS["lse-in-base-2"].planted():
        code, output = _play("--tier", "logic", "--max-examples", "20")
        assert code == 1, output
        (command,) = [line for line in output.splitlines() if "--repro" in line]
        words = shlex.split(command)
        assert words[:5] == ["python", "-m", "conformance", "--impl", "cp_ref"]
        code, again = _play(*words[5:])
        assert code == 1, again
        assert words[-1] in again
    code, healed = _play(*words[5:])
    assert code == 0, healed


def test_an_error_case_replays() -> None:
    code, output = _play("--repro", "error lengths-decrease")
    assert code == 0, output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tier", "spell-check"),
        ("--profile", "eternal"),
        ("--cp-size", "two"),
        ("--repro", "Case(1)"),
        ("--repro", "error no-such-thing"),
        ("--impl", "no_such_module"),
        ("--impl", "math"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, str]) -> None:
    code, output = _play(*arguments)
    assert code == 2
    assert arguments[0].lstrip("-") in output or arguments[1].split()[-1] in output


def test_an_implementation_may_be_an_object_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cp_ref.spec.mine", load("cp_ref"), raising=False)
    assert load("cp_ref.spec:mine") is load("cp_ref")
    with pytest.raises(ValueError, match="does not export ContextParallel"):
        load("cp_ref:spec")
