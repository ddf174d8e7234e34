"""Finished builds by key, in a folder of the user that any number of processes share.

    <root>/<key>/                  a finished build: the library, and build.json with its checksum. It appears by one
                                   rename.
    <root>/<key>.lock              held by the building process, whose id is in it.
    <root>/<key>.failed            why the last try failed, for the waiting processes.
    <root>/.<key>.building-*/      one process's build folder; the next build removes leftovers.

Only those files are used that this user (or root) owns and nobody else may write to; no links. A library runs with all
rights of the user who loads it. The folder of the cache itself may be reached through links.

One process builds at a time, as far as locks work; no process waits for ever. The kernel releases a lock when its
process ends, for any reason. A lock does not tell if its builder was suspended. Some file systems have no locks, or
separate ones on each node. Nothing here relies on them: then several processes build the same library, the first to
finish is kept, and no process touches another's build folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cp_fast.build.recipe import BuildError, Unavailable
from cp_fast.log import log

__all__ = [
    "FULL",
    "VARIABLE",
    "WAIT",
    "cached",
    "find",
    "find_first",
    "own_folder",
    "place",
    "root",
]

# ---- whose files are used


def why_not_ours(found: os.stat_result) -> str | None:
    """The reason not to use a file or folder; None if it can be used."""
    user = os.geteuid() if hasattr(os, "geteuid") else found.st_uid  # Windows, where nothing is built, has no users
    if found.st_uid not in (user, 0):
        return f"belongs to user {found.st_uid}, and this is user {user}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written to by others (its mode is {stat.S_IMODE(found.st_mode):o})"
    return None


def make_folder(folder: Path) -> None:
    """Make a folder and its parents if missing: open to this user alone under any umask."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():  # Another process has not just made it: it is not a folder.
            raise
    else:
        folder.chmod(0o700)  # A umask removes rights from this user too.


def check_root(folder: Path, variable: str) -> None:
    """Raise Unavailable unless the folder of all builds is ours alone to write to; OSError if it is not there."""
    if (reason := why_not_ours(folder.stat())) is not None:
        raise Unavailable(
            f"the cache of native kernels, {folder}, {reason}: what it holds could be anybody's. Take the rights of "
            f"others away (chmod go-w), or set {variable} to a folder of this user alone"
        )


def check_entry(folder: Path) -> None:
    """Raise PermissionError unless this is a folder, not a link to one, and ours."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is no folder")
    _refuse(folder, found)


def read_file(path: Path) -> bytes:
    """A file's content; PermissionError unless it is a plain file of ours, OSError as for any file."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        _check_plain(path, os.fstat(file.fileno()))
        return file.read()


def open_lock(path: Path) -> int:
    """A lock's file as a descriptor, made if missing; its content is kept. Raises as `read_file`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        _check_plain(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_plain(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise PermissionError(f"{path} is no plain file")
    _refuse(path, found)


def _refuse(path: Path, found: os.stat_result) -> None:
    if (reason := why_not_ours(found)) is not None:
        raise PermissionError(f"{path} {reason}")


# ---- one builder at a time


WAIT = "CP_ATTENTION_BUILD_WAIT"
_DEFAULT = 600.0  # Seconds: some builds are for many GPU architectures on few cores.
_SAY_AFTER = 5.0
_LINUX_ENOTSUPP = 524  # Some network file systems return it; errno lacks it.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, _LINUX_ENOTSUPP)


@contextmanager
def exclusive(path: Path, done: Callable[[], bool]) -> Iterator[bool]:
    """Wait until this process may build; it holds the lock until the block ends.

    Yields:
        Whether another process held the lock before, so that there may be a result or a failure. Also False if this
        process builds without the lock: locks do not work, or the holder took too long.

    Raises:
        OSError: the lock is not ours or cannot be made. ValueError: the environment variable cannot be read.
    """
    limit = _limit()
    descriptor = open_lock(path)
    try:
        yield _wait(descriptor, path, done, limit)
    finally:
        os.close(descriptor)


def place() -> str:
    """The scope of process ids: this host and this container's process namespace."""
    try:
        processes = f"{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        processes = "0"
    return f"{socket.gethostname().replace('/', '_')}.{processes}"


def _wait(descriptor: int, path: Path, done: Callable[[], bool], limit: float) -> bool:
    import fcntl  # Not on Windows, where nothing is built.

    began, waited, said, pause = time.monotonic(), False, False, 0.02
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return waited
        if done():
            return True
        seconds = time.monotonic() - began
        if seconds >= limit:
            log(f"{_holder(descriptor)} has not built the native kernels in {seconds:.0f} s; this process builds them")
            return False
        if not said and seconds >= _SAY_AFTER:
            said = True
            log(
                f"waiting for {_holder(descriptor)}, which builds the native kernels and holds {path}; "
                f"after {limit:g} s ({WAIT}) this process builds them itself"
            )
        time.sleep(pause)
        waited, pause = True, min(2 * pause, 0.5)


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"


