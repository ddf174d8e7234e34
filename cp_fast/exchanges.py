"""The messages of a step, prepared once: from then on a group is given tensors only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard

import torch

from cp_ref.common.processes import during
from cp_ref.spec import Group, Parcel, Pending

__all__ = ["Exchange", "Message", "Prepares", "by_tag", "prepare", "prepares"]


class Message(NamedTuple):
    """One tensor to or from a peer."""

    peer: int
    tag: int
    bytes: int


class Exchange(Protocol):
    """Messages that can be posted, in every call again. `by_copies`: no kernel carries any of them, see
    `cp_fast.overlap`.
    """

    by_copies: bool

    def post(self, group: Group, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> Pending:
        """Send and receive these tensors, contiguous, one for each message in the order in which it was prepared."""
        ...


class Prepares(Group, Protocol):
    """A group that has exchanges of its own; they are for this group alone."""

    def prepared(self, where: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Exchange:
        """An exchange of these messages. `where`: what is said of it when a peer does not answer."""
        ...


def prepares(group: Group) -> TypeGuard[Prepares]:
    """Whether a group has exchanges of its own."""
    return hasattr(group, "prepared")


def prepare(group: Group, where: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Exchange:
    """An exchange in this group, or in any other that has none of its own. Both ends of a pair prepare what they send
    each other with the same tags.
    """
    return group.prepared(where, sends, recvs) if prepares(group) else _ByGroup(where, sends, recvs)


def by_tag(messages: Sequence[Message]) -> list[int]:
    """Their places in the order of their tags.

    >>> by_tag([Message(1, 30, 8), Message(2, 10, 8), Message(1, 20, 8)])
    [1, 2, 0]
    """
    return sorted(range(len(messages)), key=lambda n: messages[n].tag)


class _ByGroup:
    """By the group's own messages."""

    by_copies = False

    def __init__(self, where: str, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        self._where = where
        self._sends, self._recvs = (
            [(n, messages[n].peer, messages[n].tag) for n in by_tag(messages)] for messages in (sends, recvs)
        )

    def post(self, group: Group, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> Pending:
        out = [Parcel(peer, tag, sends[n]) for n, peer, tag in self._sends]
        back = [Parcel(peer, tag, recvs[n]) for n, peer, tag in self._recvs]
        with during(self._where):
            return _Named(self._where, group.exchange(out, back))


class _Named:
    """Messages under way, and where they are from."""

    def __init__(self, where: str, pending: Pending) -> None:
        self._where, self._pending = where, pending

    def wait(self) -> None:
        with during(self._where):
            self._pending.wait()
