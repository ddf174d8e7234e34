"""What type checkers see: the words that arguments take, and what `attention` returns. By pyright, which `dev` has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import HANGS_S

pytestmark = [pytest.mark.thorough, pytest.mark.extras]

ROOT = Path(__file__).parents[2]
PROGRAM = """\
from typing import Any, assert_type
from torch import Tensor
import {package} as cp

def right(group: Any, q: Tensor, lse: bool) -> None:
    cp.ContextParallel(group, layout="zigzag")
    context = cp.ContextParallel(group, "p2p", layout="contiguous")
    assert_type(cp.attention(q, q, q, cp=context), Tensor)
    assert_type(cp.attention(q, q, q, cp=context, attn_mask_type="causal", return_lse=True), tuple[Tensor, Tensor])
    assert_type(cp.attention(q, q, q, cp=context, return_max_logit=True), tuple[Tensor, Tensor])
    both = cp.attention(q, q, q, cp=context, return_lse=True, return_max_logit=True)
    assert_type(both, tuple[Tensor, Tensor, Tensor])
    cp.attention(q, q, q, cp=context, return_lse=lse)

def wrong(group: Any, q: Tensor, sizes: dict[str, Any]) -> None:
    context = cp.ContextParallel(group)
    cp.attention(q, q, q, cp=context, attn_mask_type="casual")
    cp.attention(q, q, q, cp=context, softmax_type="sink")
    cp.attention(q, q, q, cp=context, qkv_format="bsdh")
    cp.attention(q, q, q, cp=context, windows=(1, 0))
    cp.ContextParallel(group, "ring")
    cp.ContextParallel(group, layout="striped")
    cp.make_plan(cp=context, attn_mask_type="casual", **sizes)
    cp.make_plan(cp=context, alibi_slopes=q, **sizes)
    cp.supports(cp=context, qkv_format="bsdh", **sizes)
    cp.dense_attention(q, q, q, softmax_type="sink")
    cp.dense_attention(q, q, q, deterministic=True)
"""


@pytest.mark.parametrize("package", ["cp_ref", "cp_fast"])
def test_a_word_that_does_not_exist_is_an_error(tmp_path: Path, package: str) -> None:
    pytest.importorskip("pyright", reason="needs pyright: pip install '.[dev]'")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(package=package))
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = PROGRAM.splitlines()
    wrong = range(lines.index("    context = cp.ContextParallel(group)") + 1, len(lines))
    assert {one["range"]["start"]["line"] for one in found} == set(wrong), found
