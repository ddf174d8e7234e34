"""`python -m cp_fast build`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cp_fast import build
from cp_fast.build import cache
from cp_fast.cli import app
from tests.cp_fast.build.small import use_small
from tests.marks import needs_cxx

runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1"})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    build.why_not.cache_clear()
    return tmp_path / "cache"


@needs_cxx
def test_it_builds_ahead(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small(tmp_path, monkeypatch)
    before = runner.invoke(app, ["build", "--device", "cpu", "--check"])
    assert before.exit_code == 1
    assert before.output.strip() == "cpu: not built"
    first = runner.invoke(app, ["build", "--device", "cpu"])
    assert first.exit_code == 0, first.output
    assert first.output.startswith("cpu: built in ")
    assert str(own_cache) in first.output
    again = runner.invoke(app, ["build", "--device", "cpu"])
    assert again.output.startswith("cpu: there already, ")
    after = runner.invoke(app, ["build", "--device", "cpu", "--check"])
    assert after.exit_code == 0
    assert after.output.startswith("cpu: built, ")


def test_what_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for arguments in (["build", "--device", "cpu"], ["build", "--device", "all", "--archs", "90"]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 1
        assert "cpu: failed: CXX is 'no-such-compiler'; it must name a C++ compiler" in result.output
    monkeypatch.setattr(build, "why_not", lambda device: f"no compiler for {device}")
    result = runner.invoke(app, ["build"])
    assert result.exit_code == 1
    assert result.output.strip() == "nothing can be built here: no compiler for cpu; no compiler for cuda"


def test_architectures_that_cannot_be_read() -> None:
    result = runner.invoke(app, ["build", "--archs", "ninety"])
    assert result.exit_code == 2
    assert "--archs is 'ninety'; it must be 'all' or architectures such as '90' or '80,90'" in result.output
