"""`python -m cp_fast demo`: for real over two processes; what is wrong is seen, named and ends everything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cp_fast.tools.cli import app
from cp_fast.tools.cli import demo as module
from cp_fast.tools.cli.demo import Job, Measured, spawn
from tests.dist.workers import run_program
from tests.marks import HANGS_S

runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"})
SMALL = ["--tokens", "700", "--longest", "200", "--ranks", "2", "--device", "cpu"]


def demo(*options: str) -> str:
    """What the command prints, run in this process; its ranks are processes."""
    result = runner.invoke(app, ["demo", *options])
    assert result.exit_code == 0, result.output
    return result.output


def demo_process(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cp_fast", "demo", *options]
    env = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False, env=env)


@pytest.mark.thorough
def test_end_to_end(tmp_path: Path) -> None:
    svg = tmp_path / "demo.svg"
    done = demo_process(*SMALL, "--svg", str(svg))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "700 bytes" in done.stdout
    assert "2 processes over gloo on the CPU" in done.stdout
    assert "p2p, cp_size 2, thd, dual_chunk, padding_causal" in done.stdout
    for result in ("out", "lse", "dq", "dk", "dv", "token ids", "RoPE positions", "padding is 0", "free of NaN"):
        assert [line for line in done.stdout.splitlines() if f"│ {result} " in line and "ok" in line], result
    assert "All results are right." in done.stdout
    assert ET.parse(svg).getroot().tag.endswith("svg")


def test_heads_are_spread_over_the_ranks() -> None:
    said = demo(*SMALL, "--cp-comm-type", "a2a", "--head", "2")
    assert "this is query head 2." in said
    assert "│1:1 1:1 " in said  # rank 1 has that head and computes all of the document's pairs
    assert "0:1" not in said
    assert "Query heads 0-1: rank 0; 2-3: rank 1. A rank has all heads of documents that stay on it." in said
    documents = int(said.split(" documents (")[0].split()[-1])
    rows = [line.split() for line in said.splitlines() if line.startswith("│    ")]
    assert [row[5] for row in rows if len(row) > 5][:2] == [str(documents)] * 2  # one tile for each, of half the heads
    assert said.count(" 50.0% ") == 2
    assert "All results are right." in said


@pytest.fixture(scope="module")
def results() -> list[Measured]:
    """Filled by the first run, so that the ranks run once for all the tests that only look at their results."""
    return []


@pytest.mark.parametrize("what", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.one_in(3)
def test_a_wrong_value_fails(what: str, monkeypatch: pytest.MonkeyPatch, results: list[Measured]) -> None:
    def run_once(job: Job) -> Measured:
        if not results:
            results.append(spawn(job))
        return results[0]

    monkeypatch.setattr(module, "spawn", run_once)
    result = runner.invoke(app, ["demo", *SMALL, "--spoil", what])
    assert result.exit_code == 1, result.output
    failed = [line for line in result.output.splitlines() if "FAILED" in line]
    assert len(failed) == 1
    assert f" {what} " in failed[0]
    assert "a check failed" in result.stderr


def test_own_text_and_other_options(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A short document of mine.\n" * 5)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.md").write_text("Another. " * 20)
    (tmp_path / "folder" / "c.bin").write_bytes(b"\0\1\2")
    texts = ["--text", str(tmp_path / "a.txt"), "--text", str(tmp_path / "folder")]
    options = [
        "--layout",
        "contiguous",
        "--mask",
        "padding",
        "--window",
        "20,3",
        "--dtype",
        "float64",
        "--heads-kv",
        "4",
    ]
    said = demo(*SMALL, *texts, *options)
    assert "310 bytes of 2 documents (a.txt, b.md)" in said
    assert "p2p, cp_size 2, thd, contiguous, padding, window (20, 3)" in said


def test_a_failing_rank_is_named_and_ends_all() -> None:
    result = runner.invoke(app, ["demo", *SMALL, "--spoil", "rank 1"])
    assert result.exit_code == 1
    assert "error: rank 1 failed: RuntimeError: this rank was told to fail" in result.stderr
    assert "All results are right." not in result.output


@pytest.mark.thorough
def test_a_cache_that_cannot_be_written_is_one_line() -> None:
    result = demo_process(*SMALL, CP_ATTENTION_CACHE="/dev/null", CP_FAST_KERNELS="native")
    assert result.returncode == 1
    assert re.match(
        r"error: rank \d failed: Unavailable: the cache of native kernels, /dev/null, cannot", result.stderr
    )
    assert "set CP_ATTENTION_CACHE to a folder that can be" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_rank_that_dies_is_named_and_ends_all() -> None:
    result = runner.invoke(app, ["demo", *SMALL, "--spoil", "death of rank 1"])
    assert result.exit_code == 1
    assert result.stderr == "error: rank 1 died with exit code 7\n"


def test_balanced_layout() -> None:
    said = demo(*SMALL, "--layout", "balanced")
    assert "2 ranks, p2p, balanced" in said
    assert "All results are right." in said


@pytest.mark.thorough
def test_two_dimensions_of_ranks() -> None:
    said = demo(*SMALL[:4], "--device", "cpu", "--ranks", "4", "--cp-comm-type", "a2a+p2p")
    assert said.count("All results are right.") == 1
    assert "4 ranks, a2a+p2p (a2a in groups of 2), dual_chunk" in said


def test_what_the_ranks_refuse_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    result = runner.invoke(app, ["demo", *SMALL, "--backend", "fa4"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: rank ")
    assert "attention with backend 'fa4' is not supported: fa4 lacks device cpu, float32" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert capfd.readouterr().err == ""  # of the ranks


@pytest.mark.thorough
def test_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from cp_fast.tools.cli import app\n\napp()\n")
    said = run_program(program, 2, "demo", *SMALL[:4], "--device", "cpu")
    assert said.count("All results are right.") == 1
    assert "2 processes started by torchrun over gloo on the CPU" in " ".join(said.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "no-such-file"], "--text no-such-file: there is no such file or folder"),
        (["--heads", "3"], "--heads 3 must be a multiple of --heads-kv 2"),
        (["--mask", "diagonal"], "--mask is 'diagonal'"),
        (["--dtype", "int8"], "--dtype is 'int8'"),
        (["--backend", "carrier_pigeon"], "--backend is 'carrier_pigeon'"),
        (["--device", "cuda", "--ranks", "4096"], "4096 ranks"),
        (["--ranks", "100000000"], "--ranks is 100000000; it must be at most 4096"),
        (["--window", "wide"], "--window is 'wide'"),
        (["--window", "-2,0"], "each side must be -1 (unbounded) or from 0"),
        (["--cp-comm-type", "carrier_pigeon"], "cp_comm_type is 'carrier_pigeon'"),
        (["--cp-comm-type", "a2a", "--ranks", "3"], "h_q is 4; cp_comm_type 'a2a' needs a multiple of the a2a size 3"),
        (["--cp-comm-type", "a2a+p2p", "--ranks", "3"], "--a2a-size is 2 unless it is given; it must divide"),
        (["--cp-comm-type", "a2a+p2p", "--a2a-size", "3"], "--a2a-size is 3; it must divide the number of ranks, 4"),
        (["--cp-comm-type", "all_gather", "--a2a-size", "2"], "--a2a-size is 2, but --cp-comm-type is all_gather"),
        (["--head", "4"], "--head is 4; it must be 0 to 3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_one_line_and_exit_2(options: list[str], words: str) -> None:
    result = runner.invoke(app, ["demo", *options])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_ranks_must_be_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = runner.invoke(app, ["demo", "--ranks", "3"])
    assert result.exit_code == 2
    assert "--ranks is 3, but torchrun has started 2" in result.stderr
