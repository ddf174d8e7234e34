"""The report of a run: `report.json` for programs and one self-contained `report.html` for readers.

from conformance.report import write_report
write_report(record, Path("report"))

`python -m conformance.report RECORD.json -o DIR` renders a record, or a `report.json`, again.
"""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

from conformance.judge.run_record import RunRecord
from conformance.report.mask_differences import Difference, Pair, visibility_difference
from conformance.report.observed import observed_pairs
from conformance.report.page import html, summary

__all__ = ["Difference", "Pair", "observed_pairs", "read_record", "visibility_difference", "write_report"]


def write_report(record: RunRecord, folder: Path) -> list[Path]:
    """Write report.json and report.html into a folder, which is made where it is not there.

    Args:
        record: what was played. `meta` is shown as it is; of it impl, device and command are put to use, and "notes", a
            list of sentences, is shown first (known failures that no longer fail, say).

    Returns:
        The files. report.json has the record itself and what was counted; `read_record` reads it again.
    """
    found = summary(record)
    folder.mkdir(parents=True, exist_ok=True)
    data = {**_brief(record), "summary": found.to_json()}
    files = [folder / "report.json", folder / "report.html"]
    files[0].write_text(json.dumps(_plain(data), separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")
    files[1].write_text(html(found), encoding="utf-8", errors="backslashreplace")  # a word of the command, say
    return files


def _brief(record: RunRecord) -> dict[str, Any]:
    """The record without what is empty in most problems, and would be most of the file."""
    data = record.to_json()
    empty = {"ratios": {}, "shrunk": False, "cases": (), "pairs": None}
    played = [{k: v for k, v in p.items() if k not in empty or v != empty[k]} for p in data["played"]]
    return data | {"played": played}


def read_record(path: Path) -> RunRecord:
    """The record in a file: what a run wrote, or a report.json.

    Raises:
        ValueError: it is neither; the message names the file.
    """
    try:
        return RunRecord.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"cannot read a record from {path}: {type(error).__name__}: {error}") from error


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