def _limit() -> float:
    text = os.environ.get(WAIT) or str(_DEFAULT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{WAIT} is {text!r}; it must be a number of seconds, 0 or more")
    return seconds


# ---- builds by key


VARIABLE = "CP_ATTENTION_CACHE"
FULL = (errno.ENOSPC, errno.EDQUOT)
_RECORD = "build.json"
_BUILDING = ".building-"
_A_DAY = 24 * 3600


def root() -> Path:
    """The folder of all builds.

    Raises:
        Unavailable: there is no home folder for it.
    """
    asked = os.environ.get(VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return (Path(asked).expanduser() if asked else Path(cache).expanduser() / "cp-attention").absolute()
    except RuntimeError as error:
        raise Unavailable(
            f"the cache of native kernels would be {asked or f'{cache}/cp-attention'}, but this user has no home "
            f"folder ({error}): set {VARIABLE} to a folder that can be written to"
        ) from error


def own_folder(name: str = "") -> Path:
    """The folder of all builds, or one of this name in it, made if missing. Every user of the cache gets its folder
    here.

    Raises:
        Unavailable: the folder of all builds is not this user's alone, or there is no home folder. OSError: a folder
        cannot be made, or the one inside is not this user's alone.
    """
    folder = root()
    make_folder(folder)
    check_root(folder, VARIABLE)
    if name:
        folder /= name
        make_folder(folder)
        check_entry(folder)
    return folder


def find(key: str, file_name: str) -> Path | None:
    """The library of a finished build; None if it is missing, not ours, or changed since it was built."""
    try:
        check_root(root(), VARIABLE)
    except (OSError, Unavailable):
        return None
    return _library_in(root() / key, file_name)


def find_first(prefix: str, file_name: str) -> Path | None:
    """As `find`, for the newest build whose key has this prefix."""
    try:
        keys = sorted((-path.stat().st_mtime, path.name) for path in root().iterdir() if path.name.startswith(prefix))
    except (OSError, Unavailable):
        return None
    return next((found for _, key in keys if (found := find(key, file_name)) is not None), None)


def cached(key: str, file_name: str, build_in: Callable[[Path], None]) -> Path:
    """The library of a build: the finished one, or a new one that `build_in(folder)` makes in an empty folder.

    If several processes want it at once, one builds, and the others wait for its result or failure.

    Raises:
        Unavailable: the cache cannot be written to, or is not this user's alone. BuildError: the build failed.
    """
    if (found := find(key, file_name)) is not None:
        return found
    began = time.time()
    with _writing(), exclusive(root() / f"{key}.lock", lambda: find(key, file_name) is not None) as waited:
        if (found := find(key, file_name)) is not None:
            return found
        if waited and (failure := _failure_since(key, began)) is not None:
            raise BuildError(failure)
        _sweep()
        folder = _own_folder(key)
        try:
            build_in(folder)
            _publish(folder, key, file_name)
        except BuildError as error:
            with suppress(OSError):  # A full disk: the failure itself matters more.
                _failed(key).write_text(str(error))
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        _failed(key).unlink(missing_ok=True)
    return root() / key / file_name


def _library_in(folder: Path, file_name: str) -> Path | None:
    try:
        check_entry(folder)
        record = json.loads(read_file(folder / _RECORD))
        content = read_file(folder / file_name)
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("sha256") != hashlib.sha256(content).hexdigest():
        return None
    return folder / file_name


def _own_folder(key: str) -> Path:
    """An empty folder that no other process touches while this one lives: its name contains the process id."""
    return Path(tempfile.mkdtemp(prefix=f".{key}{_BUILDING}{place()}-{os.getpid()}-", dir=root()))


def _sweep() -> None:
    """Remove the folders of killed builders: their process is gone, or the folder is a day old."""
    builder_here = re.compile(rf"\..*{re.escape(_BUILDING + place())}-(\d+)-\w+")
    for folder in root().glob(f".*{_BUILDING}*"):
        with suppress(OSError):
            found = builder_here.fullmatch(folder.name)
            if (found and not _alive(int(found[1]))) or folder.stat().st_mtime < time.time() - _A_DAY:
                shutil.rmtree(folder, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _publish(folder: Path, key: str, file_name: str) -> None:
    """Make a build visible by one rename. One that another process finished first stays; a broken one is removed."""
    content = (folder / file_name).read_bytes()
    record = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "built": time.strftime("%F %T")}
    (folder / _RECORD).write_text(json.dumps(record))
    for path in (folder / _RECORD, folder / file_name, folder):
        path.chmod(0o755 if path.is_dir() else 0o644)
    target = root() / key
    while True:
        try:
            folder.rename(target)
            return
        except OSError as error:  # A rename replaces only an empty folder.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if find(key, file_name) is not None:
            return
        _move_away(target, key, file_name)


def _move_away(target: Path, key: str, file_name: str) -> None:
    """Remove a broken build. If another process has just replaced it, put that one back."""
    aside = _own_folder(key)
    with suppress(FileNotFoundError):
        target.rename(aside / "broken")
        if _library_in(aside / "broken", file_name) is not None:
            with suppress(OSError):
                (aside / "broken").rename(target)
    shutil.rmtree(aside, ignore_errors=True)


def _failed(key: str) -> Path:
    return root() / f"{key}.failed"


def _failure_since(key: str, began: float) -> str | None:
    """The error of a build that failed after `began`."""
    try:
        return _failed(key).read_text() if _failed(key).stat().st_mtime >= began else None
    except OSError:
        return None


@contextmanager
def _writing() -> Iterator[None]:
    """Let a file system error name the folder, and the variable that moves it."""
    try:
        own_folder()
        yield
    except OSError as error:
        if error.errno in FULL:
            raise Unavailable(
                f"the cache of native kernels, {root()}, is full ({error}): make room there, or set {VARIABLE} to a "
                "folder with room"
            ) from error
        raise Unavailable(
            f"the cache of native kernels, {root()}, cannot be written to ({error}): set {VARIABLE} to a folder "
            "that can be"
        ) from error
