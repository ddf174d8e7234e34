"""An executable plan as text, letter by letter: a change of it is a change of what a rank does.

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
