"""`conformance.step`: planted mistakes are found and named, and what is right is called right."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

import cp_fast
from conformance.report import read_record
from conformance.step import CAUSES, StepError, compare_step
from conformance.step.report import StepRecord
from conformance.step.step_record import Job
from conformance.step_command import app
from tests.dist.workers import run_module
from tests.meta.step.detection import MISTAKES, REASONS, WAYS, Cells
from tests.meta.step.step_mutants import IN_ONE_PROCESS_TOO, MUTANTS, Mutant, Shape, batch_of, build_of
from tests.meta.step.step_processes import StepProcesses

NAN, INF = float("nan"), float("inf")
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "how_to" / "training.md").read_text()
QUICK = ("one layer on its slice",)  # in the default run
SHOWN = (  # in docs/how_to/training.md, as they are reported
    *("loss times ranks", "loss of the rank", "mean of each rank", "labels shifted after the cut"),
    *("second labels shifted after the cut", "positions of the slice", "learned positions of the slice"),
    *("sinks reduced twice", "gradients not reduced", "tied weights reduced twice", "a frozen parameter"),
    *("padding counts", "mask of the first slice", "one layer on its slice", "convolution of the slice", ""),
    *("reduced for each micro-batch", "mean of each micro-batch", "clipped before the sum"),
    *("clipped by the rank's norm", "window over ranks alone", "NaN on one rank", "tied in one process alone"),
    *("a buffer of the rank's tokens", "states go on in one process"),
)


def step_of(shape: Shape, bug: str = "", **how: Any) -> Any:
    batch = partial(batch_of, shape, how.get("dp_size", 1))
    return compare_step(partial(build_of, shape=shape, bug=bug), batch, **{"cp_size": 2, **how})


def mutants() -> Iterator[Any]:
    for mutant in MUTANTS:
        marks = () if mutant.bug in QUICK else pytest.mark.thorough
        yield pytest.param(mutant, marks=marks, id=f"{mutant.bug or 'right'}: {mutant.cause or 'no name'}")


@pytest.fixture(scope="module")
def alone(steps: StepProcesses) -> Callable[..., Any]:
    """What the one process finds: of mistakes that the ranks alone make, once for a shape of model and batch."""
    known: dict[Any, Any] = {}

    def found(mutant: Mutant, job: Job) -> Any:
        bug = mutant.bug if mutant.bug in IN_ONE_PROCESS_TOO else ""
        key = bug, mutant.shape, mutant.how.get("dp_size", 1), job.noise, job.look, job.without
        if key not in known:
            known[key] = steps.found_alone(replace(job, build=partial(build_of, shape=mutant.shape, bug=bug)))
        return known[key]

    return found


@pytest.mark.parametrize("mutant", list(mutants()))
def test_a_planted_mistake_is_found_and_named(mutant: Mutant, steps: StepProcesses, alone: Callable[..., Any]) -> None:
    batch = partial(batch_of, mutant.shape, mutant.how.get("dp_size", 1))
    build = partial(build_of, shape=mutant.shape, bug=mutant.bug)
    report = steps.compare(build, batch, alone=partial(alone, mutant), **mutant.how)
    assert not report.right
    assert report.causes == ((mutant.cause,) if mutant.cause else ()), report
    assert mutant.first in report.first, report
    if not mutant.cause:
        assert report.first, report
    if mutant.bug in SHOWN:
        said = report.findings[0].text if report.findings else report.first
        assert " ".join(said.split()) in " ".join(PAGE.split()), report


@pytest.mark.thorough
@pytest.mark.parametrize("bug", ["labels shifted after the cut", "one layer on its slice", "mean of each rank"])
def test_mistakes_are_named_in_low_precision(bug: str, steps: StepProcesses, alone: Callable[..., Any]) -> None:
    [cause] = [mutant.cause for mutant in MUTANTS if mutant.bug == bug]
    mutant = Mutant(bug, cause, Shape(dtype=torch.bfloat16, layers=3), {"layout": "contiguous"})
    build = partial(build_of, shape=mutant.shape, bug=bug)
    report = steps.compare(build, partial(batch_of, mutant.shape), alone=partial(alone, mutant), **mutant.how)
    assert report.causes == (cause,), report


def test_there_are_enough_mistakes() -> None:
    assert len(MUTANTS) >= 20
    assert sum(bool(mutant.cause) for mutant in MUTANTS) >= 16
    assert {mutant.cause for mutant in MUTANTS} - {""} | set(MISTAKES.values()) == set(CAUSES)


def test_the_page_has_each_cause() -> None:
    for title in CAUSES.values():
        assert f"\n### {title}\n" in PAGE
    assert {mutant.bug for mutant in MUTANTS} >= set(SHOWN)


@pytest.mark.thorough
def test_the_page_s_program_is_right(tmp_path: Path) -> None:
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(block)
    given = ["--cp-size", "2,4", "--cp-comm-type", "p2p,a2a", "--layout", "dual_chunk,contiguous"]
    code, said = run_module(
        tmp_path, "conformance", "step", "train:build", "--batch", "train:batch", *given, path=(ROOT,)
    )
    assert code == 0, said
    assert said.count(": right") == 8


def test_what_is_right_is_called_right() -> None:
    stages: list[tuple[str, str, str]] = []
    report = step_of(Shape(), on_progress=lambda *stage: stages.append(stage))
    assert report.right, report
    assert "right" in str(report)
    of_rank_1 = [stage for run, process, stage in stages if (run, process) == ("the step", "rank 1")]
    assert of_rank_1[:4] == ["starts", "builds the model", "step 1 of 2", "step 2 of 2"]
    assert of_rank_1[-1] == "done"
    assert "26 of 26 gradients agree; 26 of 26 parameters after two steps agree" in str(report)


def four_layers(cp: Any) -> Any:
    return build_of(cp, Shape(layers=4, dtype=torch.float32, optimizer=False))


def of_four_layers() -> Any:
    return batch_of(Shape())


def silent(cp: Any) -> Any:
    return build_of(cp, Shape(optimizer=False), "all layers on their slices")


def raises(cp: Any) -> Any:
    raise RuntimeError("no such model")


def words(*arguments: str) -> list[str]:
    here = "tests.meta.step.test_step:"
    return [here + word[1:] if word.startswith(":") else word for word in arguments]


@pytest.mark.thorough
def test_the_command_says_right() -> None:
    given = words(":four_layers", "--batch", ":of_four_layers", "--cp-size", "4", "--cp-comm-type", "a2a")
    code, said = run_module(ROOT, "conformance", "step", *given)
    assert code == 0, said
    assert "step over 4 ranks, a2a, dual_chunk, float32: right" in said


@pytest.mark.thorough
def test_the_command_s_other_exit_codes(tmp_path: Path) -> None:
    """In this process: the steps' processes are forked from the server that is there."""

    def step(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, words(*arguments))
        return done.exit_code, done.output

    code, said = step(":silent", "--batch", ":of_four_layers", "--report", str(tmp_path))
    assert code == 1, said
    assert f"wrote {tmp_path / 'report.html'}" in said
    [report] = cast(StepRecord, read_record(tmp_path / "report.json")).reports
    assert str(report) in said
    code, said = step(":raises", "--batch", ":of_four_layers", "--junit", str(tmp_path / "step.xml"))
    assert code == 3, said
    assert "no such model" in said
    assert 'message="RuntimeError: no such model"' in (tmp_path / "step.xml").read_text()
    code, said = step(":silent", "--batch", ":of_four_layers", "--junit", str(tmp_path))
    assert code == 2, said
    assert "is a folder" in said
    assert step(":nowhere", "--batch", ":of_four_layers")[0] == 3
    code, said = step(":silent", "--batch", ":of_four_layers", "--layout", "spiral")
    assert code == 2, said
    assert "spiral" in said
    for odd in ("-1", "nan", "1e300"):
        code, said = step(":silent", "--batch", ":of_four_layers", "--timeout", odd)
        assert code == 2, said
        assert said.splitlines()[-1].startswith("Error: Invalid value: timeout_s is "), said


