"""`python -m cp_ref explain`: the walk-through of a tiny case as it is printed, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cp_ref.cli import app
from cp_ref.cli.plan import Request
from cp_ref.cli.record import tensors_of
from tests.marks import HANGS_S

runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})

WALK = """\
The problem ────────────────────────────────────────────────────────────────────
1 sequence of 4 tokens (bshd), 2 query heads over 1 key/value heads, causal, 2
ranks.

Every token's query, key and value live on one rank, its owner; but a query has
to meet keys of other ranks too. The schedule says who sends what to whom, and
who computes which part of the score matrix (queries x keys) when.

Who owns what: dual_chunk ──────────────────────────────────────────────────────
q    row of the global buffer   0 1 2 3
     rank                       0 1 1 0
     row of the rank's buffer   0 0 1 1
kv   row of the global buffer   0 1 2 3
     rank                       0 1 1 0
     row of the rank's buffer   0 0 1 1

The schedule: p2p ──────────────────────────────────────────────────────────────
Ring attention: queries stay, keys and values travel round a ring of ranks. Each
rank merges its partial outputs by their log-sum-exp (LSE).

p2p, cp_size 2, bshd, dual_chunk, causal
4 queries x 4 keys; a cell is one query x one key

        key   0   1   2   3
      owner   0   1   1   0
query       ┌────────────────
    0     0 │0:0  .   .   .
    1     1 │1:1 1:0  .   .
    2     1 │1:1 1:0 1:0  .
    3     0 │0:0 0:1 0:1 0:0

R:S  computed by rank R at its step S, both from 0
.    computed by nobody (masked, or padding)

The lines below are those of print(plan.schedule); rows are rows of the global
buffer. send kv [0:2] to 1: rows 0 and 1 of keys and values go to rank 1. tile 0
q[2:4] k[0:2]: query rows 2 and 3 against key rows 0 and 1 of area 0; h0:2 are
heads 0 and 1. The messages of a step travel while its tiles are computed. out
are partial outputs with their LSE, do is the output's gradient, dq and dkv are
gradients.

Forward, step 0 (2 in all) ─────────────────────────────────────────────────────
        key   0   1   2   3
      owner   0   1   1   0
query       ┌────────────────
    0     0 │0:0  .   .   .
    1     1 │ .  1:0  .   .
    2     1 │ .  1:0 1:0  .
    3     0 │0:0  .   .  0:0
R:S computed now by rank R, + computed before, . not yet or never (masked)

rank 0
    send kv [0:1] to 1 tag 0
    recv kv [1:3] from 1 tag 0
    tile 0 q[0:1] k[0:1]
    tile 0 q[3:4] k[0:1]
    tile 0 q[3:4] k[3:4]
rank 1
    send kv [1:3] to 0 tag 0
    recv kv [0:1] from 0 tag 0
    tile 0 q[1:2] k[1:2]
    tile 0 q[2:3] k[1:2]
    tile 0 q[2:3] k[2:3]

Forward, step 1 (2 in all) ─────────────────────────────────────────────────────
        key   0   1   2   3
      owner   0   1   1   0
query       ┌────────────────
    0     0 │ +   .   .   .
    1     1 │1:1  +   .   .
    2     1 │1:1  +   +   .
    3     0 │ +  0:1 0:1  +
R:S computed now by rank R, + computed before, . not yet or never (masked)

rank 0
    tile 0 q[3:4] k[1:2]
    tile 0 q[3:4] k[2:3]
rank 1
    tile 0 q[1:2] k[0:1]
    tile 0 q[2:3] k[0:1]

The way back ───────────────────────────────────────────────────────────────────
The backward pass computes the same tiles again, with the gradient of the output
(do) and the final LSE. Gradients of keys and values arise wherever a tile was,
and travel to their owner.

Backward, step 0 (3 in all) ────────────────────────────────────────────────────
rank 0
    send kv [0:1] to 1 tag 0
    recv kv [1:3] from 1 tag 0
    tile 0 q[0:1] k[0:1]
    tile 0 q[3:4] k[0:1]
    tile 0 q[3:4] k[3:4]
rank 1
    send kv [1:3] to 0 tag 0
    recv kv [0:1] from 0 tag 0
    tile 0 q[1:2] k[1:2]
    tile 0 q[2:3] k[1:2]
    tile 0 q[2:3] k[2:3]

