"""A folder for the report: whether it can be written to is found out before an hour of playing, not after."""

from __future__ import annotations

import tempfile
from pathlib import Path

__all__ = ["unwritable"]


def unwritable(folder: Path) -> str:
    """Why nothing can be written into the folder, which is made if it is not there; empty when it can.

    >>> unwritable(Path("/dev/null/report"))
    'cannot write into /dev/null/report: Not a directory'
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"cannot write into {folder}: {error.strerror}"