def test_a_number_of_ranks_that_no_machine_has_is_refused_at_once() -> None:
    done = CliRunner().invoke(app, words(":silent", "--batch", ":of_four_layers", "--cp-size", "100000000"))
    assert done.exit_code == 2, done.output
    assert "cp_size is 100000000; it must be an integer from 1 to 4096" in " ".join(done.output.split())


def test_what_makes_no_sense_is_named() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"cp_size": 0}, "cp_size is 0"),
        ({"dp_size": True}, "dp_size is True"),
        ({"cp_size": 100_000_000}, "cp_size is 100000000; it must be an integer from 1 to 4096"),
        ({"cp_size": 100, "dp_size": 100}, "make 10000 ranks; 4096 are the most"),
        ({"cp_comm_type": "ring"}, "cp_comm_type"),
        ({"layout": "spiral"}, "layout"),
        ({"loss": "median"}, "loss"),
        ({"device": "tpu"}, "device"),
        ({"cp_size": 3, "cp_comm_type": "a2a+p2p"}, "cp_size is 3"),
        *(({"timeout_s": odd}, "^timeout_s is .*; it must be a number of seconds") for odd in (-1, 0, NAN, INF, True)),
    )
    for odd, name in cases:
        with pytest.raises(ValueError, match=name):
            step_of(Shape(), **odd)
    with pytest.raises(TypeError, match="build is 3"):
        compare_step(cast(Any, 3), None, 2)


