"""`python -m cp_fast build`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cp_fast.build import builder as build
from cp_fast.build import cache
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.tools.cli import app
from cp_fast.tools.cli import build as command
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


def test_attention_kernels_need_a_gpu_and_say_so() -> None:
    result = runner.invoke(app, ["build", "--shapes", "32,8,128,128"])
    assert result.exit_code == 1
    assert result.output.strip() == "FlashAttention 4: nothing is compiled: PyTorch sees no CUDA device"


def test_one_tiny_launch_of_each_class_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the CPU's kernels in its place: they take what is launched, forward and backward."""
    monkeypatch.setattr(command, "by_name", lambda name: by_name({"fa4": "cpu"}[name]))
    monkeypatch.setattr(command, "_DEVICE", "cpu")
    words = ["build", "--shapes", "8,2,16,16", "--shapes", "4,4,24,8", "--cp-size", "2"]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    lines = [line.partition(": ")[0] for line in result.output.splitlines()]
    assert lines[:4] == [
        "bfloat16 16/16, 8 query heads over 2, window *:*",
        "bfloat16 16/16, 8 query heads over 2, window *:0",
        "bfloat16 24/8, 4 query heads over 4, window *:*",
        "bfloat16 24/8, 4 query heads over 4, window *:0",
    ]
    assert lines[4].startswith("kept ")
    windowed = runner.invoke(app, [*words[:3], "--window", "4096,0"]).output
    assert "window 0:*" in windowed
    assert "window 256:0" in windowed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shapes", "32,8,128"], "--shapes is '32,8,128'; it must be H_Q,H_KV,D_QK,D_V"),
        (["--shapes", "32,5,128,128"], "h_q is 32 and h_kv is 5"),
        (["--shapes", "32,8,128,128", "--window", "3"], "--window is '3'"),
        (["--shapes", "32,8,128,128", "--check"], "--device, --archs and --check do not go with it"),
        (["--shapes", "32,8,128,128", "--cp-size", "100000000"], "--cp-size is 100000000; it must be at most 4096"),
        (["--window", "3,0"], "--window is '3,0', but --shapes is not given"),
    ],
)
def test_what_is_wrong_with_shapes_is_one_line(options: list[str], words: str) -> None:
    result = runner.invoke(app, ["build", *options])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
