"""Finished builds by key, in a folder of the user that any number of processes share.

<root>/<key>/                  a finished build: the library, and build.json with its checksum; appears by one rename
<root>/<key>.lock              held by the one who builds; the kernel lets go of it when that process ends, however
<root>/<key>.failed            why the last try failed, for those who waited for it
<root>/.<key>.building-*/      where it is being built; what a killed builder left goes with the next build
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cp_fast.build.errors import BuildError, Unavailable

__all__ = ["VARIABLE", "cached", "find", "root"]

VARIABLE = "CP_ATTENTION_CACHE"
_RECORD = "build.json"


def root() -> Path:
    """The folder of all builds."""
    if asked := os.environ.get(VARIABLE):
        return Path(asked).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cp-attention"


def find(key: str, file_name: str) -> Path | None:
    """The library of a finished build; None if there is none, or if it is not what was once built."""
    folder = root() / key
    try:
        record = json.loads((folder / _RECORD).read_text())
        content = (folder / file_name).read_bytes()
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("sha256") != hashlib.sha256(content).hexdigest():
        return None
    return folder / file_name


def cached(key: str, file_name: str, build_in: Callable[[Path], None]) -> Path:
    """The library of a build: the finished one, or a new one that `build_in(folder)` makes in an empty folder.

    Of all processes that want it at once one builds, and the others wait for its result, or its failure.

    Raises:
        Unavailable: the cache cannot be written to. BuildError: the build failed.
    """
    if (found := find(key, file_name)) is not None:
        return found
    began = time.time()
    with _writing(), _locked(key) as waited:
        if (found := find(key, file_name)) is not None:
            return found
        if waited and (failure := _failure_since(key, began)) is not None:
            raise BuildError(failure)
        for left_over in root().glob(f".{key}.building-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{key}.building-", dir=root()))
        try:
            build_in(folder)
            _publish(folder, key, file_name)
        except BuildError as error:
            _failed(key).write_text(str(error))
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        _failed(key).unlink(missing_ok=True)
    return root() / key / file_name


def _publish(folder: Path, key: str, file_name: str) -> None:
    """Make a build visible, all of it at once, in place of whatever lies there."""
    content = (folder / file_name).read_bytes()
    record = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "built": time.strftime("%F %T")}
    (folder / _RECORD).write_text(json.dumps(record))
    folder.chmod(0o755)
    target = root() / key
    if target.exists():  # broken, or `find` had found it; a rename cannot replace a folder that is not empty
        target.rename(folder / "broken")
    folder.rename(target)
    shutil.rmtree(target / "broken", ignore_errors=True)


def _failed(key: str) -> Path:
    return root() / f"{key}.failed"


def _failure_since(key: str, began: float) -> str | None:
    """Why a build failed that ended after `began`."""
    try:
        return _failed(key).read_text() if _failed(key).stat().st_mtime >= began else None
    except OSError:
        return None


@contextmanager
def _locked(key: str) -> Iterator[bool]:
    """Hold the key's lock; yields whether it took waiting."""
    import fcntl  # not on Windows, where nothing is built

    with open(root() / f"{key}.lock", "w") as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks: all build, and the last rename stays
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
                raise
        yield waited


@contextmanager
def _writing() -> Iterator[None]:
    """An error of the file system names the folder, and the variable that moves it."""
    try:
        root().mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise Unavailable(
            f"the cache of native kernels, {root()}, cannot be written to ({error}): set {VARIABLE} to a folder "
            "that can be"
        ) from error