Backward, step 1 (3 in all) ────────────────────────────────────────────────────
rank 0
    tile 0 q[3:4] k[1:2]
    tile 0 q[3:4] k[2:3]
rank 1
    tile 0 q[1:2] k[0:1]
    tile 0 q[2:3] k[0:1]

Backward, step 2 (3 in all) ────────────────────────────────────────────────────
rank 0
    send dkv [1:3] to 1 tag 17
    recv dkv [0:1] from 1 tag 17
rank 1
    send dkv [0:1] to 0 tag 17
    recv dkv [1:3] from 0 tag 17

The sum ────────────────────────────────────────────────────────────────────────
Verified: each of the 10 visible pairs of a head is computed exactly once in
each pass, every row is there when it is used, and every result ends at its
owner. Balance (mean rank's work over the busiest's) 1.000; 1,152 bytes are
sent.
"""


def explain(*options: str) -> str:
    """What it prints, without the spaces at the ends of lines."""
    result = runner.invoke(app, ["explain", *options])
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.output.rstrip().splitlines()) + "\n"


def test_a_tiny_case() -> None:
    assert explain("--cp-size", "2", "--seqlen", "4", "--dtype", "float64") == WALK


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_every_schedule_is_shown_and_verified(comm: str) -> None:
    said = explain("--cp-comm-type", comm)
    assert "The schedule: " + comm in said
    assert "Verified: each of the 136 visible pairs" in said


def test_heads_and_padding_are_named() -> None:
    said = explain("--cp-comm-type", "a2a+p2p", "--seqlens", "7,4", "--mask", "padding_causal")
    assert "    send q [1:2]h0:2 [6:7]h0:2 [9:10]h0:2 to 0 tag 1\n" in said
    assert "10 slots of padding were added" in said


def test_the_steps_are_lines_of_the_schedule() -> None:
    lines = str(Request("a2a", 2).plan.schedule).splitlines()
    shown = [line.strip() for line in explain("--cp-comm-type", "a2a", "--cp-size", "2").splitlines()]
    said = [line for line in shown if re.match(r"(send|recv|tile) .*[\d\]]$", line)]
    assert sorted(said) == sorted(line.strip() for line in lines if line.startswith("    "))


def test_one_rank_of_many() -> None:
    said = explain("--cp-size", "16")
    assert "The steps of rank 0 follow; --rank shows another's." in said
    assert "rank 3\n    send kv [6:8]" in explain("--cp-size", "16", "--rank", "3")


def test_svg(tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    assert f"picture written to {file}" in explain("--svg", str(file)).replace("\n", "")
    assert ET.parse(file).getroot().tag.endswith("svg")


def test_tokens_have_the_same_numbers_however_they_are_split() -> None:
    one, other = Request("p2p", 2, seqlens="5,3"), Request("a2a", 4, seqlens="5,3", heads_q=4, heads_kv=4)
    a, b = tensors_of(one)["q"], tensors_of(other)["q"]
    assert a.shape[0] == 12
    assert a[:5].isfinite().all()
    assert a[5:8].isnan().all()
    assert b.shape[0] == 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cp-comm-type", "carrier_pigeon"], "cp_comm_type is 'carrier_pigeon'"),
        (["--cp-comm-type", "a2a+p2p", "--a2a-size", "3"], "--a2a-size is 3; it must divide the number of ranks, 4"),
        (["--a2a-size", "2"], "--a2a-size is 2, but --cp-comm-type is p2p"),
        (["--seqlens", "4,x"], "--seqlens is '4,x'; it must be lengths of at least 0"),
        (["--window", "3"], "--window is '3'; it must be LEFT,RIGHT"),
        (["--mask", "diagonal"], "attn_mask_type is 'diagonal'"),
        (["--layout", "striped"], "layout is 'striped'"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--dtype", "nonsense"], "--dtype is 'nonsense'"),
        (["--heads-q", "3", "--heads-kv", "2"], "h_q is 3 and h_kv is 2"),
        (["--head", "2"], "--head is 2; it must be 0 to 1"),
        (["--rank", "4"], "--rank is 4; it must be 0 to 3"),
        (["--svg", "no/such/folder/picture.svg"], "no/such/folder/picture.svg"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_one_line_and_exit_2(options: list[str], words: str) -> None:
    result = runner.invoke(app, ["explain", *options])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


@pytest.mark.thorough
def test_as_a_module() -> None:
    command = [sys.executable, "-m", "cp_ref", "explain", "--cp-size", "2", "--seqlens", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The problem ")
