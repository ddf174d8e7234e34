"""Whether a report can be written; a run asks before it plays for an hour, not after."""

from __future__ import annotations

import tempfile
from pathlib import Path

__all__ = ["unwritable"]


def unwritable(folder: Path) -> str:
    """Why no report can be written into the folder, which is made if it is not there; empty when it can.

    >>> unwritable(Path("/dev/null/report"))
    'cannot write into /dev/null/report: Not a directory'
    """
    try:
        import jinja2  # noqa: F401
    except ImportError:
        return "the report's page needs Jinja, which the extra 'test' has: pip install 'cp-attention[test]'"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"cannot write into {folder}: {error.strerror}"
