"""The pytest plugin: options, and one test for every part of the suite.

    pytest --pyargs conformance --cp-impl my.package          in anyone's CI, without a file of one's own
    from conformance.suite import *                         in a test file, whose fixture `impl` says what is tested

An installed package loads it by itself (entry point pytest11); otherwise `-p conformance.plugin`. The plugin imports
nothing of the suite until a test needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from conformance.record import Played

__all__ = ["PARTS_FIXTURE", "Settings", "settings_of"]

PARTS_FIXTURE = "conformance_part"
_PROFILES = ("quick", "ci", "nightly")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options. Values are checked when a conformance test runs."""
    group = parser.getgroup("conformance", "context-parallel attention against the oracle")
    group.addoption("--cp-impl", default=None, help="pkg.module, pkg.module:object, or an entry point's name")
    group.addoption("--cp-profile", default="quick", choices=_PROFILES, help="how many problems are drawn")
    group.addoption("--cp-examples", default=None, type=int, help="problems per tier, not the profile's")
    group.addoption("--cp-device", default="cpu", help="cpu, or cuda")
    group.addoption("--cp-size", default=None, help="only these group sizes, such as 2,3")
    group.addoption("--cp-tier", action="append", default=None, help="only this tier; may be repeated")
    group.addoption("--cp-in-process", action="store_true", help="no worker processes: a crash ends pytest")
    group.addoption("--cp-time-limit", default=60.0, type=float, help="seconds until a problem hangs")
    group.addoption("--cp-known-failures", default=None, type=Path, help="known failures, a TOML file")
    group.addoption("--cp-report", default=None, type=Path, help="a folder for report.html and report.json")


class Settings:
    """The values of the options, and the problems that the tests of this run have played."""

    def __init__(self, config: pytest.Config) -> None:
        option = cast("Callable[[str], Any]", config.getoption)
        self.impl: str | None = option("--cp-impl")
        self.profile: str = option("--cp-profile")
        self.examples: int | None = option("--cp-examples")
        self.device: str = option("--cp-device")
        self.cp_size: str | None = option("--cp-size")
        self.tiers: list[str] | None = option("--cp-tier")
        self.isolate: bool = not option("--cp-in-process")
        self.time_limit: float = option("--cp-time-limit")
        self.known_failures: Path | None = option("--cp-known-failures")
        self.report: Path | None = option("--cp-report")
        self.played: list[Played] = []
        self.meta: dict[str, Any] = {}


_KEY = pytest.StashKey[Settings]()


def settings_of(config: pytest.Config) -> Settings:
    """The settings of this pytest run."""
    if _KEY not in config.stash:
        config.stash[_KEY] = Settings(config)
    return config.stash[_KEY]


def pytest_configure(config: pytest.Config) -> None:
    """A report that cannot be written, or a limit that makes no sense, is a mistake of the command line."""
    option = cast("Callable[..., Any]", config.getoption)
    limit, examples = option("--cp-time-limit", 60.0), option("--cp-examples", None)
    if not 0.1 <= limit <= 1e6:
        raise pytest.UsageError(f"--cp-time-limit is {limit:g}; it must be from 0.1 to 1,000,000 seconds")
    if examples is not None and examples < 1:
        raise pytest.UsageError(f"--cp-examples is {examples}; it must be a positive integer")
    folder = option("--cp-report", None)
    if folder is None:
        return
    from conformance.report import unwritable

    if problem := unwritable(folder):
        raise pytest.UsageError(f"--cp-{problem.removeprefix('--')}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `conformance_part` is made once for every part."""
    if PARTS_FIXTURE not in metafunc.fixturenames:
        return
    from conformance.runner.suite_run import parts

    found = parts(settings_of(metafunc.config).tiers)
    metafunc.parametrize(PARTS_FIXTURE, found, ids=[str(part) for part in found])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report, if one is wanted and something was played."""
    settings = settings_of(session.config)
    if settings.report is None or not settings.played:
        return
    from conformance.record import RunRecord
    from conformance.report import write_report

    write_report(RunRecord(settings.meta, tuple(settings.played)), settings.report)
