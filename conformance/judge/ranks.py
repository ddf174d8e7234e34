"""A function of every rank: the values of all ranks, or findings, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.implementation import Implementation, context
from conformance.judge.reference import Hang, describe_error, run_ranks
from cp_ref.schedules.problem import Problem

__all__ = ["UnsupportedCase", "context_of", "values_of_ranks"]


class UnsupportedCase(Exception):
    """The implementation says, by `supports` and by raising `Unsupported` on every rank, that it does not have this."""


def values_of_ranks(
    cp_size: int, fn: Callable[[Any], Any], *refusals: type[BaseException], limit_s: float = 60.0
) -> tuple[list[Any], list[str]]:
    """`fn(member)` on every rank of a group.

    Returns:
        A value per rank, and no findings. Or no values, and findings: the ranks hang, or some of them raise.

    Raises:
        UnsupportedCase: every rank raised UnsupportedCase, or every rank raised one of `refusals`.
    """
    try:
        outcomes = run_ranks(cp_size, fn, limit_s)
    except Hang as hang:
        return [], [str(hang)]
    errors = [outcome.error for outcome in outcomes]
    if any(all(isinstance(error, kind) for error in errors) for kind in (UnsupportedCase, *refusals)):
        raise UnsupportedCase(str(errors[0]))
    found = [f"rank {rank} raised {describe_error(error)}" for rank, error in enumerate(errors) if error is not None]
    return ([] if found else [outcome.value for outcome in outcomes]), found


def context_of(impl: Implementation, problem: Problem, member: Any) -> Any:
    """One rank's ContextParallel for the problem. Raises UnsupportedCase if it is refused."""
    try:
        return context(impl, problem, member)
    except impl.Unsupported as refusal:
        raise UnsupportedCase(str(refusal)) from refusal
