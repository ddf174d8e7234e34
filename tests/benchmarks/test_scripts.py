"""The scripts that play problems on GPUs, tried on the CPU: what is right is counted, and what is wrong is told."""

from __future__ import annotations

import csv
import functools
import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from benchmarks import conformance_gpu, gpu_tests
from benchmarks.conformance_gpu import Counts, Left, Part, Work, play, summary
from benchmarks.forward import counts, times
from benchmarks.forward.cases import SCHEDULES, cases_of
from benchmarks.parts import model_cases, model_ranks
from benchmarks.parts.random_cases import ATTENTION, KINDS
from benchmarks.planning import host_time
from benchmarks.whole_models import Record
from conformance.adapters.cp_fast import cpu
from conformance.record import Played
from conformance.runner import tiers as suite
from conformance.runner.play_problem import InProcess, Task
from tests.dist.workers import CONTEXT, run_module
from tests.gpu import lost_ranks, over_processes
from tests.marks import HANGS_S

ROOT = Path(__file__).parents[2]
SPREAD = ("areas", "linear")  # over processes too
FEW = ("areas",)  # in the fast tests


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *(pytest.param(kind, 0, marks=() if kind in FEW else pytest.mark.thorough) for kind in KINDS),
        *(pytest.param(kind, 2, marks=pytest.mark.thorough) for kind in SPREAD),
    ],
)
def test_problems_of_each_kind_are_right(kind: str, ranks: int) -> None:
    """Simulated, and by two processes over gloo."""
    part, left = Part(("cpu", kind), 0), Left(3)
    work = Work({part: left}, "cpu", ranks, time.time() + HANGS_S)
    with closing(work.runner(part.job)) as runner:
        counts = play(runner, part, work.cp_sizes, 5, left, work.until)
    assert int(left) == 0
    assert counts.failures == []
    assert counts.problems == 3
    tiers = conformance_gpu.TIERS if kind in ATTENTION else [name for name in suite.TIERS if name.startswith(kind)]
    assert set(counts.right) <= set(tiers)
    assert sum(counts.right.values()) == (3 if kind == "linear" else 6)
    assert summary({("cpu", kind): counts}, 3, []) == 0


class Wrong(InProcess):
    """What it plays has other verdicts."""

    verdicts: tuple[Any, ...] = ("wrong", "right", "unsupported", "unsupported", "hung", "missing")

    def play(self, task: Task) -> Played:
        verdict, *rest = self.verdicts
        self.verdicts = (*rest, "right")
        return Played(task.level, task.tier, task.text, verdict, (f"it was {verdict}",))


@pytest.mark.thorough
def test_what_is_wrong_refused_or_not_reached_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    counts = play(Wrong(cpu), Part(("cpu", "layouts"), 0), (2,), 5, Left(4), time.time() + HANGS_S)
    assert (counts.problems, counts.unsupported, len(counts.failures)) == (4, 1, 3)
    assert summary({("cpu", "layouts"): counts}, 6, []) == 1
    said = capsys.readouterr().out
    assert "right 2, WRONG 2, refused 1, NOT REACHED 2" in said
    assert all(f"it was {verdict}" in said for verdict in ("wrong", "hung", "missing"))
    assert "FAILED: 3 findings" in said
    assert summary({("cpu", "layouts"): Counts()}, 6, []) == 2
    assert summary({("cpu", "layouts"): Counts(problems=6)}, 6, ["worker 1 died"]) == 1


@pytest.mark.thorough
def test_processes_give_what_the_simulated_group_gives() -> None:
    """Over gloo; some plays, one with an update, and one of each layer."""
    everything = over_processes.plays(2, "cpu")
    todo = [*everything[:-2:23], next(play for play in everything if play.way == "updated")]
    todo += [next(play for play in everything if play.layer == name) for name in over_processes.LAYERS]
    found = over_processes.run(todo, "cpu", 120.0, start=CONTEXT)
    assert found["counts"]["right"] == len(todo), found
    assert found["exit codes"] == [0, 0]


def test_plays_that_differ_do_not_end_or_are_not_reached_are_told() -> None:
    one, two, three, four = over_processes.plays(2, "cpu")[:4]
    ends = [{"case": str(play), "found": {"out": "12"}, "seconds": 1.0} for play in (one, two)]
    begins = [{"case": str(play), "begins": True} for play in (one, two, three)]
    alone = [{"case": str(one), "simulated": [{"out": "12"}] * 2, "error": 1e-3}]
    alone += [{"case": str(two), "simulated": [{"out": "12"}, {"out": "34"}], "error": 1e-3}]
    found = over_processes.judged([one, two, three, four], [begins + ends + alone, begins + ends])
    assert [case["verdict"] for case in found["cases"]] == ["right", "wrong", "did not end", "not reached"]
    assert found["cases"][1]["differs on ranks"] == [1]
    far = [{**alone[0], "error": 1.0}]
    assert over_processes.judged([one], [ends + far, ends])["counts"]["wrong"] == 1


