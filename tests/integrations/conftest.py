"""Processes in which the tests of a file compare steps: `compare_step` would begin some for each comparison."""

from tests.meta.step.conftest import steps

__all__ = ["steps"]
