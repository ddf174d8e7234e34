"""Options whose values make no sense end a command at once, by name: before a folder is made or a comparison runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import cp_ref.cli
from conformance.cli import app as suite
from conformance.step_command import app as step
from cp_fast.tools.cli import app

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
STEP = ["json:loads", "--batch", "json:dumps"]


@pytest.mark.parametrize("commands", [app, cp_ref.cli.app], ids=["cp_fast", "cp_ref"])
@pytest.mark.parametrize("options", [["--seqlens"], ["--seqlens", "8", "--seqlens-kv"]])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("2147483648", "is 2147483648; it must be at most 2147483647"),
        ("9" * 400, "is an integer of 1329 bits; it must be at most 2147483647"),
        ("9" * 5000, "of 5000 characters; it must be lengths"),
    ],
)
def test_lengths_beyond_32_bits(commands: object, options: list[str], value: str, says: str) -> None:
    found = runner.invoke(commands, ["plan", *options, value])  # type: ignore[arg-type]
    assert found.exit_code == 2, found.output
    assert f"{options[-1]} {says}" in found.output or says in found.output


@pytest.mark.parametrize(("commands", "given"), [(step, STEP), (suite, [])], ids=["step", "suite"])
def test_a_report_needs_a_folder(commands: object, given: list[str], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        found = runner.invoke(commands, [*given, "--report", ""])  # type: ignore[arg-type]
    assert found.exit_code == 2, found.output
    assert "it is empty; give a folder" in found.output
    assert not list(tmp_path.iterdir())


def test_every_word_of_a_list_is_read_before_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.step_command.compare_step", lambda *given, **how: pytest.fail("a step ran"))
    for odd, says in (
        (["--layout", "dual_chunk,diagonal"], "layout is 'diagonal'"),
        (["--cp-comm-type", "p2p,ring"], "cp_comm_type is 'ring'"),
        (["--cp-size", "2,0"], "cp_size is 0"),
    ):
        found = runner.invoke(step, [*STEP, *odd])
        assert found.exit_code == 2, found.output
        assert says in found.output
