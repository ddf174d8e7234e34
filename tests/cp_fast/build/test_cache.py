"""The cache of builds: one builder at a time, nothing half-done, nothing broken."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cp_fast.build import BuildError, Unavailable, cache
from tests.dist.workers import CONTEXT
from tests.marks import HANGS_S

FILE = "library.so"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Builds a file with some content, and counts how often."""

    def __init__(self, content: str = "machine code") -> None:
        self.content, self.calls = content, 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        assert list(folder.iterdir()) == []
        (folder / FILE).write_text(self.content)


def never(folder: Path) -> None:
    raise AssertionError("it has been built already")


def test_it_is_built_once() -> None:
    assert cache.find("key", FILE) is None
    path = cache.cached("key", FILE, Builder())
    assert path.read_text() == "machine code"
    assert cache.cached("key", FILE, never) == path == cache.find("key", FILE)


def test_keys_are_apart() -> None:
    assert cache.cached("one", FILE, Builder("1")).read_text() == "1"
    assert cache.cached("two", FILE, Builder("2")).read_text() == "2"


@pytest.mark.parametrize("harm", ["truncated", "changed", "no record", "a record of nothing", "empty", "no library"])
def test_a_broken_entry_is_built_again(own_cache: Path, harm: str) -> None:
    path = cache.cached("key", FILE, Builder())
    record = path.parent / "build.json"
    {
        "truncated": lambda: path.write_text("machine"),
        "changed": lambda: path.write_text("machine cake"),
        "no record": record.unlink,
        "a record of nothing": lambda: record.write_text("[]"),
        "empty": lambda: record.write_text(""),
        "no library": path.unlink,
    }[harm]()
    assert cache.find("key", FILE) is None
    builder = Builder()
    assert cache.cached("key", FILE, builder).read_text() == "machine code"
    assert builder.calls == 1
    assert sorted(x.name for x in own_cache.iterdir()) == ["key", "key.lock"]


def test_a_failure_leaves_nothing_that_could_be_loaded(own_cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / FILE).write_text("half of")
        raise BuildError("g++ says no")

    with pytest.raises(BuildError, match="g\\+\\+ says no"):
        cache.cached("key", FILE, fail)
    assert cache.find("key", FILE) is None
    assert sorted(x.name for x in own_cache.iterdir()) == ["key.failed", "key.lock"]
    builder = Builder()
    cache.cached("key", FILE, builder)  # who comes later tries again
    assert builder.calls == 1
    assert not (own_cache / "key.failed").exists()


def test_an_interruption_leaves_nothing(own_cache: Path) -> None:
    def interrupt(folder: Path) -> None:
        (folder / FILE).write_text("half of")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.cached("key", FILE, interrupt)
    assert sorted(x.name for x in own_cache.iterdir()) == ["key.lock"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))  # a permission would not stop root
    with pytest.raises(Unavailable, match=r"cannot be written to .*: set CP_ATTENTION_CACHE to a folder that can be"):
        cache.cached("key", FILE, never)


def test_a_cache_that_can_only_be_read_serves_what_it_has(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.cached("key", FILE, Builder())

    def refuse(path: Path) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cache, "open_lock", refuse)
    assert cache.cached("key", FILE, never) == path
    with pytest.raises(Unavailable, match="Permission denied"):
        cache.cached("other", FILE, never)


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.root() == Path("/home/someone/.cache/cp-attention")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert cache.root() == Path("/scratch/cp-attention")
    monkeypatch.setenv(cache.VARIABLE, "~/builds")
    assert cache.root() == Path("/home/someone/builds")


def cached_slowly(folder: Path, log: Path, pause: float, end: str, said: Any) -> None:
    """One process: what the cache gives it, or the error, goes into `said`."""
    os.environ[cache.VARIABLE] = str(folder)

    def build_in(folder: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        for part in range(10):
            with (folder / FILE).open("a") as file:
                file.write(str(part))
            time.sleep(pause)
        if end == "fail":
            raise BuildError("the compiler says no")

    try:
        said.put(cache.cached("key", FILE, build_in).read_text())
    except BuildError as error:
        said.put(f"BuildError: {error}")


def start(folder: Path, log: Path, pause: float, end: str = "succeed") -> tuple[Any, Any]:
    """A process that does, and the queue of what it says."""
    said = CONTEXT.Queue()
    process = CONTEXT.Process(target=cached_slowly, args=(folder, log, pause, end, said))
    process.start()
    return process, said


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + HANGS_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("end", "said"), [("succeed", "0123456789"), ("fail", "BuildError: the compiler says no")])
def test_of_eight_processes_one_builds(tmp_path: Path, own_cache: Path, end: str, said: str) -> None:
    """The others wait for its result, or its failure. It takes long enough for all of them to come."""
    started = [start(own_cache, tmp_path / "log", 0.2, end) for _ in range(8)]
    assert [queue.get(timeout=HANGS_S) for _, queue in started] == [said] * 8
    for process, _ in started:
        process.join(timeout=HANGS_S)
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_killed_builder_stops_nobody(tmp_path: Path, own_cache: Path) -> None:
    killed, _ = start(own_cache, tmp_path / "log", 60)
    wait_for(tmp_path / "log")
    waiting, said = start(own_cache, tmp_path / "log", 0)
    time.sleep(0.3)
    killed.kill()
    killed.join(timeout=HANGS_S)
    assert said.get(timeout=HANGS_S) == "0123456789"
    waiting.join(timeout=HANGS_S)
    cache.cached("next", FILE, Builder())  # The first may have come before the killed one's parent knew of its end.
    assert sorted(x.name for x in own_cache.iterdir()) == ["key", "key.lock", "next", "next.lock"]
    assert json.loads((own_cache / "key" / "build.json").read_text())["bytes"] == 10
