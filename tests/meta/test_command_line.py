"""The command line: what it prints, its exit codes, and that the printed command plays the failing problem again."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from conformance.checks.play import _limit_s
from conformance.cli import app
from conformance.implementation import LoadError, load
from conformance.record import LEVELS
from cp_ref.schedules.problem import Problem
from tests.marks import HANGS_S
from tests.meta.mutants import MUTANTS

_RUN = CliRunner()
HERE = ("--impl", "cp_ref", "--in-process")  # so that mutants can be planted


def _play(*arguments: str) -> tuple[int, str]:
    result = _RUN.invoke(app, list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.thorough
def test_a_right_implementation() -> None:
    code, output = _play(*HERE, "--tier", "plan", "--tier", "probes", "--max-examples", "5", "--cp-size", "2,3")
    assert code == 0, output
    assert "plan" in output
    assert "probes" in output
    assert "logic" not in output


@pytest.mark.thorough
def test_a_wrong_one_and_its_replay() -> None:
    with MUTANTS["lse-in-base-2"].planted():
        code, output = _play(*HERE, "--tier", "logic", "--max-examples", "20")
        assert code == 1, output
        command = next(line for line in output.splitlines() if "--repro" in line)
        words = shlex.split(command)
        assert words[:5] == ["python", "-m", "conformance", "--impl", "cp_ref"]
        code, again = _play(*words[3:])
        assert code == 1, again
        assert words[words.index("--repro") + 1] in again
    code, healed = _play(*words[3:])
    assert code == 0, healed


@pytest.mark.thorough
def test_a_crash_in_a_worker_is_reported_with_its_problem(tmp_path: Path) -> None:
    """From the door to the record: it crashes, the run goes on, and the report has it."""
    arguments = ("--impl", "tests.meta.zoo.samples:Exits", "--cp-size", "2", "--max-examples", "12")
    code, output = _play(
        *arguments, "--max-failures", "1", "--shrink-time", "5", "--report", str(tmp_path), "--tier", "plan",
        "--tier", "probes", "--tier", "merge", "--junit", str(tmp_path / "junit.xml"),
    )  # fmt: skip
    assert code == 1, output
    assert "probes: crashed" in output
    assert "exit code 3" in output
    record = json.loads((tmp_path / "report.json").read_text())
    verdicts = {(p["tier"], p["verdict"]) for p in record["played"]}
    assert {("plan", "right"), ("probes", "crashed"), ("merge", "missing")} <= verdicts
    assert any(p.get("shrunk") and p["verdict"] == "crashed" for p in record["played"])
    assert record["meta"]["impl"] == "tests.meta.zoo.samples:Exits"
    assert record["meta"]["versions"]["torch"]
    assert 'classname="conformance.schedule.probes"' in (tmp_path / "junit.xml").read_text()


@pytest.mark.thorough
def test_levels() -> None:
    code, output = _play("--impl", "tests.meta.zoo.samples:Lower", "--level", "kernel", "--max-examples", "5")
    assert code == 0, output
    assert "kernel-backward" in output
    assert "merge" not in output
    code, output = _play("--impl", "tests.meta.zoo.samples:Lower", "--repro", "Tile(rows=2, columns=3, left=-1)")
    assert code == 0, output


@pytest.mark.thorough
def test_nothing_to_test_is_no_success() -> None:
    code, output = _play("--impl", "tests.meta.zoo.samples:Lower", "--level", "schedule")
    assert code == 4
    assert "does not offer the level schedule" in output
    assert "nothing was computed" in output


@pytest.mark.thorough
def test_known_failures(tmp_path: Path) -> None:
    """A known failure is no failure; one that no longer fails is."""
    file = tmp_path / "known_failures.toml"
    file.write_text('[[entry]]\nmatch = {softcap = {low = 1e-9}}\nreason = "one percent too much"\nissue = "#1"\n')
    options = (
        "--known-failures",
        str(file),
        "--in-process",
        "--tier",
        "logic",
        "--max-examples",
        "80",
        "--cp-size",
        "2",
    )
    code, output = _play("--impl", "tests.meta.zoo.samples:Wrong", *options)
    assert code == 0, output
    code, output = _play("--impl", "cp_ref", *options)
    assert code == 1, output
    assert "no longer fails" in output
    code, output = _play("--impl", "cp_ref", "--known-failures", str(tmp_path / "nowhere.toml"))
    assert code == 2
    assert "--known-failures" in output


@pytest.mark.thorough
def test_an_error_case_replays() -> None:
    code, output = _play(*HERE, "--repro", "error lengths-decrease")
    assert code == 0, output


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        ("--tier", "spell-check"),
        ("--level", "basement"),
        ("--profile", "eternal"),
        ("--cp-size", "two"),
        ("--time-limit", "inf"),
        ("--cp-size", "100000000"),
        ("--repro", "Case(1)"),
        ("--repro", "Case(Problem(cp_size=100000000, sequences=[]))"),
        ("--repro", "error no-such-thing"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, str]) -> None:
    code, output = _play(*HERE, *arguments)
    assert code == 2
    assert arguments[0] in output
    assert arguments[0] == "--time-limit" or arguments[1].split()[-1] in output


@pytest.mark.thorough
def test_processes_need_processes() -> None:
    code, output = _play("--impl", "tests.meta.zoo.samples:AllGather", "--in-process")
    assert code == 2
    assert "--in-process" in output


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["no_such_module", "math", "cp_ref:nothing", "cp_ref.no_such_module"])
@pytest.mark.parametrize("where", ["--isolate", "--in-process"])
def test_what_cannot_be_loaded(name: str, where: str) -> None:
    code, output = _play("--impl", name, where)
    assert code == 3
    assert name in output


@pytest.mark.thorough
def test_an_implementation_may_be_an_object_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cp_ref.schedules.mine", load("cp_ref").offered, raising=False)
    assert load("cp_ref.schedules:mine").offered is load("cp_ref").offered
    with pytest.raises(LoadError, match=r"needs one of thd \(helpers\)"):
        load("cp_ref:schedules")
    assert load("tests.meta.zoo.samples:Lower").levels == ("helpers", "merge", "kernel")


@pytest.mark.thorough
@pytest.mark.parametrize("module", ["cp_ref.reference.reference_attention", "cp_fast.api.attention"])
def test_the_bare_names_mean_all_four_levels_and_longer_ones_what_they_say(module: str) -> None:
    assert load(module.partition(".")[0]).levels == LEVELS
    assert load(module).levels == ("schedule",)


# ---- what is refused before anything is played


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


WITHOUT = """
import runpy, sys
sys.modules["hypothesis"] = None
sys.argv = ["conformance", "--impl", "cp_ref"]
runpy.run_module("conformance", run_name="__main__")
"""


@pytest.mark.thorough
def test_the_missing_packages_are_named() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 1
    assert "pip install hypothesis jinja2" in done.stderr
    assert "Traceback" not in done.stderr
