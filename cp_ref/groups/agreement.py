"""All ranks raise, or none does: each rank reads its arguments, and the ranks meet, before a call sends anything else.

    agreed        gives this rank's reading, once all ranks have read the same
    merged        gives one value, made of what all ranks have read
    collective    decorates a function that begins with one of these, so that a wrong keyword reaches all ranks too

In a meeting each rank gives the others what it has read, or why it refuses its arguments. Both kinds of meeting have
the same form. So a rank that refuses is heard by all that wait for it, whatever they have come for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch.distributed as dist

from cp_ref.groups.context import ContextParallel
from cp_ref.groups.group import Group
from cp_ref.groups.process_groups import ProcessMember, error_context

__all__ = ["Agreed", "Ranks", "agreed", "collective", "merged"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Ranks = ContextParallel | Sequence[Group]
"""The ranks that meet: those of a context, or those of this rank's groups, such as a mesh's, one for each dimension."""


class Agreed(Protocol):
    """A value that all ranks must have in common: a `Problem`, an `Agreement`, or anything else with a canonical text,
    its `str`, of the form `Name(argument=value, ...)`.
    """

    @property
    def fingerprint(self) -> bytes:
        """Equal where all of it is equal."""
        ...


def agreed(
    ranks: Ranks,
    what: str,
    read: Callable[[], T],
    same: Callable[[T], Agreed] | None = None,
    known: set[bytes] | None = None,
) -> T:
    """This rank's reading, once every rank has read its own arguments and all have the same; else all ranks raise.

    Args:
        ranks: of one group.
        what: the work; errors of messages name it.
        read: reads and checks the arguments of this rank; sends nothing.
        same: what all ranks must have in common, of a reading. None: they do not meet here, since a function that
            begins with a meeting is called next. Of an error they hear there.
        known: fingerprints on which the ranks have agreed before; for these nothing is sent. A new one is added.

    Raises:
        Whatever `read` raises here; with a note if the other ranks do not listen, as they know their call. ValueError:
        another rank refused its arguments, or has others; it names the rank and quotes its error.

    >>> from cp_ref import SimGroup
    >>> def one(member):
    ...     def read():
    ...         raise TypeError("causal is 'no'; it must be True or False")
    ...     return agreed(ContextParallel(member), "a call", read)
    >>> SimGroup(2).run(one)
    Traceback (most recent call last):
        ...
    TypeError: causal is 'no'; it must be True or False
    """
    found = _read(ranks, what, read)
    if same is not None:
        wanted, known = same(found), set[bytes]() if known is None else known
        if wanted.fingerprint not in known:
            [group] = _groups(ranks)
            with _naming(ranks, what):
                _compare(group, wanted)
            known.add(wanted.fingerprint)
    return found


def merged(ranks: Ranks, what: str, read: Callable[[], T], merge: Callable[[list[T]], T]) -> T:
    """One value, made of what all ranks have read; if one of them raises, all raise. Collective.

    Args:
        ranks: all of them take part.
        what: the work; errors of messages name it.
        read: reads and checks the arguments of this rank; sends nothing.
        merge: makes one value of those of a group's ranks, by rank. It raises on all of them, or on none.

    Raises:
        Whatever `read` raises here. ValueError: another rank has an error; it names the rank and quotes its error.

    >>> from cp_ref import SimGroup
    >>> SimGroup(3).run(lambda member: merged([member], "a sum", lambda: member.rank, sum))
    [3, 3, 3]
    """
    value: Any = _read(ranks, what, read)
    refusal: _Refusal | None = None
    with _naming(ranks, what):
        for group in _groups(ranks):
            everyone: list[tuple[Any, _Refusal | None]] = group.all_gather_object((value, refusal))
            refusal = next((told for _, told in everyone if told), None)
            value = None if refusal else merge([theirs for theirs, _ in everyone])
    if refusal:
        raise _RefusedElsewhere(refusal)
    return value


def _ranks_of_cp(given: dict[str, Any]) -> Ranks:
    """The ranks of the context that a call was given as `cp`; none without one."""
    return cp if isinstance(cp := given.get("cp"), ContextParallel) else ()


def collective(
    ranks: Callable[[dict[str, Any]], Ranks] = _ranks_of_cp,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of a function that begins with a meeting. An unknown keyword, or a missing argument, raises TypeError
    and is told to the other ranks.

    Args:
        ranks: finds those that the function meets, in its unchecked keywords. By default those of the context `cp`.

    >>> from cp_ref import SimGroup
    >>> @collective()
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
                wrong = TypeError(f"{function.__name__}() {error}")
                _tell(ranks(kwargs), "an agreement on a call", wrong)
                raise wrong from None
            return function(*args, **kwargs)

        return call

    return decorate


# ---- a meeting


class _Refusal(NamedTuple):
    """Why a rank refused its arguments, as it tells the others."""

    who: str
    why: str

    def __str__(self) -> str:
        return f"{self.who} refused its arguments: {self.why}"


class _RefusedElsewhere(ValueError):
    """The error of a rank that others have told of a refusal, its one argument. It tells further groups the same."""


def _read(ranks: Ranks, what: str, read: Callable[[], T]) -> T:
    """This rank's reading. If it raises, the other ranks, which are about to meet, are told."""
    try:
        return read()
    except Exception as error:  # After any error the other ranks must not wait for this one.
        _tell(ranks, what, error)
        raise


