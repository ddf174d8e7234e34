"""What a schedule needs of a group of ranks: an exchange of messages, and a small agreement before the first one.

Anything with these members can carry a context-parallel attention: `cp_ref.SimGroup` (all ranks in one process), the
adapters over torch.distributed in both packages, or the user's own. Tensors are only passed through, so this module
needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from cp_ref.spec.problem import Problem
from cp_ref.spec.room import Agreement

__all__ = ["Group", "Parcel", "Pending", "agree"]


class Parcel(NamedTuple):
    """One tensor to send to `peer`, or the buffer for one from `peer`."""

    peer: int
    tag: int
    tensor: Any


class Pending(Protocol):
    """Messages on their way."""

    def wait(self) -> None:
        """Return when they have arrived: send buffers may be reused, receive buffers may be read (in stream order on
        a GPU).
        """
        ...


@runtime_checkable
class Group(Protocol):
    """One rank's place in a group."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post messages and return at once. Between two ranks they arrive in the order they were posted in, and tags
        must agree.
        """
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable), by rank."""
        ...


def agree(group: Group, problem: Problem | Agreement | None, error: Exception | None) -> None:
    """Let all ranks find out together whether all of them have the same, well-formed problem; called before anything is
    sent.

    Args:
        problem: what this rank is about to compute, or with what room; None when its arguments were refused.
        error: why they were refused, or None.

    Raises:
        The rank's own `error`, if any. ValueError where another rank refused its arguments or has another problem; it
        names the rank and quotes what it said. All ranks raise or none does, so none is left waiting.
    """
    complaint = None if error is None else f"{type(error).__name__}: {error}"
    everyone = group.all_gather_object((None if problem is None else problem.fingerprint, complaint))
    if error is not None:
        raise error
    for rank, (_, refused) in enumerate(everyone):
        if refused is not None:
            raise ValueError(f"rank {rank} refused its arguments, so rank {group.rank} does not start: {refused}")
    if all(fingerprint == everyone[0][0] for fingerprint, _ in everyone):
        return
    texts = group.all_gather_object(str(problem))  # all ranks see the same fingerprints, so all come here
    for rank, text in enumerate(texts):
        if text != texts[group.rank]:
            here, there = _difference(texts[group.rank], text)
            raise ValueError(
                f"the ranks have different problems: rank {group.rank} has {here} where rank {rank} has {there}"
            )


def _difference(one: str, other: str) -> tuple[str, str]:
    """The first words in which two canonical texts differ.

    >>> _difference("Problem(cp_size=2, softcap=1.0)", "Problem(cp_size=2, softcap=2.0)")
    ('softcap=1.0', 'softcap=2.0')
    """
    words, others = (text.removeprefix("Problem(").removesuffix(")").split(", ") for text in (one, other))
    for n, word in enumerate(words):
        if n >= len(others) or word != others[n]:
            return word, others[n] if n < len(others) else "nothing"
    return "nothing", others[len(words)] if len(others) > len(words) else "nothing"
