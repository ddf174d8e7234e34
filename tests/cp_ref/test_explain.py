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
from cp_ref.cli.explained_problem import Request
from tests.marks import HANGS_S

runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})

WALK = """\
The problem ────────────────────────────────────────────────────────────────────
A sequence that is too long for one GPU is spread over several ranks. Every
token's query, key and value live on one rank, its owner; but a query has to
meet keys of other ranks too. Who sends what to whom, and who computes which
part of the score matrix (queries x keys) when, is the schedule.

Here: 1 sequence of 4 tokens (bshd), 2 query heads over 1 key/value heads,
causal, 2 ranks.

Who owns what ──────────────────────────────────────────────────────────────────
dual_chunk: each sequence is cut into 4 chunks; rank r has the chunks r and 3-r.
Under a causal mask an early chunk sees little and a late one much, so every
rank gets the same work.

╭──────┬────────╮
│ rank │ tokens │
├──────┼────────┤
│    0 │ 0, 3   │
│    1 │ 1, 2   │
╰──────┴────────╯

The schedule: p2p ──────────────────────────────────────────────────────────────
Ring attention: queries stay where they are, keys and values travel round a ring
of ranks. Every rank computes with the block in hand while the next one is on
its way, and merges the partial outputs by their log-sum-exp (LSE).

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

In the tables, q 2-3 x k 0-1 is a tile: queries 2 and 3 against keys 0 and 1; (3
of 4) says how many of its pairs the mask leaves. Rows that travel are named q
(queries), kv (keys and values), out (partial outputs with their LSE), do (the
output's gradient), dq and dkv (gradients).

Forward, step 0 (2 in all) ─────────────────────────────────────────────────────
Every rank computes partial outputs from the rows that it has at the start of
the step. Meanwhile key and value rows go to ranks that need them.

        key   0   1   2   3
      owner   0   1   1   0
query       ┌────────────────
    0     0 │0:0  .   .   .
    1     1 │ .  1:0  .   .
    2     1 │ .  1:0 1:0  .
    3     0 │0:0  .   .  0:0
R:S computed now by rank R, + computed before, . not yet or never (masked)
╭──────┬───────────┬─────────────┬───────────────╮
│ rank │ computes  │ sends       │ receives      │
├──────┼───────────┼─────────────┼───────────────┤
│    0 │ q 0 x k 0 │ kv 0 to 1   │ kv 1-2 from 1 │
│      │ q 3 x k 0 │             │               │
│      │ q 3 x k 3 │             │               │
│    1 │ q 1 x k 1 │ kv 1-2 to 0 │ kv 0 from 0   │
│      │ q 2 x k 1 │             │               │
│      │ q 2 x k 2 │             │               │
╰──────┴───────────┴─────────────┴───────────────╯

Forward, step 1 (2 in all) ─────────────────────────────────────────────────────
Every rank computes partial outputs from the rows that it has at the start of
the step. Nothing travels.

        key   0   1   2   3
      owner   0   1   1   0
query       ┌────────────────
    0     0 │ +   .   .   .
    1     1 │1:1  +   .   .
    2     1 │1:1  +   +   .
    3     0 │ +  0:1 0:1  +
R:S computed now by rank R, + computed before, . not yet or never (masked)
╭──────┬───────────┬───────┬──────────╮
│ rank │ computes  │ sends │ receives │
├──────┼───────────┼───────┼──────────┤
│    0 │ q 3 x k 1 │ -     │ -        │
│      │ q 3 x k 2 │       │          │
│    1 │ q 1 x k 0 │ -     │ -        │
│      │ q 2 x k 0 │       │          │
╰──────┴───────────┴───────┴──────────╯

The way back ───────────────────────────────────────────────────────────────────
The backward pass computes the same tiles again, now with the gradient of the
output (do) and the final LSE: so each tile's weights are right at once, and
gradients are simply added up. A query's gradient is complete where its output
was; gradients of keys and values arise wherever a tile was, and have to get
home.

Backward, step 0 (3 in all) ────────────────────────────────────────────────────
Every rank computes gradients from the rows that it has at the start of the
step. Meanwhile key and value rows go to ranks that need them.

╭──────┬───────────┬─────────────┬───────────────╮
│ rank │ computes  │ sends       │ receives      │
├──────┼───────────┼─────────────┼───────────────┤
│    0 │ q 0 x k 0 │ kv 0 to 1   │ kv 1-2 from 1 │
│      │ q 3 x k 0 │             │               │
│      │ q 3 x k 3 │             │               │
│    1 │ q 1 x k 1 │ kv 1-2 to 0 │ kv 0 from 0   │
│      │ q 2 x k 1 │             │               │
│      │ q 2 x k 2 │             │               │
╰──────┴───────────┴─────────────┴───────────────╯

Backward, step 1 (3 in all) ────────────────────────────────────────────────────
Every rank computes gradients from the rows that it has at the start of the
step. Nothing travels.

╭──────┬───────────┬───────┬──────────╮
│ rank │ computes  │ sends │ receives │
├──────┼───────────┼───────┼──────────┤
│    0 │ q 3 x k 1 │ -     │ -        │
│      │ q 3 x k 2 │       │          │
│    1 │ q 1 x k 0 │ -     │ -        │
│      │ q 2 x k 0 │       │          │
╰──────┴───────────┴───────┴──────────╯

Backward, step 2 (3 in all) ────────────────────────────────────────────────────
Nothing is computed: gradients of keys and values go towards their owner, where
they are added up.

╭──────┬──────────┬──────────────┬────────────────╮
│ rank │ computes │ sends        │ receives       │
├──────┼──────────┼──────────────┼────────────────┤
│    0 │ -        │ dkv 1-2 to 1 │ dkv 0 from 1   │
│    1 │ -        │ dkv 0 to 0   │ dkv 1-2 from 0 │
╰──────┴──────────┴──────────────┴────────────────╯

The sum ────────────────────────────────────────────────────────────────────────
Verified: each of the 10 visible pairs of a head is computed exactly once in
each pass, every row is there when it is used, and every result ends at its
owner. Balance (mean rank's work over the busiest's) 1.000; 1,152 bytes are
sent.
"""