def _tell(ranks: Ranks, what: str, error: Exception) -> None:
    """Give an error to ranks that are about to meet. Where they do not listen, the error gets a note that says so."""
    groups = _groups(ranks)
    with _naming(ranks, what):
        try:
            for group in groups:
                who, why = _name_of_rank(groups), f"{type(error).__name__}: {error}"
                refusal = error.args[0] if isinstance(error, _RefusedElsewhere) else _Refusal(who, why)
                group.all_gather_object((None, refusal))
        except Exception as other:
            error.add_note(f"The other ranks could not be told: {other}")


def _groups(ranks: Ranks) -> Sequence[Group]:
    return [ranks.comm] if isinstance(ranks, ContextParallel) else ranks


def _naming(ranks: Ranks, what: str) -> AbstractContextManager[None]:
    return ranks.naming_errors(what) if isinstance(ranks, ContextParallel) else error_context(what)


def _name_of_rank(groups: Sequence[Group]) -> str:
    """This rank's name in other ranks' errors.

    >>> from cp_ref.groups.group import PaperGroup
    >>> _name_of_rank([PaperGroup(4, rank=2)])
    'rank 2'
    """
    processes = len(groups) > 1 or any(isinstance(group, ProcessMember) for group in groups)
    return f"global rank {dist.get_rank()}" if processes and dist.is_initialized() else f"rank {groups[0].rank}"


# ---- what differs


def _compare(group: Group, mine: Agreed) -> None:
    """Raise on all ranks unless all have the same, with the first difference. Collective."""
    everyone = group.all_gather_object(((mine.fingerprint, getattr(mine, "compared", ())), None))
    for rank, (_, refusal) in enumerate(everyone):
        if refusal is not None:
            raise ValueError(f"rank {rank} refused its arguments, so rank {group.rank} does not start: {refusal.why}")
    if all(theirs == everyone[0][0] for theirs, _ in everyone):
        return
    texts = group.all_gather_object(str(mine))  # all ranks see the same fingerprints, so all come here
    for rank, text in enumerate(texts):
        if text != texts[group.rank]:
            here, there = (_function(one) for one in (texts[group.rank], text))
            if here != there:
                raise ValueError(
                    f"the ranks call different functions: rank {group.rank} calls {here}; rank {rank} calls {there}"
                )
            here, there = _difference(texts[group.rank], text)
            cure = next((cure for name, cure in _CURES.items() if here.startswith(f"{name}=")), "")
            raise ValueError(
                f"the ranks have different problems: rank {group.rank} has {here} where rank {rank} has {there}{cure}"
            )


_CURES = {
    "requires_grad": "; all ranks must need gradients, or none. A linear or sparse layer under "
    "torch.compile has requires_grad=False here: compile it on all ranks, or on none"
}

_LISTS = ("sequences", "areas")


def _difference(one: str, other: str) -> tuple[str, str]:
    """The first arguments in which two canonical texts differ; of sequences and areas, the first different one.

    >>> _difference("Problem(cp_size=2, d_qk=16)", "Problem(cp_size=2, d_qk=32)")
    ('d_qk=16', 'd_qk=32')
    >>> _difference("Problem(sequences=[(4, 4, 4, 4), (8, 8, 8, 8)])", "Problem(sequences=[(4, 4, 4, 4)])")
    ('2 sequences', '1 sequences')
    >>> _difference("Problem(sequences=[(4, 4, 4, 4)])", "Problem(sequences=[(3, 4, 4, 4)])")
    ('sequences[0]=(4, 4, 4, 4)', 'sequences[0]=(3, 4, 4, 4)')
    """
    words, others = _words(one), _words(other)
    for name in [*words, *others]:
        here, there = words.get(name), others.get(name)
        if here != there:
            if name in _LISTS and here is not None and there is not None:
                return _in_lists(name, here, there)
            return _word(name, here), _word(name, there)
    return "nothing", "nothing"


def _function(text: str) -> str:
    """The call that a canonical text is of.

    >>> _function("select_keys(heads=3)"), _function("Problem(cp_size=2, call=1, what=select_keys, forward)")
    ('select_keys', 'select_keys, forward, under checked()')
    """
    name, what = text.partition("(")[0], _words(text).get("what")
    if what is not None:
        return f"{what if ', ' in what else f'attention, {what}'}, under checked()"
    return _FUNCTIONS.get(name, name)


# of texts that do not begin with the function
_FUNCTIONS = {"Problem": "make_plan, or attention without a plan", "Gathering": "unshard or roll"}


def _word(name: str, value: str | None) -> str:
    return "nothing" if value is None else f"{name}={value}"


def _words(text: str) -> dict[str, str]:
    """The arguments of a canonical text, `Name(argument=value, ...)`, by name."""
    inside = text.partition("(")[2].removesuffix(")")
    return {name: value for name, _, value in (word.partition("=") for word in re.split(r", (?=[\w.]+=)", inside))}


def _in_lists(name: str, one: str, other: str) -> tuple[str, str]:
    """Where two lists of rows of integers differ."""
    mine, theirs = (re.findall(r"\([-\d, ]*\d\)", text) for text in (one, other))
    if len(mine) != len(theirs):
        return f"{len(mine)} {name}", f"{len(theirs)} {name}"
    n = next(n for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    return f"{name}[{n}]={mine[n]}", f"{name}[{n}]={theirs[n]}"
