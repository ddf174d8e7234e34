"""Small collectives, spelled out as exchanges: everyone to everyone, combined in rank order, so equal on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import reduce, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from cp_ref.groups.context import ContextParallel
from cp_ref.groups.group import Group, PairGroup, Parcel, tell
from cp_ref.groups.process_groups import ProcessMember, error_context

__all__ = [
    "RefusedElsewhere",
    "all_gather",
    "all_reduce_max",
    "all_reduce_sum",
    "all_to_all",
    "collective",
    "name_of_rank",
    "offset_grad",
    "raise_on_all",
    "tell_context",
    "together",
]


def all_to_all(group: Group, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send `parts[r]` to rank r, all of one shape and dtype; return the part received from each rank."""
    if isinstance(group, PairGroup):
        return _pair_all_to_all(group, parts)
    peers = [r for r in range(group.size) if r != group.rank]
    buffers = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in parts]
    buffers[group.rank] = parts[group.rank]
    sends = [Parcel(r, 0, parts[r].contiguous()) for r in peers]
    group.exchange(sends, [Parcel(r, 0, buffers[r]) for r in peers]).wait()
    return buffers


def _pair_all_to_all(group: PairGroup, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """In two hops: along the row to the column that a part goes to, then along that column."""
    across, along = group.a2a.size, group.p2p.size
    to_columns = [torch.stack([parts[p * across + a] for p in range(along)]) for a in range(across)]
    from_row = all_to_all(group.a2a, to_columns)  # [a]: the parts of rank a of this row for this column, by its rows
    to_rows = [torch.stack([from_row[a][p] for a in range(across)]) for p in range(along)]
    return [part for row in all_to_all(group.p2p, to_rows) for part in row]


def all_gather(group: Group, x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's x (of one shape and dtype), by rank."""
    return all_to_all(group, [x] * group.size)


def all_reduce_sum(group: Group, x: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's x (small: h_q values), added in rank order."""
    with error_context("a sum over all ranks"):
        return reduce(torch.add, all_gather(group, x))


def all_reduce_max(group: Group, x: torch.Tensor) -> torch.Tensor:
    """The elementwise maximum of every rank's x."""
    with error_context("a maximum over all ranks"):
        return reduce(torch.maximum, all_gather(group, x))


def offset_grad(cp: ContextParallel, share: torch.Tensor) -> torch.Tensor:
    """The gradient of softmax_offset [h_q], of the part that comes from this rank's queries: see `ContextParallel`."""
    return all_reduce_sum(cp.comm, share) if cp.softmax_offset_grad == "total" else share


@contextmanager
def raise_on_all(cp: ContextParallel) -> Generator[None]:
    """Read a call's arguments inside, and send nothing; a call that begins with an agreement follows.

    Raises:
        Whatever is raised inside. The other ranks, which are about to agree, raise a ValueError that quotes it.

    >>> from cp_ref import ContextParallel, SimGroup
    >>> def one(member):
    ...     with raise_on_all(ContextParallel(member)):
    ...         raise ValueError("causal is 'no'; it must be True or False")
    >>> SimGroup(2).run(one)
    Traceback (most recent call last):
        ...
    ValueError: causal is 'no'; it must be True or False
    """
    try:
        yield
    except Exception as error:  # any error: the other ranks must not wait for this one
        with cp.naming_errors("an agreement on a call"):
            tell(cp.comm, error)
        raise


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

    >>> from cp_ref.groups.group import PaperGroup
    >>> name_of_rank([PaperGroup(4, rank=2)])
    'rank 2'
    """
    processes = len(groups) > 1 or any(isinstance(group, ProcessMember) for group in groups)
    return f"global rank {dist.get_rank()}" if processes and dist.is_initialized() else f"rank {groups[0].rank}"


def tell_context(given: dict[str, Any], error: Exception) -> NoReturn:
    """Raise an error on the ranks of the context that a call was given as `cp`, which are about to agree on it."""
    if isinstance(cp := given.get("cp"), ContextParallel):
        with raise_on_all(cp):
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
