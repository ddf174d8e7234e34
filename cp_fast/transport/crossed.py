"""Two groups that cross in a rank, at least one of them with messages through peer memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.runtime.prepared_exchange import Exchange, Located, Message, by_tag, places, prepare
from cp_ref.spec import Group, PairGroup, Parcel, Pending

__all__ = ["Crossed"]

_Part = tuple[Group, Exchange, list[int], list[int]]  # In one of the groups; the places of its sends and receives.


class Crossed(PairGroup):
    """An a2a and a p2p group: each message goes in the group that its peer shares with this rank."""

    def prepared(self, where: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Exchange:
        """See `cp_fast.runtime.prepared_exchange.Prepares`."""
        parts = list[_Part]()
        for number, group in enumerate((self.a2a, self.p2p)):
            out, back = self._of(number, sends), self._of(number, recvs)
            if out or back:
                exchange = prepare(group, where, *([x.message for x in some] for some in (out, back)))
                parts.append((group, exchange, places(out), places(back)))
        return _Both(parts)

    def _of(self, number: int, messages: Sequence[Message]) -> list[Located]:
        """The messages in one of the groups, with the ranks there."""
        found: list[Located] = []
        for message, first in by_tag(messages):
            some = self._split([Parcel(message.peer, message.tag, None)])[number]
            found += [Located(message._replace(peer=parcel.peer), first) for parcel in some]
        return found


class _Both:
    """Exchanges in two groups as one."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts

    def post(self, group: Group, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> Pending:
        posted = list[Pending]()
        for member, exchange, out, back in self._parts:
            posted.append(exchange.post(member, [sends[n] for n in out], [recvs[n] for n in back]))
        return _AllOf(posted)


class _AllOf:
    def __init__(self, pending: list[Pending]) -> None:
        self._pending = pending
        self.by_copies = all(getattr(one, "by_copies", False) for one in pending)

    def wait(self) -> None:
        for one in self._pending:
            one.wait()
