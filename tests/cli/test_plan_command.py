"""`python -m cp_fast plan`: what it prints, what it refuses, and that the text reads back."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import cp_fast
import cp_ref
import cp_ref.cli
from cp_fast.tools.cli import app
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.proof import verify
from cp_ref.schedules.words import CP_COMM_TYPES, Unsupported
from tests.marks import HANGS_S

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


def test_packed_lengths_need_not_divide() -> None:
    said = plan("--cp-size", "2", "--seqlens", "100,37,3", "--window", "20,0", "--heads-q", "4", "--heads-kv", "2")
    assert "sequence 0 of 3 (numbered from 0): 100 queries x 100 keys" in said
    assert "verified" in said


def test_layouts_and_schedules_are_compared() -> None:
    said = plan("--compare", "--cp-size", "4", "--seqlens", "96,40,32,8,1", "--heads-q", "8", "--heads-kv", "2")
    assert "5 documents, 177 tokens on 4 ranks" in said
    for layout in ("dual_chunk", "contiguous", "balanced"):
        assert said.count(layout) == 3
    said = plan("--compare", "--cp-size", "3", "--seqlens", "96", "--heads-q", "8", "--heads-kv", "2")
    assert said.count("refused: h_q is 8; cp_comm_type 'a2a' needs a multiple of the a2a size 3") == 1


def test_each_section_can_be_had_alone() -> None:
    whole = plan(*SMALL)
    parts = [plan(*SMALL, "--sections", name) for name in ("schedule", "costs", "layouts", "prediction")]
    assert "".join(parts) == whole
    assert plan(*SMALL, "--compare", "--predict") == parts[2] + parts[3]


@pytest.mark.parametrize("package", ["cp_fast", "cp_ref"])
def test_explain_is_the_walk_of_either_package(package: str) -> None:
    apps = {"cp_fast": app, "cp_ref": cp_ref.cli.app}
    words = ["--cp-size", "2", "--seqlens", "9,5", "--heads-q", "2", "--heads-kv", "1", "--rank", "1"]
    walk, explained = (
        runner.invoke(apps[package], [*name, *words]) for name in (["plan", "--sections", "walk"], ["explain"])
    )
    assert walk.output == explained.output
    assert "Ring attention: queries stay" in walk.output


def test_a_section_says_why_it_does_not_take_the_problem() -> None:
    said = plan("--cp-size", "2", "--seqlens", "8", "--areas", "prefix_lm(4, 4)")
    assert "layouts: not for this problem: --areas is 'prefix_lm(4, 4)'" in said
    assert "verified" in said


def test_text_is_the_canonical_schedule() -> None:
    said = plan("--text", "--cp-size", "3", "--seqlens", "30,9", "--layout", "contiguous")
    schedule = Schedule.parse(said)
    assert str(schedule) == said
    slots = (Sequence(30, 30, 30, 30), Sequence(9, 9, 9, 9))
    verify(Problem(cp_size=3, sequences=slots, layout="contiguous", qkv_format="thd", heads_q=32, heads_kv=8), schedule)


SMALL = ["--cp-size", "4", "--seqlens", "32,5", "--heads-q", "8", "--heads-kv", "2"]


@pytest.mark.parametrize("cp_comm_type", CP_COMM_TYPES)
@pytest.mark.one_in(3)
def test_every_schedule(cp_comm_type: str, tmp_path: Path) -> None:
    svg = tmp_path / "plan.svg"
    said = plan(*SMALL, "--cp-comm-type", cp_comm_type, "--svg", str(svg))
    assert said.startswith(f"{cp_comm_type}, cp_size 4, thd, dual_chunk, causal")
    assert "verified: every visible pair (543 a head)" in said
    assert "balance 1.000" in said or cp_comm_type != "a2a"
    assert ET.parse(svg).getroot().tag.endswith("svg")
    schedule = Schedule.parse(plan(*SMALL, "--cp-comm-type", cp_comm_type, "--text"))
    a2a_size = {"a2a": 4, "a2a+p2p": 2}.get(cp_comm_type, 1)
    slots = (Sequence(32, 32, 32, 32), Sequence(5, 5, 5, 5))
    verify(Problem(4, slots, cp_comm_type, a2a_size, qkv_format="thd", heads_q=8, heads_kv=2), schedule)


@pytest.mark.parametrize("package", [cp_fast.tools.cli.app, cp_ref.cli.app])
def test_a_schedule_may_be_chosen(package: Any) -> None:
    result = runner.invoke(package, ["plan", *SMALL, "--cp-comm-type", "auto", "--sections", "schedule,costs"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("all_gather, cp_size 4, thd, dual_chunk, causal")
    assert "'auto' took all_gather by estimates for H200s, both passes: all_gather" in result.output


@pytest.mark.thorough
def test_the_picture_shows_one_head_and_says_who_has_the_others() -> None:
    said = plan(*SMALL, "--cp-comm-type", "a2a", "--head", "5")
    assert "this is query head 5." in said
    assert "Query heads 0-1: rank 0; 2-3: rank 1; 4-5: rank 2; 6-7: rank 3." in said
    assert "│2:1 2:1 " in said
    assert "0:1" not in said
    said = plan(*SMALL, "--cp-comm-type", "a2a+p2p")
    assert "Query heads 0-3: ranks 0, 2; 4-7: ranks 1, 3. A rank has all heads of documents that stay on it." in said
    said = plan("--cp-comm-type", "a2a", "--cp-size", "8", "--seqlen", "64", "--heads-q", "8")
    assert "Query heads 0: rank 0; 1: rank 1; 2: rank 2; 3: rank 3; and so on." in said
    assert "Query heads" not in plan(*SMALL, "--cp-comm-type", "p2p")


def test_size_of_the_inner_group() -> None:
    words = ["--text", "--cp-size", "6", "--seqlens", "24", "--heads-q", "6", "--heads-kv", "6"]
    words += ["--cp-comm-type", "a2a+p2p"]
    assert plan(*words) == plan(*words, "--a2a-size", "2")
    assert " q [0:2]h2:4 " in plan(*words, "--a2a-size", "3")
    assert "send q" not in plan(*words, "--a2a-size", "1")


@pytest.mark.parametrize("error", [ValueError("two\nlines"), TypeError("two\nlines"), Unsupported("two\nlines", {})])
def test_what_the_library_raises_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: object) -> None:
        assert arguments["dtype"] is torch.bfloat16
        raise error

    monkeypatch.setattr(cp_fast, "make_plan", refuse)
    result = runner.invoke(app, ["plan"])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert "two lines" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_one_rank_only() -> None:
    said = plan("--text", "--rank", "1", "--cp-size", "2", "--seqlen", "16")
    assert [line for line in said.splitlines() if "rank" in line] == ["forward rank 1", "backward rank 1"]
    assert "kv 4 rows to 0" in plan("--rank", "1", "--cp-size", "2", "--seqlen", "8")


def test_many_ranks_show_one_unasked() -> None:
    assert "The steps of rank 0 follow; --rank R shows another's (0 to 7)." in plan("--cp-size", "8")


def test_cross_attention_and_padding_masks() -> None:
    said = plan("--cp-size", "2", "--seqlens", "9,4", "--seqlens-kv", "17,30", "--mask", "causal_bottom_right")
    assert "sequence 0 of 2 (numbered from 0): 9 queries x 17 keys;" in said
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
        (["--compare", "--seqlen", "8", "--seqlen-kv", "9"], "layouts are compared for self-attention"),
        (["--compare", "--seqlens", "8", "--areas", "causal(8)"], "--areas is 'causal(8)'; layouts are compared for"),
        (["--compare", "--svg", "plan.svg"], "--svg is plan.svg, which --sections layouts does not look at"),
        (["--predict", "--rank", "0"], "--rank is 0, which --sections prediction does not look at"),
        (["--sections", "costs", "--machine", "x"], "--machine is x, which --sections costs does not look at"),
        (["--text", "--messages", "group"], "--messages is group, which --text does not look at"),
        (["--sections", "costs,prices"], "--sections is 'prices'; it must be one of"),
        (["--seqlens", "8,8", "--seqlen", "4"], "--seqlen is 4, but --seqlens has the lengths; leave one of them out"),
        (["--seqlens", "8", "--seqlen-kv", "4"], "--seqlen-kv is 4, but thd takes --seqlens-kv"),
        (["--seqlens", "8,8", "--batch", "1"], "--batch is 1, but --seqlens says how many sequences there are"),
        (["--seqlens", "8", "--mask", "causal", "--areas", "causal(8)"], "--mask is causal, but --areas says who"),
        (["--seqlens", "100,x"], "--seqlens is '100,x'; it must be lengths of at least 0"),
        (["--seqlens", "100,-2"], "--seqlens is '100,-2'"),
        (["--seqlens", "8", "--seqlens-kv", "8,8"], "cu_seqlens_kv has 3 entries and cu_seqlens_q has 2"),
        (["--window", "3"], "--window is '3'; it must be LEFT,RIGHT"),
        (["--window", "-2,0"], "each side must be -1 (unbounded) or from 0"),
        (["--mask", "diagonal"], "attn_mask_type is 'diagonal'"),
        (["--layout", "striped"], "layout is 'striped'"),
        (["--qkv-format", "bhsd"], "qkv_format is 'bhsd'"),
        (["--heads-q", "6", "--heads-kv", "4"], "h_q is 6 and h_kv is 4"),
        (["--dtype", "int8"], "int8"),
        (["--dtype", "nonsense"], "--dtype is 'nonsense'"),
        (["--cp-comm-type", "carrier_pigeon"], "cp_comm_type is 'carrier_pigeon'"),
        (["--cp-comm-type", "a2a", "--cp-size", "4", "--heads-q", "6", "--heads-kv", "2"], "h_q is 6"),
        (["--cp-comm-type", "a2a", "--cp-size", "4", "--heads-q", "12", "--heads-kv", "3"], "h_kv is 3"),
        (["--cp-comm-type", "a2a+p2p", "--cp-size", "3"], "--a2a-size is 2 unless it is given; it must divide the"),
        (["--cp-comm-type", "a2a+p2p", "--a2a-size", "3"], "--a2a-size is 3; it must divide the number of ranks, 4"),
        (["--cp-comm-type", "a2a+p2p", "--a2a-size", "0"], "--a2a-size is 0; it must divide the number of ranks, 4"),
        (["--cp-comm-type", "a2a", "--a2a-size", "4"], "--a2a-size is 4, but --cp-comm-type is a2a"),
        (["--a2a-size", "1"], "--a2a-size is 1, but --cp-comm-type is p2p; only a2a+p2p takes it"),
        (["--cp-size", "100000000"], "--cp-size is 100000000; it must be at most 4096"),
        (["--seqlens", "64", "--areas", "block_causal(100000000, 1)"], "areas of more than 262144 rows"),
        (["--seqlens", "64", "--areas", "chunked(100000000, 1)"], "areas of more than 262144 rows"),
        (["--seqlens", "64", "--areas", "dilated_blocks(100000, 1, 1)"], "areas of more than 262144 rows"),
        (["--seqlens", "64", "--areas", f"chunked({'-' * 1000}8, 1)"], "they must be a call of block_causal"),
        (["--seqlens", "64", "--areas", "chunked(print(1), chunk=x + 1)"], "x + 1 is no number, text or list"),
        (["--seqlens", "64", "--areas", f"chunked({'-' * 9000}8, 1)"], "they must be a call of block_causal"),
        (["--head", "32"], "--head is 32; it must be 0 to 31"),
        (["--rank", "4"], "--rank is 4; it must be 0 to 3"),
        (["--svg", "p.png"], "--svg is 'p.png'; pictures are SVG, so the name must end in .svg"),
        (["--svg", "no/such/folder/plan.svg"], "no/such/folder/plan.svg"),
    ],
    ids=lambda value: " ".join(value)[:80] if isinstance(value, list) else "",
)
def test_refusals_are_one_line_and_exit_2(options: list[str], words: str) -> None:
    result = runner.invoke(app, ["plan", *options])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", [f"a = {'[' * 3000}", f"a = {'{b = ' * 3000}", f"a = {'9' * 5000}"])
def test_a_machine_that_no_reader_reads_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (machine := tmp_path / "machine.toml").write_text(text)
    result = runner.invoke(app, ["plan", "--predict", "--machine", str(machine), "--seqlens", "64", "--cp-size", "2"])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: machine {machine}: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.thorough
def test_as_a_module() -> None:
    command = [sys.executable, "-m", "cp_fast", "plan", "--cp-size", "2", "--seqlens", "12", "--text"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("schedule p2p cp_size 2")


def test_a_prediction_begins_with_the_recommendation_and_fits_80_columns() -> None:
    words = ["plan", "--predict", "--cp-size", "8", "--seqlens", "20000,10000,2000,768", "--heads-q", "30"]
    result = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(app, [*words, "--heads-kv", "6"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("take ")
    assert max(map(len, lines)) <= 80
    rows = [line.split("│") for line in lines if line.startswith("│")]
    assert len(rows) == 1 + 3 * len(CP_COMM_TYPES)  # the titles, and no cell of more than one line
    assert "refused: 30 query heads over 6 are not shared by 8 ranks" in " ".join(result.output.split())


def test_the_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output.split()[0].rstrip(",")) == (0, "cp-attention")


@pytest.mark.parametrize(
    "words", ["cp_fast --help", "cp_fast --version", "cp_fast plan --help", "cp_ref --help", "cp_fast", "cp_ref"]
)
@pytest.mark.one_in(2)
def test_help_needs_no_pytorch(words: str) -> None:
    """Which alone takes longer to import than a reader waits."""
    package, *options = words.split()
    code = f"import sys, runpy; sys.modules['torch'] = None; runpy.run_module({package!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if options else 2), done.stderr
    commands = {"cp_fast": ("demo", "doctor", "plan", "build"), "cp_ref": ("plan", "explain", "record", "compare")}[
        package
    ]
    assert options not in ([], ["--help"]) or all(f" {name} " in done.stdout + done.stderr for name in commands)


@pytest.mark.parametrize("package", [cp_fast, cp_ref], ids=["cp_fast", "cp_ref"])
def test_a_plan_prints_a_summary(package: Any) -> None:
    def one(member: object) -> str:
        sizes = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
        cu = torch.tensor([0, 5, 13])
        return str(package.make_plan(cp=package.ContextParallel(member), qkv_format="thd", cu_seqlens_q=cu, **sizes))

    said = cp_fast.SimGroup(2).run(one)[1]
    assert said.startswith("plan of rank 1, on cpu: p2p, cp_size 2, dual_chunk\n")
    assert "13 tokens in sequences of 5, 8\n" in said
    lines = said.splitlines()
    assert lines[5:] == (["  bits of one launch over the whole batch: none"] if package is cp_fast else [])
    assert len(lines[:5]) == 5
