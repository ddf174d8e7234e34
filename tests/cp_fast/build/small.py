"""Sources of one function, `one`, in the place of the kernels: what is tested is the build, which they make quick."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cp_fast.build import recipe

__all__ = ["make_small", "use_small"]

SMALL = 'extern "C" __attribute__((visibility("default"))) int one() { return 1; }\n'


def make_small(folder: Path) -> Path:
    """A copy of the sources without those of kernels for the CPU, in `folder`/csrc."""
    sources = folder / "csrc"
    shutil.copytree(recipe.sources_folder(), sources)
    for source in (sources / "cpu").glob("*.cpp"):
        source.unlink()
    (sources / "common" / "bindings.cpp").write_text(SMALL)
    return sources


def use_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`make_small`, and build those."""
    sources = make_small(folder)
    monkeypatch.setattr(recipe, "sources_folder", lambda: sources)
    return sources
