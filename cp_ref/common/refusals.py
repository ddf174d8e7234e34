"""Refusals before the ranks agree: all ranks learn that one rank refuses its arguments."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from cp_ref.common.context import ContextParallel
from cp_ref.spec import tell

__all__ = ["told_to_all"]


@contextmanager
def told_to_all(cp: ContextParallel, what: str = "an agreement on a call") -> Generator[None]:
    """Read a call's arguments inside, and send nothing; a call that begins with an agreement follows.

    Raises:
        Whatever is raised inside. The other ranks, which are about to agree, raise a ValueError that quotes it.

    >>> from cp_ref import ContextParallel, SimGroup
    >>> def one(member):
    ...     with told_to_all(ContextParallel(member)):
    ...         raise ValueError("causal is 'no'; it must be True or False")
    >>> SimGroup(2).run(one)
    Traceback (most recent call last):
        ...
    ValueError: causal is 'no'; it must be True or False
    """
    try:
        yield
    except Exception as error:  # any error: the other ranks must not wait for this one
        with cp.alone(what):
            tell(cp.comm, error)
        raise
