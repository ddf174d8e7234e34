"""Two groups that cross in a rank, at least one of them with messages through peers' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cp_fast.exchanges import Exchange, Message, prepare
from cp_ref.spec import Group, PairGroup, Parcel, Pending

__all__ = ["Crossed"]


class Crossed(PairGroup):
    """An a2a and a p2p group: each message goes in the group that its peer shares with this rank."""

    def prepared(self, where: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Exchange:
        """See `cp_fast.exchanges.Prepares`."""
        parts = list[_Part]()
        for number, group in enumerate((self.a2a, self.p2p)):
            out, back = self._of(number, sends), self._of(number, recvs)
            if out or back:
                exchange = prepare(group, where, list(out.values()), list(back.values()))
                parts.append(_Part(group, exchange, list(out), list(back)))
        return _Both(parts)

    def _of(self, number: int, messages: Sequence[Message]) -> dict[int, Message]:
        """The messages in one of the groups, with the ranks there, by their places."""
        found = {n: self._split([Parcel(one.peer, one.tag, None)])[number] for n, one in enumerate(messages)}
        return {n: messages[n]._replace(peer=some[0].peer) for n, some in found.items() if some}


class _Part(NamedTuple):
    """An exchange in one of the groups, and the places of its sends and receives."""

    group: Group
    exchange: Exchange
    sends: list[int]
    recvs: list[int]


class _Both:
    """Exchanges in two groups as one."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self.by_copies = all(part.exchange.by_copies for part in parts)

    def post(self, group: Group, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> Pending:
        posted = list[Pending]()
        for member, exchange, out, back in self._parts:
            posted.append(exchange.post(member, [sends[n] for n in out], [recvs[n] for n in back]))
        return _AllOf(posted)


class _AllOf:
    def __init__(self, pending: list[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for one in self._pending:
            one.wait()
