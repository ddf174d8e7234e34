"""The program that plays diffusers' own paths beside ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import HANGS_S

pytestmark = [pytest.mark.extras, pytest.mark.thorough]

ROOT = Path(__file__).parents[2]


def test_a_family_is_played_by_all_ways(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[test-integrations]'")
    out = tmp_path / "paths.json"
    command = [sys.executable, "-m", "benchmarks.diffusers_paths", "right", "--only", "qwen_image", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {(case["case"], case["way"]): case["verdict"] for case in json.loads(out.read_text())["cases"]}
    assert {verdict for (_, way), verdict in found.items() if way.startswith("cp_fast")} == {"right"}
    assert found["even lengths", "diffusers, ring"] == "right"
    assert found["even lengths, a padded text", "diffusers, ring"] == "wrong"
