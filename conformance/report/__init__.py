"""The report of a run, of the suite or of training steps: `report.json` for programs, one self-contained `report.html`
for readers, and JUnit's XML for CI servers.

from conformance.report import write_report
write_report(record, Path("report"))

`python -m conformance.report RECORD.json -o DIR` renders a record, or a `report.json`, again.
"""

from __future__ import annotations

import json
import tempfile
from math import isfinite
from pathlib import Path
from typing import Any

from conformance.record import RunRecord
from conformance.report.page import html, junit, step_html, summary
from conformance.step.report import StepRecord

__all__ = ["read_record", "unwritable", "write_report"]


def write_report(record: RunRecord | StepRecord, folder: Path | None, junit_file: Path | None = None) -> list[Path]:
    """Write report.json and report.html into a folder, which is made where it is not there, and JUnit's XML.

    Args:
        record: what was played, or the steps that were compared. `meta` is shown as it is; of it impl, device and
            command are put to use, and "notes", a list of sentences, is shown first (known failures that no longer
            fail, say).
        folder, junit_file: None where it is not wanted.

    Returns:
        The files. report.json has the record itself and what was counted; `read_record` reads it again.
    """
    texts: dict[Path, str] = {}
    if folder is not None and isinstance(record, StepRecord):
        texts = {folder / "report.json": _json(record.to_json()), folder / "report.html": step_html(record)}
    elif folder is not None and isinstance(record, RunRecord):
        found = summary(record)
        data = {**_brief(record), "summary": found.to_json()}
        texts = {folder / "report.json": _json(data), folder / "report.html": html(found)}
    if junit_file is not None:
        texts[junit_file] = junit(record)
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="backslashreplace")  # a word of the command, say
    return list(texts)


def unwritable(folder: Path | None, junit_file: Path | None = None) -> str:
    """Why `write_report` cannot write, "" when it can. A run asks before it plays for an hour, not after. Folders are
    made if they are not there.

    >>> unwritable(Path("/dev/null/report")), unwritable(None, Path("/"))
    ('--report: cannot write into /dev/null/report: Not a directory', '--junit: / is a folder')
    """
    if folder is not None:
        try:
            import jinja2  # noqa: F401
        except ImportError:
            return "--report: the page needs Jinja: pip install jinja2"
    if junit_file is not None and junit_file.is_dir():
        return f"--junit: {junit_file} is a folder"
    for option, place in (("--report", folder), ("--junit", junit_file and junit_file.parent)):
        try:
            if place is not None:
                place.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=place):
                    pass
        except OSError as error:
            return f"{option}: cannot write into {place}: {error.strerror}"
    return ""


def _brief(record: RunRecord) -> dict[str, Any]:
    """The record without what is empty in most problems, and would be most of the file."""
    data = record.to_json()
    empty = {"ratios": {}, "shrunk": False, "cases": (), "pairs": None}
    played = [{k: v for k, v in p.items() if k not in empty or v != empty[k]} for p in data["played"]]
    return data | {"played": played}


def read_record(path: Path) -> RunRecord | StepRecord:
    """The record in a file: what a run wrote, or a report.json.

    Raises:
        ValueError: it is neither; the message names the file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or "meta" not in data:
            raise ValueError("it is JSON, but no record: it has no 'meta'")
        return (StepRecord if "steps" in data else RunRecord).from_json(data)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"cannot read a record from {path}: {type(error).__name__}: {error}") from error


def _json(data: Any) -> str:
    return json.dumps(_plain(data), separators=(",", ":"), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """A value as JSON: an infinity or a NaN becomes the text that `float` reads back; anything unknown becomes text."""
    match value:
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not isfinite(value):
            return str(value)
        case str() | int() | float() | None:
            return value
    return str(value)
