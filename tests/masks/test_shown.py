"""Areas in pictures, in words and on command lines."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from textwrap import indent

import pytest
from typer.testing import CliRunner

import cp_fast.tools.cli
import cp_ref.cli
from cp_ref import masks
from cp_ref.contract.svg_pictures import svg_picture
from cp_ref.contract.text_pictures import text_picture
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence

TWO = (Sequence(3, 3, 4, 4), Sequence(4, 4, 4, 4))
ACROSS = Problem(2, TWO, qkv_format="thd", layout="contiguous", areas=((0, 8, 0, 8, -1, 0), (0, 2, 4, 6, -1, -1)))
runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})


def test_a_picture_shows_the_whole_buffer() -> None:
    picture = text_picture(ACROSS, make_schedule(ACROSS))
    assert (
        picture.splitlines()
        == """\
p2p, cp_size 2, thd, contiguous, 2 areas
8 query rows x 8 key rows of the packed buffer; a cell is one query x one key

        key   0   1   2   3   4   5   6   7
      owner   0   0   0   0   1   1   1   1
query       ┌────────────────────────────────
    0     0 │0:0  .   .   .  0:1 0:1  .   .
    1     0 │0:0 0:0  .   .  0:1 0:1  .   .
    2     0 │0:0 0:0 0:0  .   .   .   .   .
    3     0 │ .   .   .   .   .   .   .   .
    4     1 │1:1 1:1 1:1  .  1:0  .   .   .
    5     1 │1:1 1:1 1:1  .  1:0 1:0  .   .
    6     1 │1:1 1:1 1:1  .  1:0 1:0 1:0  .
    7     1 │1:1 1:1 1:1  .  1:0 1:0 1:0 1:0

R:S  computed by rank R at its step S, both from 0
.    computed by nobody (masked, or padding)""".splitlines()
    )
    root = ET.fromstring(svg_picture(ACROSS, make_schedule(ACROSS)))
    words = "".join(root.itertext())
    assert "2 areas" in words
    assert "slots of the packed buffer" in words


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous", "balanced"])
def test_commands_take_a_makers_call(layout: str, tmp_path: Path) -> None:
    options = ["--cp-size", "2", "--seqlens", "8,8", "--layout", layout, "--areas", "shared_prefix(6, [5, 5])"]
    planned = runner.invoke(cp_fast.tools.cli.app, ["plan", *options, "--svg", str(tmp_path / "plan.svg")])
    assert planned.exit_code == 0, planned.output
    assert "every visible pair (111 a head) is computed exactly once" in " ".join(planned.output.split())
    told = runner.invoke(cp_ref.cli.app, ["explain", *options])
    assert told.exit_code == 0, told.output
    said = " ".join(told.output.split())
    assert "who sees whom as 4 areas say" in said
    assert len(masks.from_call("shared_prefix(6, [5, 5])")) == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("prefix_lm(4", "areas are 'prefix_lm(4'; they must be a call of block_causal"),
        ("open('x')", "they must be a call of block_causal"),
        ("prefix_lm(4, 99)", "q_stop must lie within the 16 rows"),
    ],
)
def test_calls_that_are_refused(call: str, words: str) -> None:
    for app, command in ((cp_fast.tools.cli.app, "plan"), (cp_ref.cli.app, "explain")):
        refused = runner.invoke(app, [command, "--cp-size", "2", "--seqlens", "16", "--areas", call])
        assert refused.exit_code == 2
        assert words.replace(" ", "") in "".join(refused.output.split())


def test_the_page_on_masks_is_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "masks.md").read_text()
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)), {})
    assert indent(capsys.readouterr().out, "    ") in page
