"""Errors of a build."""

from __future__ import annotations

__all__ = ["BuildError", "Unavailable"]


class Unavailable(RuntimeError):
    """Something that a build needs is not on this machine; the message names it."""


class BuildError(RuntimeError):
    """A build was tried and failed; the message has the command and what the compiler said."""
