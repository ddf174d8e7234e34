"""`python -m cp_fast plan`: what it prints, what it refuses, and that the text reads back."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cp_fast.cli import app
from cp_ref.spec import Schedule, verify
from cp_ref.spec.problem import Problem, Sequence

runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"})


def plan(*options: str) -> str:
    result = runner.invoke(app, ["plan", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_default_problem_is_verified_and_balanced() -> None:
    said = plan()
    assert "p2p, cp_size 4, bshd, dual_chunk, causal" in said
    assert "8192 queries x 8192 keys" in said
    assert "balance 1.000" in said
    assert "verified: every visible pair (33,558,528 a head)" in said
    for heading in ("forward, step by step", "backward, step by step", "cost of each rank"):
        assert heading in said


def test_packed_lengths_are_padded_and_it_says_so() -> None:
    said = plan("--cp-size", "2", "--seqlens", "100,37,3", "--window", "20,0", "--heads-q", "4", "--heads-kv", "2")
    assert "Padded: 4 slots of padding, so that every length is a multiple of 4." in said
    assert "sequence 0 of 3 (numbered from 0): 100 queries x 100 keys" in said
    assert "kv 31 rows to 1" in said


def test_text_is_the_canonical_schedule() -> None:
    said = plan("--text", "--cp-size", "3", "--seqlens", "30,9", "--layout", "contiguous")
    schedule = Schedule.parse(said)
    assert str(schedule) == said
    slots = (Sequence(30, 30, 30, 30), Sequence(9, 9, 9, 9))
    verify(Problem(cp_size=3, sequences=slots, layout="contiguous", qkv_format="thd", heads_q=32, heads_kv=8), schedule)


def test_one_rank_only() -> None:
    said = plan("--text", "--rank", "1", "--cp-size", "2", "--seqlen", "16")
    assert [line for line in said.splitlines() if "rank" in line] == ["forward rank 1", "backward rank 1"]
    assert "kv 4 rows to 0" in plan("--rank", "1", "--cp-size", "2", "--seqlen", "8")


def test_many_ranks_show_one_unasked() -> None:
    assert "The steps of rank 0 follow; --rank R shows another's (0 to 7)." in plan("--cp-size", "8")


def test_cross_attention_and_padding_masks() -> None:
    said = plan("--cp-size", "2", "--seqlens", "9,4", "--seqlens-kv", "17,30", "--mask", "causal_bottom_right")
    assert "sequence 0 of 2 (numbered from 0): 9 queries x 17 keys in 12 x 20 slots" in said
    said = plan("--qkv-format", "sbhd", "--seqlens", "9,4", "--seqlen", "16", "--mask", "padding", "--cp-size", "2")
    assert "sequence 0 of 2 (numbered from 0): 9 queries x 9 keys in 16 x 16 slots" in said
    assert "thd, dual_chunk" in plan("--qkv-format", "thd", "--seqlen", "40", "--batch", "2")


def test_svg(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    assert f"picture written to {file}" in plan("--svg", str(file), "--seqlens", "300,20")
    assert ET.parse(file).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seqlen", "100", "--cp-size", "3"], "sequence 0 has length 100"),
        (["--seqlens", "100,x"], "--seqlens is '100,x'; it must be lengths of at least 0"),
        (["--seqlens", "100,-2"], "--seqlens is '100,-2'"),
        (["--seqlens", "8", "--seqlens-kv", "8,8"], "cu_seqlens_kv has 3 entries and cu_seqlens_q has 2"),
        (["--window", "3"], "--window is '3'; it must be LEFT,RIGHT"),
        (["--window", "-2,0"], "each side must be -1 (unbounded) or at least 0"),
        (["--mask", "diagonal"], "attn_mask_type is 'diagonal'"),
        (["--layout", "zigzag"], "layout is 'zigzag'"),
        (["--qkv-format", "bhsd"], "qkv_format is 'bhsd'"),
        (["--heads-q", "6", "--heads-kv", "4"], "h_q is 6 and h_kv is 4"),
        (["--dtype", "int8"], "int8"),
        (["--dtype", "nonsense"], "--dtype is 'nonsense'"),
        (["--cp-comm-type", "carrier_pigeon"], "cp_comm_type is 'carrier_pigeon'"),
        (["--cp-comm-type", "all_gather"], "all_gather"),
        (["--rank", "4"], "--rank is 4; it must be 0 to 3"),
        (["--svg", "no/such/folder/plan.svg"], "no/such/folder/plan.svg"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_one_line_and_exit_2(options: list[str], words: str) -> None:
    result = runner.invoke(app, ["plan", *options])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "cp_fast", "plan", "--cp-size", "2", "--seqlens", "12", "--text"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("schedule p2p cp_size 2")