@pytest.mark.faults
def test_a_lost_rank_is_named() -> None:
    (found,) = lost_ranks.play([lost_ranks.Case("group", "SIGKILL", "backward", 2, "cpu", 6.0)])
    assert found["verdict"] == "right", found
    assert found["named by"] == [0], found


TESTS = """
import time
import pytest

def test_right(): pass
def test_wrong(): assert 1 + 1 == 3, "sums are wrong"
@pytest.mark.skip(reason="needs a moon")
def test_elsewhere(): pass
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_sleeps(n): time.sleep(600)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [0, 2])
def test_a_run_that_is_cut_has_said_what_failed(tmp_path: Path, processes: int) -> None:
    """And what ran, and what it did not reach: in its file from the moment on, and in its output."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name")
    out = tmp_path / "here" / "some.json"
    command = [sys.executable, gpu_tests.__file__, "--out", str(out), "--only", str(tmp_path), "-j", str(processes)]
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen(command, preexec_fn=hears, **output)
    until, wanted = time.monotonic() + HANGS_S, {"test_wrong", "test_broken.py (collection)"}
    found = set[str]()
    while not found >= wanted and run.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
        record = json.loads(out.read_text()) if out.exists() else {}
        found = {name.split("::")[-1] for name in record.get("failures", {})}
    assert found == wanted  # in a run that goes on
    time.sleep(gpu_tests.EVERY_S if processes else 0)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=HANGS_S)
    record = json.loads(out.read_text())
    assert run.returncode == 1, said
    assert record["ended"].startswith("cut after ")
    assert "sums are wrong" in next(text for name, text in record["failures"].items() if "wrong" in name)
    assert sum(record["not reached"].values()) + len(record["running"]) >= 4
    for words in ("FAILED", "sums are wrong", "NOT REACHED: ", "No module named"):
        assert words in said


