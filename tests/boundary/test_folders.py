"""Folders stay small enough to read their list of files: at most 12 files each, 6 at the top of cp_fast."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files_by_folder() -> Counter[str]:
    """The files of each folder of the packages, but for compiled ones."""
    paths = (path for package in ("cp_ref", "cp_fast", "conformance") for path in (ROOT / package).rglob("*"))
    return Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in (".py", ".typed", ".toml", ".html")
    )


def test_no_folder_has_more_than_12_files() -> None:
    found = files_by_folder()
    assert {folder: count for folder, count in found.items() if count > 12} == {}
    assert found["cp_fast"] <= 6
