"""Workers: what crashes, hangs or eats memory ends its problem and nothing else; process groups and their ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from conformance.implementation import LoadError
from conformance.problems.capabilities import Capabilities
from conformance.runner.play_problem import Task, tasks_of
from conformance.runner.processes import run_together, say
from conformance.runner.run_tiers import Profile, run_tier
from conformance.runner.workers import WorkerRunner, start_runner
from conformance.step_command import _Bars
from tests.dist.workers import start_server

LIMIT_S = 20.0  # of what should finish: this machine may be busy
GOOD = Task("schedule", "logic", "Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)]))")
BAD = Task("schedule", "logic", "Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], softcap=2.0))")


def sample(name: str, limit_s: float = LIMIT_S, cp_size: int = 2) -> WorkerRunner:
    return start_runner(f"tests.meta.zoo.samples:{name}", "cpu", limit_s, lambda kind: (cp_size,))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "limit_s", "verdict", "words"),
    [
        ("Exits", LIMIT_S, "crashed", ["the worker process died", "exit code 3"]),
        ("Segfaults", LIMIT_S, "crashed", ["SIGSEGV", "Segmentation fault", "string_at"]),
        ("Hangs", 4.0, "hung", ["did not finish", "rank 1 is at samples.py", ", ranks 0 wait"]),
        ("HangsInC", 4.0, "hung", ["did not finish within 4 s", "samples.py"]),
        ("EatsMemory", LIMIT_S, "out of memory", ["rank 0 ran out of memory", "1024.00 GiB"]),
        ("EatsHostMemory", LIMIT_S, "out of memory", ["rank 0 ran out of memory"]),
        ("Wrong", LIMIT_S, "wrong", ["out is"]),
    ],
)
def test_a_sick_implementation(name: str, limit_s: float, verdict: str, words: list[str]) -> None:
    with sample(name, limit_s) as runner:
        assert runner.play(GOOD).verdict == "right"
        began = time.monotonic()
        played = runner.play(BAD)
        assert time.monotonic() - began < limit_s + 10
        assert (played.verdict, played.text) == (verdict, BAD.text)
        for word in words:
            assert word in "; ".join(played.findings)
        assert runner.play(GOOD).verdict == "right"


@pytest.mark.thorough
def test_a_killed_worker_ran_out_of_memory() -> None:
    with sample("Killed") as runner:
        played = runner.play(BAD)
        assert played.verdict == "out of memory"
        assert "SIGKILL" in played.findings[0]
        assert runner.play(GOOD).verdict == "right"


@pytest.mark.thorough
def test_a_crash_is_shrunk_and_the_run_goes_on() -> None:
    with sample("Exits") as runner:
        capabilities = runner.capabilities()
        few = Profile(30, derandomize=True, shrink_s=0.0)
        result = run_tier(runner, "probes", capabilities, few, cp_sizes=(1, 2))
        assert [p.verdict for p in result.smallest] == ["crashed"]
        assert "softcap" in result.smallest[0].text
        plan = run_tier(runner, "plan", capabilities, Profile(3, derandomize=True), cp_sizes=(2,))
        assert plan.passed == 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module", "No module named"),
        ("tests.meta.zoo.samples:NoSuchThing", "no attribute"),
        ("tests.meta.zoo.exits_when_imported", "died"),
        ("math", "offers nothing"),
    ],
)
def test_what_cannot_be_loaded(name: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        start_runner(name, "cpu", LIMIT_S, lambda kind: (2,))


@pytest.mark.thorough
def test_a_task_that_means_nothing_is_no_failure_of_the_implementation() -> None:
    with sample("Sick") as runner:
        for task in (Task("schedule", "logic", "Case(1)"), Task("schedule", "errors", "error no-such-thing")):
            with pytest.raises(ValueError, match=r"Case\(1\)|no-such-thing"):
                runner.play(task)
        (merge,) = tasks_of('Merge(parts=2, dtype="bfloat16")')
        assert runner.play(merge).verdict == "missing"


@pytest.mark.thorough
def test_no_worker_outlives_its_runner() -> None:
    runner = sample("Lower")
    (worker,) = runner.workers
    pid = worker.pid
    runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)


@pytest.mark.thorough
def test_a_worker_has_the_environment_the_folder_and_the_path_of_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are when it starts, which is later than the fork server did."""
    sample("Lower").close()
    (tmp_path / "late.py").write_text(
        "import os\nfrom tests.meta.zoo.samples import Lower\n"
        "assert os.environ['LATE'] == '1' and os.path.exists('late.py') and os.environ['OMP_NUM_THREADS'] == '1'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LATE", "1")
    monkeypatch.chdir(tmp_path)
    with start_runner("late:Lower", "cpu", LIMIT_S, lambda kind: (2,)) as runner:
        assert "kernel" in runner.info.levels
    monkeypatch.delenv("LATE")
    with pytest.raises(LoadError, match="LATE"):
        start_runner("late:Lower", "cpu", LIMIT_S, lambda kind: (2,))


def kill_server() -> None:
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)


@pytest.mark.thorough
def test_a_fork_server_that_was_killed_is_started_again() -> None:
    sample("Lower").close()
    kill_server()
    with sample("Sick") as runner:
        assert runner.play(GOOD).verdict == "right"
    kill_server()  # which has imported less than that of other tests
    start_server()


HANGS = """
import os, sys
from conformance.runner.workers import start_runner
runner = start_runner("tests.meta.zoo.samples:HangsInC", "cpu", 600.0, lambda kind: (2,))
print(runner.workers[0].pid, flush=True)
from tests.meta.processes.test_workers import BAD
runner.play(BAD)
"""


