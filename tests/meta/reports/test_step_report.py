"""What is printed and written of a step: a table that is never cut, parameters that are counted once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from conformance.checks.budgets import Row
from conformance.report import read_record, write_report
from conformance.report.__main__ import app
from conformance.step import CAUSES, Finding, StepReport
from conformance.step.report import ModuleRow, StepRecord

LONG = "model.layers.10.self_attention.linear_projection.weight"


def _row(name: str, ok: bool = True, note: str = "") -> Row:
    return Row(name, 5.1234e-123, 2e-100, 1e-9, 2e-9, ok, note)


def step_report(wrong: bool = True) -> StepReport:
    """Two parameters on four ranks: one of them is wrong on ranks 1 and 3, and after two steps on all."""
    first, second = (f"gradient of {name}" for name in (LONG, "embed.weight"))
    rows = [_row("loss"), _row("gradient norm"), _row(first), _row(f"{first}, rank 2"), _row(second)]
    rows += [_row(f"{first}, rank {rank}", not wrong, "shape [3], in one process [4]" * wrong) for rank in (1, 3)]
    rows += [_row(f"after two steps: {LONG}", not wrong), _row(f"after two steps: {LONG}, rank 2", not wrong)]
    rows += [_row("after two steps: embed.weight"), _row("buffer mean"), _row("buffer mean, rank 2")]
    if not wrong:
        return StepReport("4 ranks, p2p, dual_chunk, float32", tuple(rows), ranks=4)
    modules = (
        ModuleRow("embed", "Embedding", 0, True),
        ModuleRow(
            "<b>norm</b>", "LayerNorm", 0, False, "7 of 9 tokens differ, first at document 0, position 3, on rank 1"
        ),
        ModuleRow("", "GPT", 0, None, "its rows could not be matched with tokens"),
    )
    found = (Finding("labels", "3 labels are wrong, all where a slice or document ends"),)
    where = "the label of document 0, position 3"
    return StepReport("4 ranks, p2p, dual_chunk, float32", tuple(rows), found, where, 4, modules, ("a note",))


@pytest.mark.parametrize("columns", [20, 60, 120, 300])
def test_numbers_and_verdicts_are_never_cut(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(step_report()).splitlines()
    table = [line for line in lines if "e-09" in line]
    assert len(table) == 5
    for line in table:
        assert "5.1e-123  2.0e-100  1.0e-09  2.0e-09" in line
    assert sum("WRONG" in line for line in table) == 2
    assert "WRONG: shape [3], in one process [4]" in str(step_report())
    names = [line for line in table if line.startswith("  model")]
    assert all(LONG in line for line in names) == (columns == 300)
    assert all("..." in line and ".weight " in line for line in names) == (columns != 300)
    if columns == 120:
        assert max(map(len, table)) == 120


def test_parameters_are_counted_with_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    report = step_report()
    assert report.counts == (
        "1 of 2 gradients agree, 1 differ on ranks 1, 3; "
        "1 of 2 parameters after two steps agree, 1 differ on all ranks; 1 of 1 buffers agree"
    )
    assert [value.wrong for value in report.values] == [(), (), (1, 3), (), (0, 1, 2, 3), (), ()]
    assert not report.right
    right = step_report(wrong=False)
    assert right.right
    assert right.counts == "2 of 2 gradients agree; 2 of 2 parameters after two steps agree; 1 of 1 buffers agree"
    assert right.diagnosis == ()


def test_the_diagnosis_is_behind_the_table() -> None:
    report = step_report()
    lines = str(report).splitlines()
    assert lines[-3].startswith("3 labels are wrong")
    assert CAUSES["labels"] in lines[-2]
    assert lines[-1] == "first difference: the label of document 0, position 3"


def test_the_page_begins_with_the_diagnosis_and_goes_module_by_module(tmp_path: Path) -> None:
    record = StepRecord({"command": "python -m conformance step a:b", "device": "cpu"}, (step_report(),))
    files = write_report(record, tmp_path)
    page = files[1].read_text(encoding="utf-8")
    body = page[page.index("<body>") :]
    first = [
        body.index(text) for text in ("3 labels are wrong", "a:b", "in the order of", "What differs", "What agrees")
    ]
    assert first == sorted(first)
    modules = [
        body.index(text) for text in ("<td>embed</td>", "&lt;b&gt;norm&lt;/b&gt;", "7 of 9 tokens", "<td>the model")
    ]
    assert modules == sorted(modules)
    assert "1 of 3 outputs agree, 1 differ, 1 could not be compared" in body
    assert "<p>a note</p>" in body
    assert "<b>norm" not in page
    assert "default-src 'none'" in page
    assert not any(word in page for word in ("<script", "<link", "src=", "http:", "https:"))
    assert read_record(files[0]) == record
    done = CliRunner().invoke(app, [str(files[0]), "-o", str(tmp_path / "again")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "again" / "report.html").read_text(encoding="utf-8") == page


def test_steps_that_are_right_or_could_not_run_are_pages_too(tmp_path: Path) -> None:
    right = StepRecord({}, (step_report(wrong=False),))
    assert "The training step is right" in write_report(right, tmp_path)[1].read_text(encoding="utf-8")
    failed = StepRecord({}, (), "rank 1 raised:\nRuntimeError: <no> model")
    page = write_report(failed, tmp_path)[1].read_text(encoding="utf-8")
    assert "was not compared" in page
    assert "RuntimeError: &lt;no&gt; model" in page


def test_numbers_that_json_has_not_survive(tmp_path: Path) -> None:
    report = step_report()
    odd = replace(report.rows[0], max_error=float("inf"), max_bound=0.0, ok=False, note="only the ranks has it")
    record = StepRecord({}, (replace(report, rows=(odd, *report.rows[1:])),))
    file, page = write_report(record, tmp_path)
    assert read_record(file) == record
    assert "<td>inf</td>" in page.read_text(encoding="utf-8")


def test_junit_of_steps(tmp_path: Path) -> None:
    right = replace(step_report(wrong=False), title="2 ranks, a2a, dual_chunk, float32")
    record = StepRecord({}, (step_report(), right), "rank 1 raised:\n\x1b[31mRuntimeError: no model")
    [file] = write_report(record, None, tmp_path / "deep" / "steps.xml")
    root = ElementTree.parse(file).getroot()
    assert root.attrib | {"time": ""} == {"tests": "17", "failures": "3", "errors": "1", "skipped": "0", "time": ""}
    wrong, fine, error = root
    assert [wrong.get("name"), fine.get("failures"), error.get("errors")] == [
        "step over 4 ranks, p2p, dual_chunk, float32",
        "0",
        "1",
    ]
    failures = {case.get("name"): case[0].get("message") for case in wrong if len(case)}
    assert list(failures) == ["the step", f"gradient of {LONG}", f"after two steps: {LONG}"]
    assert failures["the step"] == "3 labels are wrong, all where a slice or document ends"
    assert "ranks: 1, 3; shape [3], in one process [4]" in str(failures[f"gradient of {LONG}"])
    assert error[0][0].get("message") == "?[31mRuntimeError: no model"
