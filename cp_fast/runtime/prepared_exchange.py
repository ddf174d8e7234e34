"""The messages of a step, prepared once: later calls pass only tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeGuard

import torch

from cp_ref.groups.group import Group, Parcel, Pending
from cp_ref.groups.process_groups import error_context

__all__ = ["Exchange", "Located", "MessageSpec", "Prepares", "by_tag", "places", "prepare", "prepares"]


class MessageSpec(NamedTuple):
    """One tensor to or from a peer. `pieces`: the bytes of each of the consecutive tensors that receive it; one piece
    for a send. `held`: a sent tensor may be held until the wait for the exchange.
    """

    peer: int
    tag: int
    pieces: tuple[int, ...]
    held: bool = False


class Exchange(Protocol):
    """Messages that can be posted again in every call."""

    def post(self, group: Group, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> Pending:
        """Send and receive these contiguous tensors, one for each piece of a message, in the prepared order. The
        returned object has `by_copies` if no kernel carries any of them, see `runtime.operations`.
        """
        ...


class Prepares(Group, Protocol):
    """A group with prepared exchanges, valid for this group only."""

    def prepared(self, where: str, sends: Sequence[MessageSpec], recvs: Sequence[MessageSpec]) -> Exchange:
        """An exchange of these messages. `where`: its name in the error if a peer does not answer."""
        ...


def prepares(group: Group) -> TypeGuard[Prepares]:
    """Whether a group has prepared exchanges."""
    return hasattr(group, "prepared")


def prepare(group: Group, where: str, sends: Sequence[MessageSpec], recvs: Sequence[MessageSpec]) -> Exchange:
    """An exchange in this group, or by plain messages in a group without prepared exchanges. Both ends of a pair
    prepare their messages with the same tags.
    """
    return group.prepared(where, sends, recvs) if prepares(group) else _ByGroup(where, sends, recvs)


class Located(NamedTuple):
    """A message, and the place of its first piece in the list of tensors."""

    message: MessageSpec
    first: int


def by_tag(messages: Sequence[MessageSpec]) -> list[Located]:
    """The messages in the order of their tags.

    >>> some = [MessageSpec(1, 20, (8, 8)), MessageSpec(2, 10, (8,)), MessageSpec(1, 15, (8,))]
    >>> [(x.message.tag, x.first) for x in by_tag(some)]
    [(10, 2), (15, 3), (20, 0)]
    """
    firsts = accumulate((len(message.pieces) for message in messages), initial=0)
    return sorted(map(Located, messages, firsts), key=lambda located: located.message.tag)


def places(messages: Sequence[Located]) -> list[int]:
    """The positions of the tensors of these messages."""
    return [first + n for message, first in messages for n in range(len(message.pieces))]


class _ByGroup:
    """An exchange by the group's own messages, which are received whole."""

    def __init__(self, where: str, sends: Sequence[MessageSpec], recvs: Sequence[MessageSpec]) -> None:
        self._where, self._sends, self._recvs = where, by_tag(sends), by_tag(recvs)

    def post(self, group: Group, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> Pending:
        out = [Parcel(message.peer, message.tag, sends[first]) for message, first in self._sends]
        back, cut = list[Parcel](), list[tuple[torch.Tensor, Sequence[torch.Tensor]]]()
        for (peer, tag, pieces, _), first in self._recvs:
            buffer = recvs[first]
            if len(pieces) > 1:
                parts = recvs[first : first + len(pieces)]
                buffer = buffer.new_empty(sum(map(len, parts)), *buffer.shape[1:])
                cut.append((buffer, parts))
            back.append(Parcel(peer, tag, buffer))
        with error_context(self._where):
            return _InFlight(self._where, group.exchange(out, back), cut, sends)


@dataclass(slots=True, eq=False)
class _InFlight:
    """Messages under way, where they come from, and those to be cut into pieces on arrival. It holds what is sent."""

    where: str
    pending: Pending
    cut: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]]
    sends: Sequence[torch.Tensor]

    def wait(self) -> None:
        with error_context(self.where):
            self.pending.wait()
        for buffer, parts in self.cut:
            for part, x in zip(parts, buffer.split([len(part) for part in parts]), strict=True):
                part.copy_(x)
        self.cut = self.sends = ()
