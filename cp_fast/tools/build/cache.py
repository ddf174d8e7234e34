"""Finished builds by key, in a folder of the user that any number of processes share.

    <root>/<key>/                  a finished build: the library, and build.json with its checksum. It appears by one
                                   rename.
    <root>/<key>.lock              held by the building process, whose id is in it (`locks`).
    <root>/<key>.failed            why the last try failed, for the waiting processes.
    <root>/.<key>.building-*/      one process's build folder; the next build removes leftovers.

Nothing here relies on locks: without them several processes build the same library, the first to finish is kept, and no
process touches another's build folder. Only files that are this user's are used (`trust`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cp_fast.tools.build import locks, trust
from cp_fast.tools.build.build_errors import BuildError, Unavailable

__all__ = ["FULL", "VARIABLE", "cached", "find", "find_first", "own_folder", "root"]

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
    trust.make_folder(folder)
    trust.check_root(folder, VARIABLE)
    if name:
        folder /= name
        trust.make_folder(folder)
        trust.check_entry(folder)
    return folder


def find(key: str, file_name: str) -> Path | None:
    """The library of a finished build; None if it is missing, not ours, or changed since it was built."""
    try:
        trust.check_root(root(), VARIABLE)
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
    with _writing(), locks.exclusive(root() / f"{key}.lock", lambda: find(key, file_name) is not None) as waited:
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
        trust.check_entry(folder)
        record = json.loads(trust.read_file(folder / _RECORD))
        content = trust.read_file(folder / file_name)
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("sha256") != hashlib.sha256(content).hexdigest():
        return None
    return folder / file_name


def _own_folder(key: str) -> Path:
    """An empty folder that no other process touches while this one lives: its name contains the process id."""
    return Path(tempfile.mkdtemp(prefix=f".{key}{_BUILDING}{locks.place()}-{os.getpid()}-", dir=root()))


def _sweep() -> None:
    """Remove the folders of killed builders: their process is gone, or the folder is a day old."""
    builder_here = re.compile(rf"\..*{re.escape(_BUILDING + locks.place())}-(\d+)-\w+")
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