def test_a_run_ends_when_its_time_is_up(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import time\ntime.sleep(600)")
    out = tmp_path / "some.json"
    with pytest.raises(typer.Exit) as ended:
        gpu_tests.main(out=out, only=str(tmp_path), seconds=0.5)
    assert ended.value.exit_code == 2
    assert json.loads(out.read_text())["ended"].startswith("cut after ")


def whole_models(*given: str) -> tuple[int, dict[str, Any]]:
    """Its exit code and record, of a run on the CPU."""
    pytest.importorskip("accelerate", reason="needs accelerate and transformers: pip install '.[test-integrations]'")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        more = ("--device", "cpu", "--seconds", str(HANGS_S), "--out", str(out))
        code, said = run_module(ROOT, "benchmarks.whole_models", *given, *more)
        assert out.exists(), said
        return code, json.loads(out.read_text())


@pytest.mark.extras
@pytest.mark.thorough
def test_whole_models_are_right() -> None:
    gpt, trainer = "GPT: ALiBi, softcap, dropout, a plan, packed, (plain|offload)", "Trainer, bf16, plain"
    code, record = whole_models("--only", f"^(Qwen3-MoE, padded, FSDP2|{gpt}|{trainer})$")
    assert record["counts"] == {"right": 4}, record
    assert record["failures"] == []
    assert code == 0
    assert all(found["gradients"] > 10 for name, found in record["cases"].items() if "Trainer" not in name)


@pytest.mark.extras
@pytest.mark.thorough
def test_a_mistake_planted_in_whole_models_is_found() -> None:
    code, record = whole_models(
        "--plant", "one gradient", "--only", "^(Llama, one, (plain|FSDP2)|Trainer, bf16, plain)$"
    )
    assert record["counts"] == {"wrong": 3}, record
    assert code == 1
    assert [failure["case"] for failure in record["failures"] if "is off by" in failure["message"]] == [
        "Llama, one, plain",
        "Llama, one, FSDP2",
    ]


@pytest.mark.extras
def test_the_one_process_asks_no_library_for_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the library that transformers found refuses, as flash-linear-attention does with some Tritons."""
    reason = "needs transformers: pip install '.[test-integrations]'"
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next", reason=reason)
    for name in model_ranks.OF_LIBRARIES:

        @functools.wraps(getattr(theirs, name))
        def refuses(*_: Any, **__: Any) -> None:
            raise RuntimeError("upgrade Triton")

        monkeypatch.setattr(theirs, name, refuses)
    case = model_cases.Case("Qwen3-Next", "one", "plain")
    exact, narrow = model_ranks.Reference(torch.device("cpu"), torch.float32).of(case)
    assert exact["loss"].isfinite()
    assert exact["loss"] == narrow["loss"]
    assert any("linear_attn" in name and x.any() for name, x in exact.items())
    with pytest.raises(RuntimeError, match="upgrade Triton"):  # it is there again
        theirs.torch_chunk_gated_delta_rule()


def test_gradients_of_whole_models_are_judged_one_by_one() -> None:
    chance = torch.Generator().manual_seed(0)
    exact = {"loss": torch.tensor(6.0)} | {n: torch.randn(40, generator=chance) * 10.0**-n for n in range(3)}
    exact = {str(name): x for name, x in exact.items()}
    narrow = {name: x * 1.01 for name, x in exact.items()} | {"loss": torch.tensor(6.001)}

    def wrong(**odd: torch.Tensor) -> list[str]:
        return model_ranks.judged(narrow | odd, exact, narrow, torch.bfloat16)["wrong"]

    assert wrong() == []
    for name in ("0", "1", "2"):
        assert [text.split()[0] for text in wrong(**{name: exact[name] * 1.05})] == [name]
        assert [text.split()[0] for text in wrong(**{name: exact[name] * float("nan")})] == [name]
    assert wrong(loss=torch.tensor(6.1))[0].startswith("loss is off by")
    assert "other gradients" in wrong(odd=torch.zeros(1))[0]


def test_a_record_of_whole_models_says_what_was_not_right_and_not_reached(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    record = Record({"commit": "abc"}, ["one", "two", "three", "four"], out)
    record.add("one", "right", gradients=3)
    record.add("two", "raised", "ValueError: no")
    record.add("three", "refused", "Triton")
    record.add("one", "right")
    found = json.loads(out.read_text())
    assert found["counts"] == {"right": 1, "raised": 1, "refused": 1, "not reached": 1}
    assert found["failures"] == [{"case": "two", "verdict": "raised", "message": "ValueError: no"}]
    assert found["refused or skipped"] == {"three": "Triton"}
    assert found["not reached"] == ["four"]
    assert found["cases"] == {"one": {"verdict": "right", "gradients": 3}}


CASES = cases_of(64)


@pytest.mark.parametrize(("schedule", "launches", "merged"), [("p2p", 2, 256), ("all_gather", 2, 256), ("a2a", 1, 0)])
def test_block_causal_attention_has_one_launch_a_step(schedule: str, launches: int, merged: int) -> None:
    problem = counts.problem_of(CASES["block-causal"], schedule)
    found = counts.count(problem, 1)
    assert (len(found.kernels), found.merged, found.gathered) == (launches, merged, (0, 0))
    assert found.kernels[0].segments == (16 if schedule == "a2a" else 8)


def test_a_line_for_each_rank(tmp_path: Path) -> None:
    out = tmp_path / "counts.csv"
    counts.main("dense;window 4,096", SCHEDULES, "-", 64, out)
    with out.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(one["case"], one["schedule"], one["rank"]) for one in lines] == [
        (case, schedule, rank)
        for case in ("dense", "window 4,096")
        for schedule in SCHEDULES.split(",")
        for rank in "01"
    ]
    assert all(0 < float(one["share"]) < 2 for one in lines)


@pytest.mark.parametrize("name", CASES)
def test_what_a_case_sees(name: str) -> None:
    """The check's areas have the problem's pairs."""
    case = CASES[name]
    seen = sum(
        max(min(k1 - 1, q + hi) - max(k0, q + lo) + 1, 0)
        for q0, q1, k0, k1, lo, hi in times.areas_of(case)
        for q in range(q0, q1)
    )
    assert seen == counts.problem_of(case, "p2p").pairs


@pytest.mark.parametrize("schedule", ["p2p", "a2a"])
def test_the_parts_of_a_pass_add_up(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass has all of its parts, and their times are the time of the pass."""
    took: list[float] = []
    end = host_time.Clock.end
    monkeypatch.setattr(host_time.Clock, "end", lambda *given: took.append(1e6 * given[2]) or end(*given))
    layout, lengths = host_time.CASES["sixteen documents"]
    spent = host_time.measured(host_time._on_cpu(schedule, layout, lengths), rounds=1)
    for n, direction in enumerate(("forward", "backward")):
        parts = {part: times for (of, part), times in spent.items() if of == direction}
        assert {"whole", "edge", "format", "loop", "post", "messages", "launch", "wait"} <= set(parts)
        nested = ("whole", "engine", *host_time._NESTED)
        sums = sum(times[0][1] for part, times in parts.items() if part not in nested)
        assert sums == pytest.approx(took[n * host_time._IN_A_ROW])
