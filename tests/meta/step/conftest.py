"""Processes in which the tests of a file compare steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.meta.step.step_processes import StepProcesses


@pytest.fixture(scope="module")
def steps() -> Iterator[StepProcesses]:
    """They are begun when a test needs them."""
    processes = StepProcesses()
    yield processes
    processes.close()
