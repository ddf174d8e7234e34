"""The tables of docs/how_to/long_context.md are what `benchmarks/long_context_page.py` makes of the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.long_context_page import PAGE, RECORD, longest_table, page_of, picture, speed_table

ROWS: list[dict[str, Any]] = [
    {"library": "cp_fast", "tokens": 65536, "layers": 4, "tokens_per_s": 80000, "peak_gib": 9.96},
    {"library": "cp_fast", "tokens": 524288, "layers": 2, "tokens_per_s": 31234, "peak_gib": 70.0},
    {"library": "accelerate", "tokens": 65536, "layers": 4, "tokens_per_s": 60000, "peak_gib": 10.0},
    {"library": "accelerate", "tokens": 524288, "layers": 2, "error": "torch.OutOfMemoryError: CUDA out of memory"},
    {"library": "ring_flash_attn", "tokens": 65536, "layers": 4, "error": "ImportError: no module"},
    {"library": "cp_fast+liger", "tokens": 65536, "layers": 4, "error": "TimeoutError: not done in 27 s"},
]
LONGEST: list[dict[str, Any]] = [
    {
        "library": "cp_fast",
        "layers": 36,
        "predicted": 700000,
        "bytes_per_token": 180000,
        "below": {"tokens": 665600, "not_run": "a step would take about 900 s"},
        "above": {"tokens": 755712, "error": "torch.OutOfMemoryError: CUDA"},
    },
    {"library": "accelerate", "layers": 36, "error": "RuntimeError: no kernel"},
]


def test_the_page_has_what_the_record_says() -> None:
    text = PAGE.read_text()
    assert page_of(text, json.loads(RECORD.read_text())) == text


def test_each_row_of_a_record_is_a_cell() -> None:
    assert speed_table(ROWS).splitlines()[2:] == [
        "| 65,536 | 4 | 80,000, 10.0 GiB | 60,000, 10.0 GiB | failed |",
        "| 524,288 | 2 | 31,234, 70.0 GiB | out of memory | - |",
    ]
    assert longest_table(LONGEST).splitlines()[2:] == [
        "| cp-attention | 700,000 | 180,000 | not tried | 755,712: out of memory |",
        "| accelerate | - | - | failed | - |",
    ]
    again = page_of(PAGE.read_text(), {"rows": ROWS, "longest": LONGEST})
    assert again.count(speed_table(ROWS)) == again.count(longest_table(LONGEST)) == 1


def test_memory_over_a_step_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[bench]'")
    memory = [["begin", 1.0, 1.0], ["0 mlp begins", 2.0, 2.5], ["0 mlp ends", 3.0, 4.0], ["end", 1.0, 5.0]]
    picture([{**ROWS[0], "memory": memory}], tmp_path / "memory.svg")
    assert "cp-attention, 65,536 tokens, 4 layers" in (tmp_path / "memory.svg").read_text().replace("<!-- ", "")
