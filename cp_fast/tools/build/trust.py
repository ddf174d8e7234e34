"""Only those files of the cache are used that this user (or root) owns and nobody else may write to; no links.

A library runs with all rights of the user who loads it. The folder of the cache itself may be reached through links.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cp_fast.tools.build.build_errors import Unavailable

__all__ = ["check_entry", "check_root", "make_folder", "open_lock", "read_file", "why_not_ours"]


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
