"""A run as data, which the report, the known failures and the coverage table read: a `Played` for every problem, a
`TierResult`, a `RunRecord`; and the commands that play a problem again."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

import torch

__all__ = [
    "FAILING",
    "LEVELS",
    "MOST",
    "VERDICTS",
    "Judged",
    "Level",
    "Pair",
    "Played",
    "RunRecord",
    "TierResult",
    "Verdict",
    "readable",
    "replay_command",
    "replay_options",
    "run_command",
    "version_of",
    "what_runs",
]

Level = Literal["helpers", "merge", "kernel", "schedule", "linear", "sparse"]
LEVELS: tuple[Level, ...] = get_args(Level)

Verdict = Literal["right", "unsupported", "wrong", "missing", "crashed", "hung", "out of memory", "known"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""right: all checks held. unsupported: refused as it should be. wrong: computed, and not what the oracle says, or an
error that should not be. missing: the implementation does not offer this level or function. crashed: the worker process
died. hung: the watchdog ended it. known: wrong or crashed, and an expected failure.
"""
FAILING: tuple[Verdict, ...] = ("wrong", "crashed", "hung", "out of memory")


MOST = 64  # tokens on either side of a picture
Pair = tuple[int, int]
"""(query row, key row) of the global packed buffers: sequence after sequence with their padding, then the tail. In bshd
and sbhd, batch after batch.
"""


def readable(text: str) -> str:
    """The text with lone surrogates, which no encoding has, as escapes.

    >>> readable("Zürich \\udc80")
    'Zürich \\\\udc80'
    """
    return text.encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class Played:
    """One problem, played once.

    Attributes:
        text: the argument of --repro: "Case(...)", "error ID", "special ID", "known ID", "helper ...", ...
        findings: sentences; for unsupported and missing, the reason.
        ratios: error / bound of the budget tier's "out max", "dq mean" and so on.
        shrunk: the smallest failing problem found, and not one drawn.
        cases: for a text that is a name: each "Case(...)" played, and its verdict, so that the tables can count it.
        pairs: who saw whom: (query row, key row) of the global packed buffers, padding and tails counted. None if no
            probe can tell.
    """

    level: Level
    tier: str
    text: str
    verdict: Verdict
    findings: tuple[str, ...] = ()
    ratios: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    shrunk: bool = False
    cases: tuple[tuple[str, Verdict], ...] = ()
    pairs: tuple[Pair, ...] | None = None

    def __post_init__(self) -> None:
        """Messages of other libraries can be printed and written."""
        object.__setattr__(self, "findings", tuple(readable(finding) for finding in self.findings))


@dataclass(frozen=True)
class RunRecord:
    """A whole run. `meta` says what ran where: impl, versions, device, profile, seed, date, commit, command."""

    meta: dict[str, Any]
    played: tuple[Played, ...]

    @property
    def drawn(self) -> tuple[Played, ...]:
        """The problems that count: all drawn ones and all of tables, once for each tier that played them. Shrinking
        finds smaller forms of these, which do not count.
        """
        return tuple(p for p in self.played if not p.shrunk) or self.played

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists; `from_json` reads it back.

        >>> record = RunRecord({"impl": "x"}, (Played("schedule", "logic", "Case(...)", "right"),))
        >>> RunRecord.from_json(record.to_json()) == record
        True
        """
        return {"meta": self.meta, "played": [vars(p) | {"findings": list(p.findings)} for p in self.played]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> RunRecord:
        """The record that `to_json` wrote."""
        return RunRecord(data["meta"], tuple(_played(p) for p in data["played"]))


def _played(data: dict[str, Any]) -> Played:
    """Lists, which is all that JSON has, become tuples again, and "inf" and "nan" numbers."""
    ratios = {name: float(ratio) for name, ratio in data.get("ratios", {}).items()}
    pairs = data.get("pairs")
    pairs = None if pairs is None else tuple((int(q), int(k)) for q, k in pairs)
    cases = tuple((text, verdict) for text, verdict in data.get("cases", ()))
    return Played(**{**data, "findings": tuple(data["findings"]), "ratios": ratios, "cases": cases, "pairs": pairs})


class Judged(list[str]):
    """The findings, a list of sentences that is empty when all is well, and the measurements.

    A tier may as well return a plain list. `ratios` are error / bound, named "out max", "dq mean", ...; `cases` says of
    a named problem what became of each "Case(...)" that it plays.

    >>> judged = Judged([], {"out max": 0.5})
    >>> judged == [], judged.ratios
    (True, {'out max': 0.5})
    """

    def __init__(
        self,
        findings: Iterable[str] = (),
        ratios: Mapping[str, float] | None = None,
        cases: Mapping[str, Verdict] | None = None,
    ) -> None:
        super().__init__(findings)
        self.ratios = dict(ratios or {})
        self.cases: dict[str, Verdict] = dict(cases or {})


@dataclass
class TierResult:
    """The problems that a tier played: every one that was drawn or is in its table, and the smallest failing ones."""

    tier: str
    played: list[Played] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""

    @property
    def drawn(self) -> list[Played]:
        """Without those that shrinking found."""
        return [p for p in self.played if not p.shrunk]

    @property
    def run(self) -> int:
        """How many problems were played, shrinking left out."""
        return len(self.drawn)

    def count(self, *verdicts: str) -> int:
        """How many of them got one of these verdicts."""
        return sum(p.verdict in verdicts for p in self.drawn)

    @property
    def passed(self) -> int:
        """How many are right."""
        return self.count("right")

    @property
    def unsupported(self) -> int:
        """How many are refused as they should be."""
        return self.count("unsupported")

    @property
    def judged(self) -> int:
        """How many were computed, rightly or not."""
        return self.run - self.count("unsupported", "missing")

    @property
    def smallest(self) -> list[Played]:
        """The failing problems: of a drawn tier the smallest of each kind, of a table all of them."""
        shrunk = [p for p in self.played if p.shrunk]
        return shrunk or [p for p in self.played if p.verdict in FAILING]


# ---- commands that play one problem again, or the run; versions, and the machine


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
    """The `meta` of a record of this run: command, date, device, platform, versions, and the commit of the
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
