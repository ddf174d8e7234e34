"""Calls that all ranks make: all raise if one rank refuses its arguments, also for an unknown keyword."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch.distributed as dist

from cp_ref.common.context import ContextParallel
from cp_ref.common.groups.process_groups import ProcessMember
from cp_ref.common.refusals import told_to_all
from cp_ref.spec import Group

__all__ = ["RefusedElsewhere", "collective", "name_of_rank", "tell_context", "together"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class RefusedElsewhere(ValueError):
    """Another rank refused its arguments and told all others."""


def together(groups: Sequence[Group], read: Callable[[], T], merge: Callable[[list[T]], T]) -> T:
    """Read on all ranks, and merge their values; if one of them raises, all raise. Collective.

    Args:
        groups: this rank's groups, such as those of a mesh, one for each dimension: all ranks of all of them take part.
        read: sends nothing.
        merge: makes one value of those of a group's ranks, by rank; the same on all of them.

    Raises:
        This rank's own error. ValueError: another rank has one; it names the rank and quotes its error.

    >>> from cp_ref import SimGroup
    >>> SimGroup(3).run(lambda member: together([member], lambda: member.rank, sum))
    [3, 3, 3]
    """
    found: list[T] = []
    said, error = "", None
    try:
        found = [read()]
    except Exception as caught:  # any error: the other ranks must not wait for this one
        own = f"{name_of_rank(groups)} refused its arguments: {type(caught).__name__}: {caught}"
        said, error = str(caught) if isinstance(caught, RefusedElsewhere) else own, caught
    for group in groups:
        everyone = group.all_gather_object((found, said))
        said = said or next((complaint for _, complaint in everyone if complaint), "")
        found = [] if said else [merge([value for values, _ in everyone for value in values])]
    if error is not None:
        raise error
    if said:
        raise RefusedElsewhere(said)
    return found[0]


def name_of_rank(groups: Sequence[Group]) -> str:
    """This rank's name in other ranks' errors.

    >>> from cp_ref.spec import PaperGroup
    >>> name_of_rank([PaperGroup(4, rank=2)])
    'rank 2'
    """
    processes = len(groups) > 1 or any(isinstance(group, ProcessMember) for group in groups)
    return f"global rank {dist.get_rank()}" if processes and dist.is_initialized() else f"rank {groups[0].rank}"


def tell_context(given: dict[str, Any], error: Exception) -> NoReturn:
    """Raise an error on the ranks of the context that a call was given as `cp`, which are about to agree on it."""
    if isinstance(cp := given.get("cp"), ContextParallel):
        with told_to_all(cp):
            raise error
    raise error


def collective(tell: Callable[[dict[str, Any], Exception], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of a function that begins with an agreement. An unknown keyword, or a missing argument, raises
    TypeError and is told to the other ranks.

    Args:
        tell: gets the call's unchecked keywords and the error; meets the other ranks where the function would, and
            raises.

    >>> from cp_ref import SimGroup
    >>> @collective(tell_context)
    ... def call(*, cp): ...
    >>> SimGroup(2).run(lambda member: call(cp=ContextParallel(member), casual=True))
    Traceback (most recent call last):
        ...
    TypeError: call() got an unexpected keyword argument 'casual'
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                tell(kwargs, TypeError(f"{function.__name__}() {error}"))
            return function(*args, **kwargs)

        return call

    return decorate
