"""The suite as pytest tests, for a test file of one's own:

    from conformance.suite import *

    @pytest.fixture(scope="session")
    def impl():
        return "my.package:attention"

`impl` is a name (see `conformance.implementation.load`), which is played in worker processes, or an object, which is
played in pytest's own. Without the fixture it is what `--cp-impl` says. Everything else is an option of pytest, see
`pytest --help`.

A problem that is not supported and a function that is missing skip their test, with the reason; a known failure
is an expected failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from conformance.cli import cp_sizes_of
from conformance.implementation import LoadError
from conformance.plugin import Settings, settings_of
from conformance.record import TierResult, replay_command, replay_options
from conformance.runner.known_failures import KnownFailures
from conformance.runner.run_tiers import PROFILES
from conformance.runner.suite_run import Part, SuiteRun, describe_run, play_part
from conformance.runner.workers import open_runner

__all__ = ["conformance_settings", "conformance_suite_run", "impl", "test_conformance"]


@pytest.fixture(scope="session")
def impl(request: pytest.FixtureRequest) -> Any:
    """The implementation under test: the option --cp-impl."""
    name = settings_of(request.config).impl
    if name is None:
        pytest.skip("no implementation: give --cp-impl pkg.module, or define a fixture `impl`")
    return name


@pytest.fixture(scope="session")
def conformance_settings(request: pytest.FixtureRequest) -> Settings:
    """The options of this run."""
    return settings_of(request.config)


@pytest.fixture(scope="session")
def conformance_suite_run(impl: Any, conformance_settings: Settings) -> Iterator[SuiteRun]:
    """The implementation, ready to play."""
    options = conformance_settings
    torch.set_num_threads(1)  # the tensors are tiny
    profile = PROFILES[options.profile]
    profile = replace(profile, max_examples=options.examples or profile.max_examples)
    sizes = partial(cp_sizes_of, options.cp_size, device=options.device)
    try:
        runner = open_runner(impl, options.device, options.time_limit, sizes, options.isolate)
    except LoadError as error:
        pytest.fail(str(error), pytrace=False)
    file = options.known_failures
    known = KnownFailures() if file is None else KnownFailures.load(file)
    suite_run = SuiteRun(
        runner, profile, cp_sizes=sizes(runner.info.group_kind), device=options.device, known_failures=known
    )
    more = replay_options(runner.info.group_kind, options.cp_size, options.time_limit, options.isolate)
    options.meta = describe_run(impl, options.profile, suite_run, more)
    yield suite_run
    runner.close()


def test_conformance(conformance_part: Part, conformance_suite_run: SuiteRun, conformance_settings: Settings) -> None:
    """One part of the suite."""
    result = play_part(conformance_suite_run, conformance_part)
    conformance_settings.played += result.played
    if result.smallest:
        pytest.fail(_message(result, conformance_settings), pytrace=False)
    verdicts = {p.verdict for p in result.drawn}
    reasons = "; ".join(dict.fromkeys(finding for p in result.drawn for finding in p.findings[:1])) or result.note
    if "right" not in verdicts:
        if "known" in verdicts:
            pytest.xfail(reasons)
        pytest.skip(reasons or "the implementation refuses nothing")


def _message(result: TierResult, settings: Settings) -> str:
    lines: list[str] = []
    for played in result.smallest:
        lines += [f"{played.verdict}:", *(f"  - {finding}" for finding in played.findings)]
        lines += ["play it again:", f"  {replay_command(settings.meta, played)}", ""]
    return "\n".join(lines)
