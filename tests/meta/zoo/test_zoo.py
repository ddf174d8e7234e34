"""Bad implementations are named for what they are, and none keeps the suite busy."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from conformance.case import Case
from conformance.cli import app
from conformance.problems.capabilities import Capabilities, probe
from conformance.runner.play_problem import InProcess, Task
from conformance.runner.run_tiers import Profile, run_tier
from conformance.runner.workers import WorkerRunner, start_runner
from tests.meta.zoo.bad_habits import SETTERS, none_from, sets
from tests.meta.zoo.naive_ring import Flaws
from tests.meta.zoo.naive_setup import Naive

PLAIN = "Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)]), return_lse=True)"
LOGIC = Task("schedule", "logic", PLAIN)


def kept(name: str, limit_s: float) -> WorkerRunner:
    return start_runner(f"tests.meta.zoo.bad_habits:{name}", "cpu", limit_s, lambda kind: (2,))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["HangsAlways", "HangsAlwaysInProcesses", "SupportsHangs"])
def test_one_that_always_hangs_is_given_up(name: str) -> None:
    """A few time limits, whatever is asked: not one for each question and problem."""
    began = time.monotonic()
    few = ("--time-limit", "1", "--cp-size", "2", "--max-examples", "3", "--shrink-time", "0")
    tiers = ("--tier", "logic", "--tier", "special", "--tier", "errors")
    result = CliRunner().invoke(
        app, ["--impl", f"tests.meta.zoo.bad_habits:{name}", *few, *tiers], env={"COLUMNS": "200"}
    )
    assert time.monotonic() - began < 90
    assert result.exit_code == 1, result.output
    assert "hung" in result.output
    assert "not played: the problems of the level schedule before it hung" in result.output


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SaysSurrogates", ["rank 0 raised RuntimeError: no such file: caf\\udce9 (at bad_habits.py:"]),
        ("Leaves", ["rank 0 raised SystemExit: 5 (at bad_habits.py:"]),
        ("LeavesProcesses", ["rank 0 raised SystemExit: 5 (at bad_habits.py:"]),
        ("Forks", ["a call forked the process, and left 2 copies of it behind"]),
        ("ForksProcesses", ["forked the process, and left 1 copies of it behind"]),  # which share its sockets
    ],
)
def test_what_it_does_is_said(name: str, words: list[str]) -> None:
    with kept(name, 5.0) as runner:
        for _ in range(2):
            played = runner.play(LOGIC)
            assert played.verdict in ("wrong", "hung"), played
            for word in words:
                assert word in "; ".join(played.findings)


@pytest.mark.parametrize(
    ("member", "text", "said"),
    [
        ("attention", PLAIN, "attention returned 1 results; out, lse were asked for"),
        ("attention", PLAIN.replace(", return_lse=True", ""), "attention returned NoneType for out"),
        ("supports", PLAIN, "supports returned None, but should return a pair (bool, reason)"),
        ("shard", PLAIN, "shard returned NoneType, but should return a tensor"),
        ("make_plan", PLAIN.replace("return_lse", "use_plan"), "make_plan returned NoneType, but should return a plan"),
    ],
)
def test_none_is_no_answer(member: str, text: str, said: str) -> None:
    played = InProcess(none_from(member)).play(Task("schedule", "logic", text))
    assert played.verdict == "wrong"
    assert said in "; ".join(played.findings)


@pytest.mark.parametrize("setting", SETTERS)
@pytest.mark.one_in(3)
def test_settings_that_a_call_changes(setting: str) -> None:
    runner = InProcess(sets(setting))
    played = runner.play(Task("schedule", "hygiene", PLAIN))
    assert played.verdict == "wrong"
    assert any(setting in finding and "a call" in finding for finding in played.findings), played.findings
    assert runner.play(Task("schedule", "logic", PLAIN)).verdict == "right"  # and no other problem suffers from it


@pytest.mark.parametrize(
    "text",
    [
        "",
        "opcheck",
        "special nope",
        "torch gradcheck",
        "error unsupported gravity",
        "Case(\udcff)",
        "Case(Problem(cp_size=0, sequences=[]))",
        "Case(Problem(cp_size=2, sequences=[(8, 8, 7, 8)]))",
        "Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], window_size=3))",
        "Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], a2a_size=2))",
        'Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], dtype="int8"))',
        'Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)]), seed="x")',
    ],
)
def test_a_text_that_means_nothing_is_no_failure_of_the_implementation(text: str) -> None:
    """And is refused before anything is loaded."""
    result = CliRunner().invoke(app, ["--impl", "no_such_module", "--repro", text], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert "--repro" in result.output


def test_a_report_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "report", Path("/proc/report")):
        result = CliRunner().invoke(app, ["--impl", "no_such_module", "--report", str(folder)], env={"COLUMNS": "200"})
        assert result.exit_code == 2, result.output
        assert "--report" in result.output
        assert f"cannot write into {folder}" in result.output


# ---- an outsider's ring with three planted bugs: set up in under 30 lines, each found, each shrunk to 8 tokens at most


TIERS = ("probes", "logic")
SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def capabilities() -> Capabilities:
    torch.set_num_threads(1)
    return probe(Naive())


@pytest.mark.thorough
def test_the_setup_is_short() -> None:
    text = Path(__file__).with_name("naive_setup.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) < 30
    ring = Path(__file__).with_name("naive_ring.py").read_text()
    assert len([line for line in ring.splitlines() if line.strip()]) < 80


@pytest.mark.thorough
@pytest.mark.parametrize("tier", TIERS)
def test_without_bugs_it_is_right_in_all_that_it_claims(tier: str, capabilities: Capabilities) -> None:
    result = run_tier(Naive(), tier, capabilities, Profile(80, derandomize=True), cp_sizes=SIZES)
    assert not result.smallest, result.smallest
    assert result.passed >= 40


@pytest.mark.thorough
@pytest.mark.parametrize("flaw", [field.name for field in fields(Flaws)])
def test_every_bug_is_found_and_shrunk(flaw: str, capabilities: Capabilities, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Naive, "flaws", Flaws(**{flaw: True}))
    smallest = [
        failure
        for tier in TIERS
        for failure in run_tier(Naive(), tier, capabilities, Profile(80, derandomize=True), cp_sizes=SIZES).smallest
    ]
    assert smallest, f"nothing was found of {flaw}"
    tokens = [sum(max(s.slots_q, s.slots_kv) for s in Case.parse(f.text).problem.sequences) for f in smallest]
    assert min(tokens) <= 8, smallest
