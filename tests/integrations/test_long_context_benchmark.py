"""`benchmarks/long_context.py` at a small size: rows of libraries, and errors as rows."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import long_context
from tests.marks import HANGS_S

pytestmark = pytest.mark.thorough


def test_a_length_that_fails_is_a_row_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's context parallel does not run on a CPU; a second start measures what is not there yet."""
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    out = tmp_path / "rows.json"
    given = ["long_context.py", "--out", str(out), "--tiny", "--lengths", "64,128", "--layers", "1", "--libraries"]
    monkeypatch.setattr(sys, "argv", [*given, "cp_fast"])
    long_context.main()
    ours = json.loads(out.read_text())["rows"]
    assert [(row["library"], row["tokens"], "error" in row) for row in ours] == [
        ("cp_fast", 64, False),
        ("cp_fast", 128, False),
    ]
    assert all(row["tokens_per_s"] > 0 and len(row["losses"]) == 2 for row in ours)
    [failed] = long_context.run_group("pytorch", [64], 1, 1, Namespace(gpus=1, tiny=True), HANGS_S)
    assert "Error" in failed["error"]

    def run_group(library: str, lengths: list[int], *_: object) -> list[long_context.Row]:
        assert library == "pytorch"
        return [failed | {"tokens": lengths[0]}]

    monkeypatch.setattr(long_context, "run_group", run_group)
    monkeypatch.setattr(sys, "argv", [*given, "cp_fast,pytorch"])
    long_context.main()
    rows = json.loads(out.read_text())["rows"]
    assert rows == [*ours, failed, failed | {"tokens": 128}]


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
