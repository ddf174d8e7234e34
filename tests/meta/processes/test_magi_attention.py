"""MagiAttention's adapter, over gloo on what stands in for the library."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from conformance.cli import app

pytestmark = pytest.mark.thorough

IMPL = "tests.meta.zoo.magi_stand_in:sdpa"
NAMED = {
    "a tail behind each rank's rows, and a window": (
        "Problem(cp_size=2, sequences=[(12, 12, 12, 12), (7, 7, 7, 7)], layout='contiguous', qkv_format='thd', "
        "attn_mask_type='padding_causal', heads_q=4, heads_kv=2, window_size=(3, -1), dtype='float64'), "
        "tail_q=4, tail_kv=4, return_lse=True, return_max_logit=True"
    ),
    "a batch, without a causal mask": (
        "Problem(cp_size=2, sequences=[(8, 8, 8, 8), (8, 8, 8, 8)], layout='contiguous', attn_mask_type='no_mask', "
        "window_size=(2, 3), d_qk=24, d_v=24, dtype='float64'), deterministic=True, return_lse=True"
    ),
    "areas, and rows that see nothing": (
        "Problem(cp_size=2, sequences=[(16, 16, 16, 16)], layout='contiguous', qkv_format='thd', "
        "areas=((2, 9, 1, 12, 3, 1), (9, 16, 0, 16, -1, 0)), dtype='float64'), return_lse=True"
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_problems(name: str) -> None:
    play("--tier", "logic", "--repro", f"Case({NAMED[name]})")


def test_drawn_problems() -> None:
    said = play("--tier", "logic", "--tier", "probes", "--max-examples", "25")
    assert "right" in said


def play(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["--impl", IMPL, "--cp-size", "2", *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output