def nothing(cp: Any) -> Any:
    model = torch.nn.Linear(2, 2)
    return model, lambda batch: model(batch).sum()


def two_losses(cp: Any) -> Any:
    model = torch.nn.Linear(2, 2)
    return model, lambda batch: model(batch)


@pytest.mark.thorough
def test_steps_with_nothing_to_compare_are_refused() -> None:
    cases: tuple[tuple[Any, str], ...] = (
        (nothing, "no parameter has a gradient"),
        (two_losses, "must be one number"),
        (lambda cp: 3, "must return \\(model, step\\)"),
        ("json:build", "^(the one process|rank)[^:]*: 'json:build': json has no 'build'$"),
        ("json.nothing:build", "there is no module 'json.nothing' here"),
    )
    for build, said in cases:
        with pytest.raises(StepError, match=said):
            compare_step(build, torch.ones(3, 2), 2)


@pytest.mark.thorough
def test_a_function_of_the_caller_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = 1.0

    def build(cp: Any) -> Any:
        return build_of(cp, Shape(layers=1, optimizer=False), "" if scale == 1.0 else "loss times ranks")

    assert compare_step(build, batch_of(Shape()), 2).right
    scale = 2.0
    assert compare_step(build, batch_of(Shape()), 2).causes == ("factor",)


def hangs(cp: Any) -> Any:
    model, step = build_of(cp, Shape(optimizer=False))

    def waits(batch: Any) -> Any:
        if cp is not None and cp.rank == 0:
            torch.distributed.barrier()
        return step(batch)

    return model, waits


@pytest.mark.faults
def test_ranks_that_wait_for_each_other_end() -> None:
    with pytest.raises(StepError):
        compare_step(hangs, batch_of(Shape()), 2, timeout_s=30)


def test_it_needs_no_hypothesis(tmp_path: Path) -> None:
    (tmp_path / "hypothesis.py").write_text("raise ModuleNotFoundError('hypothesis', name='hypothesis')\n")
    code, said = run_module(ROOT, "conformance", "step", "--help", path=(tmp_path,))
    assert code == 0, said
    assert os.fspath(tmp_path) not in sys.path