VALUES = """\
One position, in numbers ───────────────────────────────────────────────────────
Sequence 0, query 3, head 0; rank 0 owns it, and it sees keys 0-3. Each tile
gives a partial output, which is right for its own keys, and the log-sum-exp of
its scores, which says how much these keys weigh. The first 2 of 8 elements of
each output are shown.

╭──────┬──────┬──────┬─────────┬─────────────────┬─────────┬─────────────────╮
│ step │ rank │ keys │     lse │ out             │ lse now │ out now         │
├──────┼──────┼──────┼─────────┼─────────────────┼─────────┼─────────────────┤
│    0 │    0 │ 0    │  0.3893 │ -0.7860 -0.4389 │  0.3893 │ -0.7860 -0.4389 │
│    0 │    0 │ 3    │  4.6236 │  1.0997  0.4953 │  4.6380 │  1.0728  0.4819 │
│    1 │    0 │ 1    │  1.1548 │ -2.0913  0.1061 │  4.6682 │  0.9785  0.4707 │
│    1 │    0 │ 2    │ -6.0217 │ -2.1129  0.4400 │  4.6682 │  0.9784  0.4707 │
╰──────┴──────┴──────┴─────────┴─────────────────┴─────────┴─────────────────╯

The first merge, written out:

  lse    = log(exp(0.3893) + exp(4.6236)) = 4.6380
  out[0] = exp(0.3893 - 4.6380) * -0.7860 + exp(4.6236 - 4.6380) * 1.0997 = 1.0728

╭───────────────────────────┬────────┬─────────────────┬────────────────────╮
│                           │    lse │ out             │ largest difference │
├───────────────────────────┼────────┼─────────────────┼────────────────────┤
│ the tiles above, merged   │ 4.6682 │  0.9784  0.4707 │            TINY │
│ cp_ref.attention returned │ 4.6682 │  0.9784  0.4707 │            TINY │
│ the oracle, in float64    │ 4.6682 │  0.9784  0.4707 │                    │
╰───────────────────────────┴────────┴─────────────────┴────────────────────╯
"""


