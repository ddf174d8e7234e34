"""The findings of `benchmarks.conformance_gpu`: counts, their record and their summary."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Counts", "Job", "added", "summary", "write"]

Job = tuple[str, str]  # backend, kind


@dataclass
class Counts:
    """The findings of one worker, or of all, for problems of one kind on one backend."""

    problems: int = 0
    right: collections.Counter[str] = field(default_factory=collections.Counter)  # by tier
    unsupported: int = 0
    by_cp_size: collections.Counter[int] = field(default_factory=collections.Counter)
    by_schedule: collections.Counter[str] = field(default_factory=collections.Counter)
    by_layout: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists. (`asdict` makes counters of pairs out of counters.)"""
        return {name: dict(x) if isinstance(x, collections.Counter) else x for name, x in vars(self).items()}

    def add(self, other: Counts) -> None:
        """Add what another worker found; seconds: the longest."""
        for name, value in vars(other).items():
            setattr(self, name, max(self.seconds, value) if name == "seconds" else getattr(self, name) + value)

    @property
    def wrong(self) -> int:
        """How many problems failed."""
        return len({failure["case"] for failure in self.failures})


def added(jobs: list[Job], found: Iterable[tuple[Job, Counts]]) -> dict[Job, Counts]:
    """The findings of all workers."""
    total = {job: Counts() for job in jobs}
    for job, counts in found:
        total[job].add(counts)
    return total


def write(out: Path | None, record: dict[str, Any], total: dict[Job, Counts]) -> None:
    """The record, and what was found."""
    if out is not None:
        found = {"backends": {", ".join(job): counts.to_json() for job, counts in total.items()}}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record | found, indent=2, default=str) + "\n")


def summary(total: dict[Job, Counts], problems: int, died: list[str]) -> int:
    """Print what was found, the worst last; the exit code."""
    late = 0
    for job, c in total.items():
        late += (unplayed := max(problems - c.problems, 0))
        print(
            f"{', '.join(job):16} right {c.problems - c.wrong}, WRONG {c.wrong}, refused {c.unsupported}, "
            f"NOT REACHED {unplayed}; {dict(c.by_cp_size)} {dict(c.by_schedule)} {dict(c.by_layout)}"
        )
        for failure in c.failures[:6]:
            print("   ", failure["tier"], failure["verdict"], failure["case"], *failure["findings"], sep="\n      ")
    failed = sum(len(c.failures) for c in total.values())
    print(*died, sep="\n")
    if failed or died:
        print(f"FAILED: {failed} findings, {len(died)} parts that did not run")
        return 1
    print(f"NOT REACHED: {late} problems; those that were played are right" if late else "ALL RIGHT")
    return 2 if late else 0
