"""`benchmarks/long_context.py` at a small size: rows of libraries, and errors as rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import long_context

pytestmark = pytest.mark.thorough


def test_a_length_that_fails_is_a_row_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's context parallel does not run on a CPU; a second start measures nothing again."""
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    out = tmp_path / "rows.json"
    given = ["--out", str(out), "--tiny", "--lengths", "64,128", "--layers", "1", "--libraries", "cp_fast,pytorch"]
    monkeypatch.setattr(sys, "argv", ["long_context.py", *given])
    long_context.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["library"], row["tokens"], "error" in row) for row in rows] == [
        ("cp_fast", 64, False),
        ("cp_fast", 128, False),
        ("pytorch", 64, True),
        ("pytorch", 128, True),
    ]
    assert all(row["tokens_per_s"] > 0 and len(row["losses"]) == 2 for row in rows[:2])
    assert "Error" in rows[2]["error"]
    monkeypatch.setattr(long_context, "run_group", lambda *_: pytest.fail("measured again"))
    long_context.main()
    assert json.loads(out.read_text())["rows"] == rows


def test_the_longest_is_where_the_line_meets_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with 10 GiB and 1 MiB a token on a GPU of 138 GiB, 2 GiB of which PyTorch does not allocate."""

    def run_group(library: str, lengths: list[int], *_: object) -> list[long_context.Row]:
        rows: list[long_context.Row] = []
        for tokens in lengths:
            row: long_context.Row = {"library": library, "tokens": tokens, "layers": 36, "seconds": [1e-9 * tokens**2]}
            peak = 10 + tokens / 1024
            row |= {"peak_gib": peak, "reserved_gib": peak + 1, "used_gib": peak + 3, "total_gib": 138}
            rows.append(row if peak < 136 else {"library": library, "tokens": tokens, "error": "OutOfMemoryError: x"})
        return rows

    monkeypatch.setattr(long_context, "run_group", run_group)
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["long_context.py", "--out", str(out), "--longest", "--libraries", "a,b"])
    long_context.main()
    for said in json.loads(out.read_text())["longest"]:
        assert said["predicted"] == 126 * 1024
        assert "error" not in said["below"]
        assert "OutOfMemoryError" in said["above"]["error"]