def explain(*options: str) -> str:
    """What it prints, without the spaces at the ends of lines; rounding errors are all called TINY."""
    result = runner.invoke(app, ["explain", *options])
    assert result.exit_code == 0, result.output
    said = re.sub(r"\d\.\de-\d\d", "TINY", result.output)
    return "\n".join(line.rstrip() for line in said.rstrip().splitlines()) + "\n"


def test_a_tiny_case() -> None:
    assert explain("--cp-size", "2", "--seqlen", "4", "--dtype", "float64") == WALK


def test_a_tiny_case_with_values() -> None:
    said = explain("--cp-size", "2", "--seqlen", "4", "--values", "--dtype", "float64")
    assert said == WALK + "\n" + VALUES


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_every_schedule_ends_at_the_oracles_number(comm: str) -> None:
    said = explain("--cp-comm-type", comm, "--values", "--dtype", "float64", "--query", "0:9", "--head", "1")
    assert "Sequence 0, query 9, head 1; rank 3 owns it, and it sees keys 0-9." in said
    merged, returned, oracle = (
        re.findall(r"-?\d\.\d+", line) for line in said.splitlines() if line.startswith(("│ the ", "│ cp_ref"))
    )
    assert merged[:3] == returned[:3] == oracle
    assert said.count("TINY") == 2
    assert "The schedule: " + comm in said
    assert "Verified: each of the 136 visible pairs" in said


def test_heads_and_sequences_are_named() -> None:
    said = explain("--cp-comm-type", "a2a+p2p", "--seqlens", "7,4", "--mask", "padding_causal")
    assert "q s0 0; s1 0 h2-3 to 1" not in said  # heads stand with each sequence
    assert "q s0 0 h2-3; s1 0 h2-3 to 1" in said
    assert "5 slots of padding" not in said
    assert "10 slots of padding were added" in said
    assert "s0, s1, ... are the sequences; h0-1 are its heads" in " ".join(said.split())
    assert "Heads are exchanged for sequence" in said


def test_a_query_that_sees_nothing() -> None:
    shape = ("--seqlen", "16", "--seqlen-kv", "8", "--mask", "causal_bottom_right")
    said = explain(*shape, "--values", "--query", "0:0")
    assert "it sees no key" in " ".join(said.split())
    assert said.count("│ -inf │") == 3


def test_one_rank_of_many() -> None:
    said = explain("--cp-size", "16")
    assert "The steps of rank 0 follow; --rank shows another's." in said
    assert "│    3 │ q 6-7 x k 6-7" in explain("--cp-size", "16", "--rank", "3")


def test_svg(tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    assert f"picture written to {file}" in explain("--svg", str(file)).replace("\n", "")
    assert ET.parse(file).getroot().tag.endswith("svg")


def test_tokens_have_the_same_numbers_however_they_are_split() -> None:
    one, other = Request("p2p", 2, seqlens="5,3"), Request("a2a", 4, seqlens="5,3", heads_q=4, heads_kv=4)
    a, b = one.tensors()["q"], other.tensors()["q"]
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
        (["--layout", "zigzag"], "layout is 'zigzag'"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--dtype", "nonsense"], "--dtype is 'nonsense'"),
        (["--heads-q", "3", "--heads-kv", "2"], "h_q is 3 and h_kv is 2"),
        (["--head", "2"], "--head is 2; it must be 0 to 1"),
        (["--rank", "4"], "--rank is 4; it must be 0 to 3"),
        (["--values", "--query", "3"], "--query is '3'; it must be SEQ:POS"),
        (["--values", "--query", "0:16"], "--query is 0:16, but the sequences have these numbers of queries: 0: 16"),
        (["--query", "0:1"], "--query is for --values"),
        (["--values", "--seqlens", "0"], "--values needs a query"),
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


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "cp_ref", "explain", "--cp-size", "2", "--seqlens", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The problem ")
