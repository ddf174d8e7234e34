"""Commands to type: what plays one problem again, and what started this run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.judge.run_record import Played

__all__ = ["replay_command", "replay_options", "run_command"]

DEFAULT_TIME_LIMIT_S = 60.0
_SUITE = ["python", "-m", "conformance"]


def replay_options(group_kind: str, cp_size: str | None, time_limit_s: float, isolate: bool) -> tuple[str, ...]:
    """The options of a run that a replay needs to repeat a problem exactly.

    Args:
        group_kind: where every rank is a process, --cp-size says how many there are.

    >>> replay_options("process", "2,8", 5.0, True), replay_options("member", "2,8", 60.0, False)
    (('--cp-size', '2,8', '--time-limit', '5'), ('--in-process',))
    """
    sizes = () if cp_size is None or group_kind == "member" else ("--cp-size", cp_size)
    limit = () if time_limit_s == DEFAULT_TIME_LIMIT_S else ("--time-limit", f"{time_limit_s:g}")
    return (*sizes, *limit, *(() if isolate else ("--in-process",)))


def replay_command(meta: Mapping[str, Any], played: Played) -> str:
    """The command that plays a problem again, for a POSIX shell; for an object without a name, a line of Python.

    Args:
        meta: of the run's record: impl, by_name (True without it), device and options.

    >>> replay_command({"impl": "my.attention"}, Played("schedule", "errors", "error lengths-decrease", "wrong"))
    "python -m conformance --impl my.attention --repro 'error lengths-decrease'"
    >>> replay_command({"impl": "<Mine>", "by_name": False}, Played("schedule", "logic", "Case(...)", "wrong"))
    "conformance.replay(impl, 'Case(...)', ['logic'])"
    """
    case, device = played.text.startswith("Case("), str(meta.get("device") or "cpu").split()[0]
    if not meta.get("by_name", True):
        more = [repr([played.tier])] * case + [f"device={device!r}"] * (device != "cpu")
        return f"conformance.replay({', '.join(['impl', repr(played.text), *more])})"
    words = [*_SUITE, "--impl", str(meta.get("impl", "IMPL"))]
    words += ["--device", device] * (device != "cpu")
    words += meta.get("options", ())
    words += ["--tier", played.tier] * case
    return shlex.join([*words, "--repro", played.text])


def run_command() -> str:
    """How this process was started, as it would be typed."""
    program = Path(sys.argv[0])
    words = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join([*words, *sys.argv[1:]])
