"""The cache of builds: one builder at a time, nothing half-done, nothing broken."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cp_fast.build import cache
from cp_fast.build.recipe import BuildError, Unavailable
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


OTHER = 12345  # a user that nobody is

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to another user")


def give_away(path: Path) -> None:
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


WAYS = [pytest.param(give_away, marks=needs_root), open_to_all]


@pytest.mark.parametrize("harm", WAYS)
def test_a_folder_that_others_may_write_to_is_refused(own_cache: Path, harm: Callable[[Path], None]) -> None:
    cache.cached("key", FILE, Builder())
    harm(own_cache)
    assert cache.find("key", FILE) is None
    assert cache.find_first("k", FILE) is None
    said = "belongs to user 12345, and this is user 0" if harm is give_away else r"may be written to by others .* 777"
    with pytest.raises(Unavailable, match=rf"{own_cache}, {said}.*chmod go-w.* or set {cache.VARIABLE} to a folder"):
        cache.cached("key", FILE, never)


@pytest.mark.parametrize("harm", WAYS)
@pytest.mark.parametrize("what", ["", FILE, "build.json"])
def test_a_planted_library_is_not_used(own_cache: Path, what: str, harm: Callable[[Path], None]) -> None:
    path = cache.cached("key", FILE, Builder("planted")).parent / what
    harm(path)
    assert cache.find("key", FILE) is None
    assert cache.cached("key", FILE, Builder("own")).read_text() == "own"


@pytest.mark.parametrize("what", ["", FILE, "build.json"])
def test_links_are_not_followed(own_cache: Path, tmp_path: Path, what: str) -> None:
    path = cache.cached("key", FILE, Builder("planted")).parent / what
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.find("key", FILE) is None
    assert cache.cached("key", FILE, Builder("own")).read_text() == "own"
    assert (tmp_path / "elsewhere").exists()


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(own_cache: Path, tmp_path: Path) -> None:
    cache.cached("other", FILE, Builder())
    (tmp_path / "precious").write_text("precious")
    (own_cache / "key.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(Unavailable, match=r"cannot be written to .*key\.lock"):
        cache.cached("key", FILE, never)
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_what_is_made_here_is_used_here_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int
) -> None:
    folder = tmp_path / "home" / ".cache" / "cp-attention"
    monkeypatch.setenv(cache.VARIABLE, str(folder))
    before = os.umask(mask)
    try:
        other = cache.own_folder("other")
        path = cache.cached("key", FILE, Builder())
    finally:
        os.umask(before)
    assert cache.find("key", FILE) == path
    assert {stat.S_IMODE(x.stat().st_mode) for x in (other, folder, folder.parent, folder.parent.parent)} == {0o700}


@pytest.mark.parametrize("harm", [*WAYS, lambda path: path.rename(path.with_name("x")) and path.symlink_to("x")])
def test_a_folder_inside_that_is_not_ours_alone_is_refused(own_cache: Path, harm: Callable[[Path], None]) -> None:
    harm(cache.own_folder("other"))
    with pytest.raises(PermissionError, match=r"other (belongs to|may be written to by others|is no folder)"):
        cache.own_folder("other")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, 524, None])
def test_two_builders_without_locks_leave_each_other_alone(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    """No locks, or locks of each node's own (None): both build, and the first to finish is kept."""

    def flock(descriptor: int, how: int) -> None:
        if code is not None:
            raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    both, results = threading.Barrier(2), dict[str, Path]()

    def build(name: str) -> None:
        def build_in(folder: Path) -> None:
            both.wait(timeout=HANGS_S)
            (folder / FILE).write_text(name[:2])
            both.wait(timeout=HANGS_S)
            time.sleep(0.1 * (name == "second"))
            (folder / FILE).write_text(name)

        results[name] = cache.cached("key", FILE, build_in)

    threads = [threading.Thread(target=build, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["first"] == results["second"] == cache.find("key", FILE)
    assert results["first"].read_text() == "first"
    assert sorted(x.name for x in own_cache.iterdir()) == ["key", "key.lock"]


def test_a_good_build_that_just_replaced_a_broken_one_stays(own_cache: Path) -> None:
    """One process finds a broken build; before it is moved away, another one has put a good one there."""
    path = cache.cached("key", FILE, Builder("good"))
    cache._move_away(path.parent, "key", FILE)
    assert path.read_text() == "good"
    path.write_text("broken")
    cache._move_away(path.parent, "key", FILE)
    assert not path.parent.exists()


def test_what_is_being_built_elsewhere_is_not_swept_away(own_cache: Path) -> None:
    own_cache.mkdir(mode=0o700)
    here = cache.place()
    kept = [f".key.building-{here}-{os.getpid()}-abc", ".key.building-node7.402653-1-abc"]
    dead = [f".key.building-{here}-{2**22 + 1}-abc", ".key.building-node7.402653-2-old", ".key.building-older"]
    for name in (*kept, *dead):
        (own_cache / name).mkdir()
    for name in dead[1:]:
        os.utime(own_cache / name, (0, 0))
    cache.cached("key", FILE, Builder())
    assert sorted(x.name for x in own_cache.iterdir() if "building" in x.name) == sorted(kept)


def test_a_stopped_builder_holds_nobody_for_ever(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who is waited for is said; after the limit the waiter builds, and the stopped one takes that when it goes on."""
    monkeypatch.setattr(cache, "_SAY_AFTER", 0.3)
    stopped, took = start(own_cache, tmp_path / "log", 0.2)
    wait_for(tmp_path / "log")
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        monkeypatch.setenv(cache.WAIT, "1")
        assert cache.cached("key", FILE, Builder("own")).read_text() == "own"
        said = capfd.readouterr().err
        assert f"waiting for process {stopped.pid} on " in said
        assert f"after 1 s ({cache.WAIT}) this process builds them itself" in said
        assert f"process {stopped.pid} on " in said.splitlines()[1]
        assert "has not built the native kernels in 1 s; this process builds them" in said
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert took.get(timeout=HANGS_S) == "own"
    stopped.join(timeout=HANGS_S)
    assert sorted(x.name for x in own_cache.iterdir()) == ["key", "key.lock"]


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_limit_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(cache.WAIT, text)
    with pytest.raises(ValueError, match=f"{cache.WAIT} is '{text}'; it must be a number of seconds, 0 or more"):
        cache.cached("key", FILE, never)


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> pwd.struct_passwd:
        raise KeyError(user)

    for name in (cache.VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache.find("key", FILE) is None
    rule = rf"would be ~/.cache/cp-attention, but this user has no home folder .*: set {cache.VARIABLE} to a folder"
    with pytest.raises(Unavailable, match=rule):
        cache.cached("key", FILE, never)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(own_cache: Path, code: int) -> None:
    def build_in(folder: Path) -> None:
        raise OSError(code, os.strerror(code))

    rule = rf"{own_cache}, is full \(.*\): make room there, or set {cache.VARIABLE} to a folder with room"
    with pytest.raises(Unavailable, match=rule):
        cache.cached("key", FILE, build_in)
    assert sorted(x.name for x in own_cache.iterdir()) == ["key.lock"]
