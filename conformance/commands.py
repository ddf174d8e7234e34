"""Commands to type: what plays one problem again, what started this run; and the versions and machine that ran it."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from conformance.judge.run_record import Played

__all__ = ["replay_command", "replay_options", "run_command", "version_of", "what_runs"]

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


def what_runs(device: str, *packages: str) -> dict[str, Any]:
    """What this run is, for the `meta` of a record: command, date, device, platform, versions, and the commit of the
    checkout that it runs in, if it is one.

    Args:
        packages: whose versions count, beside PyTorch's and this one's.
    """
    named = f"{device} ({torch.cuda.get_device_name()})" if device.startswith("cuda") else device
    meta: dict[str, Any] = {
        "command": run_command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": named,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: found for name in ("torch", "cp-attention", *packages) if (found := version_of(name))},
    }
    return meta | ({"commit": commit} if (commit := _commit()) else {})


def version_of(name: str) -> str:
    """The version of an installed package; "" of one that is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
