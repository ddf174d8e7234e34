"""A program as text, letter by letter: a change of it is a change of what a rank does.

Write the files anew with CP_GOLDEN=write, and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.api.plan import Plan
from cp_ref import SimGroup
from tests import golden

FOLDER = Path(__file__).parent / "golden"


def plans(comm: Any, *lengths: int) -> list[Plan]:
    """The plans of two ranks, of causal documents of these lengths."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    how: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": ends, "device": "cpu", "dtype": torch.bfloat16}
    how |= {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8}
    return SimGroup(2).run(lambda member: cp_fast.make_plan(cp=cp_fast.ContextParallel(member, comm), **how))


@pytest.mark.parametrize(("comm", "lengths"), [("p2p", (16,)), ("a2a", (16, 8))])
def test_golden(comm: Any, lengths: tuple[int, ...]) -> None:
    text = "".join(f"rank {plan.rank}\n{plan.instructions}\n" for plan in plans(comm, *lengths))
    path = FOLDER / f"{comm}_cp2.txt"
    if os.environ.get("CP_GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_the_page_of_plans_shows_the_forward_pass_of_rank_0() -> None:
    forward, _, _ = (FOLDER / "p2p_cp2.txt").read_text().removeprefix("rank 0\n").partition("backward\n")
    assert indent(forward, "    ") in (Path(__file__).parents[3] / "docs" / "how_to" / "plans.md").read_text()


def test_golden_folders_are_equal_or_show_the_first_difference(tmp_path: Path) -> None:
    """`tests.golden`: the same entries again, and one with another line."""
    some = [*golden.plan_entries(range(8)), *golden.refusal_entries(range(4)), *golden.command_entries()]
    again = [*golden.plan_entries(range(8)), *golden.refusal_entries(range(4)), *golden.command_entries()]
    for name, entries in (("before", some), ("after", again)):
        assert golden.write(tmp_path / name, iter(entries)) == len(some) > 20
    assert golden.compared(tmp_path / "before", tmp_path / "after") == ""
    texts = dict(some)
    assert "launch" in texts["plan 0000"]
    assert "int32 [" in texts["plan 0003"]
    texts["plan 0005"] = texts["plan 0005"].replace("launch", "lunch", 1)
    del texts["refused 0002"]
    golden.write(tmp_path / "after", iter(texts.items()))
    said = golden.compared(tmp_path / "before", tmp_path / "after")
    assert "2 of" in said.splitlines()[0]
    assert "1 of plan, 1 of refused" in said
    assert [line for line in said.splitlines() if line.startswith("+") and "lunch" in line]


def test_golden_draws_every_schedule_format_layout_and_mask() -> None:
    calls = [golden.drawn(n) for n in range(golden.PLANS)]
    for names in (golden.COMMS, golden.LAYOUTS):
        assert len({(call.cp_size, x) for call in calls for x in (call.comm, call.layout) if x in names}) == 8 * len(
            names
        )
    formats = {(call.comm, call.layout, call.arguments["qkv_format"]) for call in calls}
    assert len(formats) == len(golden.COMMS) * len(golden.LAYOUTS) * 3
    assert {call.arguments["attn_mask_type"] for call in calls} == {*golden.MASKS, None}
    for what in ("areas", "window_size", "max_sequences", "linear", "dropout_p", "softcap", "layout"):
        assert sum(what in call.arguments for call in calls) > 40, what
    assert sum(call.update is not None for call in calls) > 40
