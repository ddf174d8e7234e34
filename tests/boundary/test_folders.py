"""Folders stay small enough to read their list of files: at most 12 files each, 6 at the top of cp_fast."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
RECORDS = "benchmarks/results"  # records lie side by side, one of each run; its README says what each one is


def files_by_folder() -> Counter[str]:
    """The files of each folder of the repository that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return Counter(PurePosixPath(name).parent.as_posix() for name in found if (ROOT / name).exists())


def test_no_folder_has_more_than_12_files() -> None:
    found = files_by_folder()
    assert found[RECORDS] > 0
    assert {folder: count for folder, count in found.items() if count > 12} == {RECORDS: found[RECORDS]}
    assert found["cp_fast"] <= 6
