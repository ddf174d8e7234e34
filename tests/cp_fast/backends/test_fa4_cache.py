"""FlashAttention 4's compiled kernels: where they are kept, and what is said of a compilation."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cp_fast.backends.fa4 import fa4_cache
from cp_fast.backends.fa4.fa4_cache import ENABLED, FOLDER, keep_on_disk, kept_where, says_when_it_compiles
from cp_fast.build.cache import own_folder
from cp_fast.log import log_once


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CP_ATTENTION_CACHE", str(tmp_path / "builds"))
    for name in (ENABLED, FOLDER):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
    return tmp_path / "builds" / "flash_attn_4"


def test_they_are_kept_beside_our_own_builds(folder: Path) -> None:
    keep_on_disk()
    assert (os.environ[ENABLED], os.environ[FOLDER], kept_where()) == ("1", str(folder), str(folder))
    assert folder.is_dir()


def test_what_the_user_set_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLED, "0")
    keep_on_disk()
    assert FOLDER not in os.environ
    assert "every process compiles anew" in kept_where()


def test_a_library_that_is_imported_already_has_read_its_variables(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute.cache_utils", ModuleType("cache_utils"))
    keep_on_disk()
    assert ENABLED not in os.environ


def open_to_all(path: Path) -> None:
    path.mkdir(exist_ok=True)
    path.chmod(0o777)


def a_link(path: Path) -> None:
    path.rmdir()
    path.symlink_to(path.parent.parent)


@pytest.mark.parametrize("harm", [lambda x: open_to_all(x.parent), open_to_all, a_link])
def test_a_folder_that_others_could_write_to_is_not_used(folder: Path, harm: Callable[[Path], None]) -> None:
    own_folder(folder.name)
    harm(folder)
    keep_on_disk()
    assert ENABLED not in os.environ


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o777])
def test_its_folder_is_this_users_alone_whatever_the_umask(folder: Path, mask: int) -> None:
    """The one that `doctor` makes first too: builds find the folder of all as they need it."""
    before = os.umask(mask)
    try:
        keep_on_disk()
    finally:
        os.umask(before)
    assert os.environ[FOLDER] == str(folder)
    assert [stat.S_IMODE(x.stat().st_mode) for x in (folder, folder.parent)] == [0o700, 0o700]
    assert own_folder() == folder.parent


def test_a_compilation_is_said_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    keep_on_disk()
    monkeypatch.setattr(fa4_cache, "_LONG", 0.0)
    log_once.cache_clear()
    launch = SimpleNamespace(compile_cache=SimpleNamespace(cache={}))
    for key in (1, 1, 2):
        with says_when_it_compiles(launch):
            launch.compile_cache.cache[key] = "kernel"
    said = capsys.readouterr().err
    assert said.count("compiles its kernels") == 1
    assert str(folder) in said
