"""The schedules of eleven problems, letter by letter: a change of one is a change of what travels or is computed.

Write them anew with CP_GOLDEN=write, and read the difference.
"""

import os
from pathlib import Path

import pytest

from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.proof import verify

FOLDER = Path(__file__).parent / "golden"


def same(*lengths: int) -> tuple[Sequence, ...]:
    return tuple(Sequence(n, n, n, n) for n in lengths)


def padded(*pairs: tuple[int, int]) -> tuple[Sequence, ...]:
    return tuple(Sequence(n, n, slots, slots) for n, slots in pairs)


CAUSAL = "padding_causal"
PROBLEMS = {
    "p2p_causal_cp4": Problem(4, same(16), qkv_format="thd"),
    "p2p_no_mask_cp3": Problem(3, same(12, 6), qkv_format="thd", attn_mask_type="no_mask"),
    "p2p_window_halo_cp4": Problem(4, same(32), qkv_format="thd", window_size=(3, 0)),
    "p2p_contiguous_documents_cp3": Problem(3, same(9, 6, 3), qkv_format="thd", layout="contiguous"),
    "p2p_padding_cp2": Problem(2, padded((5, 8), (0, 4), (4, 4)), qkv_format="thd", attn_mask_type=CAUSAL),
    "all_gather_causal_cp3": Problem(3, same(12), "all_gather", qkv_format="thd"),
    "all_gather_cross_bottom_right_cp2": Problem(
        2, (Sequence(4, 8, 4, 8),), "all_gather", qkv_format="sbhd", attn_mask_type="causal_bottom_right"
    ),
    "a2a_gqa_cp2": Problem(2, same(8), "a2a", 2, heads_q=4, heads_kv=2),
    "a2a_replicated_kv_window_cp4": Problem(4, same(16), "a2a", 4, window_size=(5, 0), heads_q=8, heads_kv=2),
    "a2a_p2p_causal_cp4": Problem(4, same(16), "a2a+p2p", 2, heads_q=2, heads_kv=2),
    "a2a_head_chunks_cp2": Problem(2, same(8), "a2a", 2, heads_q=16, heads_kv=8),
}
HEAD_CHUNKS = {"a2a_head_chunks_cp2": (1, 2, 1)}


@pytest.mark.parametrize("name", PROBLEMS)
def test_golden(name: str) -> None:
    problem, path = PROBLEMS[name], FOLDER / f"{name}.txt"
    schedule = make_schedule(problem, head_chunks=HEAD_CHUNKS.get(name, ()))
    verify(problem, schedule)
    text = f"{problem}\n{schedule}"
    if os.environ.get("CP_GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    assert Schedule.parse(text.split("\n", 1)[1]) == schedule