@pytest.mark.thorough
def test_a_script_without_a_guard_runs_once_and_a_hanging_worker_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HANGS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert driver.stdout is not None
    worker = int(driver.stdout.readline())
    time.sleep(3.0)  # until it hangs
    os.kill(worker, signal.SIG_DFL)
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + LIMIT_S
    while Path("/proc", str(worker)).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path("/proc", str(worker)).exists()
    assert driver.stdout.read() == ""
    driver.stdout.close()


# ---- one process for each rank


@pytest.fixture(scope="module")
def gathering() -> Capabilities:
    """What the plain all-gather attention of the samples supports."""
    with sample("AllGather") as runner:
        return runner.capabilities()


@pytest.mark.thorough
def test_what_it_supports_is_found_by_trying(gathering: Capabilities) -> None:
    assert gathering.choices["cp_comm_type"] == ("all_gather",)
    assert gathering.choices["layout"] == ("contiguous",)
    assert "window left" in gathering.refused
    assert gathering.wishes == ("deterministic",)


@pytest.mark.thorough
def test_a_plain_all_gather_over_gloo(gathering: Capabilities) -> None:
    with sample("AllGather") as runner:
        result = run_tier(runner, "logic", gathering, Profile(25, derandomize=True), cp_sizes=(2,))
        assert len(runner.workers) == 2
        assert not result.smallest
        assert result.passed >= 10
        assert run_tier(runner, "plan", gathering, Profile(3, derandomize=True)).count("missing") == 1


@pytest.mark.thorough
def test_its_planted_bug(gathering: Capabilities) -> None:
    with sample("AllGatherWithABug") as runner:
        result = run_tier(runner, "logic", gathering, Profile(40, derandomize=True, shrink_s=0.0), cp_sizes=(2,))
        assert [p.verdict for p in result.smallest] == ["wrong"]


@pytest.mark.thorough
def test_the_reference_over_gloo() -> None:
    with sample("OverProcesses", cp_size=4) as runner:
        capabilities = runner.capabilities()
        for tier in ("plan", "probes"):
            result = run_tier(runner, tier, capabilities, Profile(12, derandomize=True), cp_sizes=(2, 4))
            assert not result.smallest
            assert result.passed == 12
        a2a = 'Case(Problem(cp_size=4, sequences=[(16, 16, 16, 16)], cp_comm_type="a2a+p2p", a2a_size=2, heads_q=2))'
        assert runner.play(Task("schedule", "logic", a2a)).verdict == "right"
        lengths = runner.play(Task("schedule", "errors", "error lengths-decrease"))
        assert lengths.verdict == "right"
        larger = runner.play(Task("schedule", "logic", "Case(Problem(cp_size=8, sequences=[(16, 16, 16, 16)]))"))
        assert larger.verdict == "missing"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [("OneRankExits", "crashed", "rank 1 died: exit code 7"), ("OneRankHangs", "hung", "rank 1 did not finish")],
)
def test_one_rank(name: str, verdict: str, words: str) -> None:
    bad = Task("schedule", "logic", 'Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], softmax_type="off-by-one"))')
    with sample(name, 10.0 if verdict == "hung" else LIMIT_S) as runner:
        assert runner.play(GOOD).verdict == "right"
        played = runner.play(bad)
        assert played.verdict == verdict
        assert any(words in finding for finding in played.findings)
        assert runner.play(GOOD).verdict == "right"


@pytest.mark.thorough
def test_a_rank_that_raises_alone_does_not_keep_the_others_waiting_for_ever() -> None:
    with sample("OneRankRaises") as runner:
        began = time.monotonic()
        played = runner.play(GOOD)
        assert time.monotonic() - began < LIMIT_S
        assert played.verdict == "hung"
        assert "rank 1 raised RuntimeError: not today" in played.findings[0]
        assert any("rank 0 did not finish" in finding for finding in played.findings)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("entry", "verdicts"),
    [
        ("well-formed", {"right"}),
        ("softcap-nan", {"unsupported"}),  # it has no softcap at all
        ("plan-heads", {"missing"}),
        ("q-no-tensor", {"wrong", "hung"}),  # it raises on one rank alone, and the other waits
    ],
)
def test_tables_over_processes(entry: str, verdicts: set[str]) -> None:
    with sample("AllGather") as runner:
        assert runner.play(Task("schedule", "errors", f"error {entry}")).verdict in verdicts


# ---- processes that run at the same time, and say what they do


def _twice(job: Any) -> Any:
    say(f"counts to {job}")
    if job == 3:
        time.sleep(600)
    return 2 * job


def test_what_each_process_does_is_told() -> None:
    stages: list[tuple[str, str]] = []
    context = multiprocessing.get_context("fork")
    told = run_together(context, _twice, {"a": 1, "b": 2}, RuntimeError, 60.0, lambda *stage: stages.append(stage))
    assert told == [2, 4]
    assert [stage for name, stage in stages if name == "b"] == ["starts", "counts to 2", "done"]
    late = r"^not ended within 1 s: b \(counts to 3, for [01] s\); the ranks may wait for each other$"
    with pytest.raises(RuntimeError, match=late):
        run_together(context, _twice, {"a": 1, "b": 3}, RuntimeError, 1.0)


def test_the_command_shows_who_runs() -> None:
    with _Bars() as bars:
        progress: Progress = bars._progress
        for stage in (("rank 0", "starts"), ("rank 1", "starts"), ("rank 0", "step 1 of 2"), ("rank 1", "done")):
            bars.went_on("the step", *stage)
        assert [task.description for task in progress.tasks] == ["the step: rank 0, step 1 of 2"]
        bars.went_on("the step, recorded", "rank 0", "starts")
        assert [task.description for task in progress.tasks] == ["the step, recorded: rank 0, starts"]