def with_losses(cp: Any, cut_early: bool = False) -> Any:
    """A step that returns the losses of tokens: wrong ones on ranks, or too few."""
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(50, 12), "head": torch.nn.Linear(4, 50)})
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    context = cp or cp_fast.ContextParallel(torch.distributed.group.WORLD)

    def step(ids: Any) -> Any:
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        ids, labels = cp_fast.shard(ids, cp=context), cp_fast.shard(labels, cp=context)
        q, k, v = model["embed"](ids).unflatten(-1, (3, 1, 4)).unbind(-3)
        logits = model["head"](cp_fast.attention(q, k, v, cp=context).flatten(-2))
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        (losses.sum() / 30).backward()
        for weight in model.parameters():
            assert weight.grad is not None
            torch.distributed.all_reduce(weight.grad)
        torch.distributed.all_reduce(loss := losses.detach().sum())
        if cut_early:
            return loss, losses[:, :5]
        return loss, losses * (1.0 if cp is None or cp.rank == 0 else 1.5)

    return model, step


@pytest.mark.thorough
def test_losses_of_tokens_are_compared_by_document_and_position() -> None:
    ids = torch.arange(32).view(2, 16)
    report = compare_step(with_losses, ids, 2)
    assert not report.right
    [row] = [row for row in report.rows if not row.ok]
    assert row.name == "losses of tokens"
    assert report.first == "the first token with a wrong loss is document 0, position 4, on rank 1"
    with pytest.raises(StepError, match="losses of tokens have the shapes"):
        compare_step(partial(with_losses, cut_early=True), ids, 2)


@pytest.mark.thorough
def test_the_script_for_gpus_is_tried_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    out = tmp_path / "step.json"
    given = ["--device", "cpu", "--tiny", "--tokens", "64", "--out", str(out)]
    code, said = run_module(ROOT, "benchmarks.checks.step_gpu", *given)
    assert code == 0, said
    record = json.loads(out.read_text())
    assert record["right"]
    assert record["seconds"] > 0
    assert record["compared"] > 20


# ---- the table of docs/conformance/detection.md


TABLE = (ROOT / "docs" / "conformance" / "detection.md").read_text()
SHOWN_CELLS = (  # in docs/how_to/training.md, as the way "plain", or "padded", has them
    *(("plain", "a layer scaled on one rank"), ("plain", "a z-loss of each rank")),
    *(("padded", "padding in the denominator"), ("plain", "a rank skips a micro-batch")),
)


@pytest.fixture(scope="module")
def cells(steps: StepProcesses) -> Cells:
    return Cells(steps)


def in_table(mistake: str, way: str) -> str:
    [row] = [line for line in TABLE.splitlines() if line.startswith(f"| {mistake} |")]
    return row.strip("| ").split(" | ")[1 + WAYS.index(way)]


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_each_mistake_is_found_and_named_in_each_way(way: str, cells: Cells) -> None:
    """All cells of the plain way, and of the other ways every second one, as on a chessboard; `python -m
    tests.meta.step.detection` plays all.
    """
    if way == "Trainer":
        pytest.importorskip("accelerate", reason="needs transformers: pip install '.[test-integrations]'")
    for n, (mistake, cause) in enumerate(MISTAKES.items()):
        if way != "plain" and (n + WAYS.index(way)) % 2:
            continue
        said = cells.cell(way, mistake)
        assert said == in_table(mistake, way), (way, mistake)
        assert said in (f"`{cause}`", REASONS.get((mistake, way))), (way, mistake, cells.report(way, mistake))


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_the_same_step_without_a_mistake_is_right(way: str, cells: Cells) -> None:
    if way == "Trainer":
        pytest.importorskip("accelerate", reason="needs transformers: pip install '.[test-integrations]'")
    report = cells.report(way, "")
    assert report.right, report


@pytest.mark.thorough
def test_the_page_shows_what_is_said(cells: Cells) -> None:
    for way, mistake in SHOWN_CELLS:
        report = cells.report(way, mistake)
        assert report.findings[0].text in " ".join(PAGE.split()), report
