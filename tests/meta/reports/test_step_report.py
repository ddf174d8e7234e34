"""What is printed and written of a step: a table that is never cut, parameters that are counted once."""

from __future__ import annotations

import pytest

from conformance.judge.budgets import Row
from conformance.step import CAUSES, Finding, StepReport
from conformance.step.report import ModuleRow

LONG = "model.layers.10.self_attention.linear_projection.weight"


def _row(name: str, ok: bool = True, note: str = "") -> Row:
    return Row(name, 5.1234e-123, 2e-100, 1e-9, 2e-9, ok, note)


def step_report(wrong: bool = True) -> StepReport:
    """Two parameters on four ranks: one of them is wrong on ranks 1 and 3, and after two steps on all."""
    first, second = (f"gradient of {name}" for name in (LONG, "embed.weight"))
    rows = [_row("loss"), _row("gradient norm"), _row(first), _row(f"{first}, rank 2"), _row(second)]
    rows += [_row(f"{first}, rank {rank}", not wrong, "shape [3], in one process [4]" * wrong) for rank in (1, 3)]
    rows += [_row(f"after two steps: {LONG}", not wrong), _row(f"after two steps: {LONG}, rank 2", not wrong)]
    rows += [_row("after two steps: embed.weight")]
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
    return StepReport("4 ranks, p2p, dual_chunk, float32", tuple(rows), found, where, 4, modules)


@pytest.mark.parametrize("columns", [20, 60, 120, 300])
def test_numbers_and_verdicts_are_never_cut(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(step_report()).splitlines()
    table = [line for line in lines if "e-09" in line]
    assert len(table) == 4
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
        "1 of 2 gradients agree, 1 differ on ranks 1, 3; 1 of 2 parameters after two steps agree, 1 differ on all ranks"
    )
    assert [value.wrong for value in report.values] == [(), (), (1, 3), (), (0, 1, 2, 3), ()]
    assert not report.right
    right = step_report(wrong=False)
    assert right.right
    assert right.counts == "2 of 2 gradients agree; 2 of 2 parameters after two steps agree"
    assert right.diagnosis == ()


def test_the_diagnosis_is_behind_the_table() -> None:
    report = step_report()
    lines = str(report).splitlines()
    assert lines[-3].startswith("3 labels are wrong")
    assert CAUSES["labels"] in lines[-2]
    assert lines[-1] == "first difference: the label of document 0, position 3"
