"""An exchange of parcels through lanes: see the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cp_fast.exchanges import Exchange, Message, by_tag, prepare
from cp_fast.peers.lanes import Lane, rounded
from cp_fast.peers.streams import Streams
from cp_fast.peers.watch import Watch
from cp_ref.spec import Group, Parcel, Pending

__all__ = ["PeerMessages", "Shared"]

_FOR_EVER = 2**30  # a number that no exchange of a trial has


@dataclass(frozen=True)
class Shared:
    """The memory of all ranks of a group, as one of them sees it.

    Attributes:
        lanes: by rank, the address of its lanes.
        ready: this rank's words that senders write, by sender; ready_of: the same words of every receiver.
        done: this rank's words that receivers write, by receiver; done_of: the same words of every sender.
        sizes: of the lanes of every rank, by the distance of the receiver from 1.
        words: all words of this rank, int32; keeps: what owns the memory.
    """

    lanes: Sequence[int]
    ready: Sequence[Any]
    ready_of: Sequence[Any]
    done: Sequence[Any]
    done_of: Sequence[Any]
    sizes: tuple[int, ...]
    words: torch.Tensor
    keeps: Any


class PeerMessages:
    """One rank's place in a group whose messages are pulled out of the peers' memory."""

    def __init__(self, group: Group, shared: Shared, streams: Streams, watch: Watch) -> None:
        self.group, self.shared, self.streams, self.watch = group, shared, streams, watch
        self.rank, self.size = group.rank, group.size
        distances = [(peer - self.rank) % self.size for peer in range(self.size)]
        starts = [sum(shared.sizes[: d - 1]) for d in range(self.size)]  # of the lane to a distance
        lanes = enumerate(distances)
        self.out = {p: (Lane(shared.sizes[d - 1]), shared.lanes[self.rank] + starts[d]) for p, d in lanes if d}
        back = [self.size - d for d in distances]
        self.back = {
            p: (Lane(shared.sizes[d - 1]), shared.lanes[p] + starts[d]) for p, d in enumerate(back) if p != self.rank
        }
        self.last: _Pulled | None = None

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return self.group.all_gather_object(value)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post messages of contiguous tensors. Both ends of a pair post what they send each other in equal portions,
        with the same tags.
        """
        out, back = ([Message(peer, tag, x.nbytes) for peer, tag, x in parcels] for parcels in (sends, recvs))
        return self.prepared("", out, back).post(self, [x.tensor for x in sends], [x.tensor for x in recvs])

    def prepared(self, where: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Exchange:
        """See `cp_fast.exchanges.Prepares`."""
        return _Pulls(self, where, sends, recvs)

    def release(self) -> None:
        """Let this rank's streams wait for nothing any more; what they then copy means nothing."""
        self.shared.words.fill_(_FOR_EVER)


class _Block(NamedTuple):
    """What goes between two ranks in one exchange: where each of its tensors lies in it, as (number, offset, bytes)."""

    peer: int
    lane: Lane
    address: int  # of the lane
    size: int
    tensors: tuple[tuple[int, int, int], ...]


class _Pulls:
    """An exchange of the same messages in every call: blocks in lanes, and `rest`, what does not fit into one."""

    def __init__(self, messages: PeerMessages, where: str, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        self._messages, self._where = messages, where
        self._captured = prepare(messages.group, where, sends, recvs)
        self._out, rest_sends = _blocks(messages.out, sends)
        self._back, rest_recvs = _blocks(messages.back, recvs)
        self._back.sort(key=lambda block: (block.peer - messages.rank) % messages.size)  # not all from one at first
        self._peers = sorted({block.peer for block in (*self._out, *self._back)})
        self.by_copies = not rest_sends and not rest_recvs
        self._rest_sends, self._rest_recvs = rest_sends, rest_recvs
        some = [sends[n] for n in rest_sends], [recvs[n] for n in rest_recvs]
        self._rest = None if self.by_copies else prepare(messages.group, where, *some)

    def post(self, group: Group, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> Pending:
        messages = self._messages
        assert group is messages
        streams, shared, watch = messages.streams, messages.shared, messages.watch
        watch.check()
        if streams.capturing():
            return self._captured.post(messages.group, sends, recvs)
        if messages.last is not None:  # an exchange that nobody waited for, as something was raised: its tensors go now
            messages.last.wait()
        here, aside = streams.here(), streams.aside
        for peer, lane, address, size, tensors in self._out:
            start, number, over = lane.place(size)
            if over:
                streams.wait(here, shared.done[peer], over)
            for n, offset, count in tensors:
                streams.copy(here, address + start + offset, sends[n].data_ptr(), count)
            streams.signal(here, (shared.ready_of[peer], number))
        rest = None
        if self._rest is not None:
            some = [sends[n] for n in self._rest_sends], [recvs[n] for n in self._rest_recvs]
            rest = self._rest.post(messages.group, *some)
        if self._peers:
            done: list[tuple[Any, int]] = []
            streams.fork(here)
            for peer, lane, address, size, tensors in self._back:
                start, number, _ = lane.place(size)
                streams.wait(aside, shared.ready[peer], number)
                for n, offset, count in tensors:
                    streams.copy(aside, recvs[n].data_ptr(), address + start + offset, count)
                done.append((shared.done_of[peer], number))
            streams.signal(aside, *done, watch.posted(self._peers, self._where))
            streams.mark()
        messages.last = _Pulled(messages, bool(self._peers), recvs, rest)
        return messages.last


class _Pulled:
    """An exchange under way."""

    def __init__(
        self, messages: PeerMessages, marked: bool, tensors: Sequence[torch.Tensor], rest: Pending | None
    ) -> None:
        self._messages, self._marked, self._tensors, self._rest = messages, marked, tensors, rest

    def wait(self) -> None:
        """Let the current stream wait until everything has arrived."""
        messages = self._messages
        if self._marked:
            messages.streams.join(messages.streams.here())
        if messages.last is self:
            messages.last = None
        self._marked, self._tensors = False, ()
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.wait()


def _blocks(lanes: dict[int, tuple[Lane, int]], messages: Sequence[Message]) -> tuple[list[_Block], list[int]]:
    """Messages by peer, in the order of their tags: a block for each lane that is large enough, and what is left."""
    by_peer: dict[int, list[int]] = {}
    for n in by_tag(messages):
        by_peer.setdefault(messages[n].peer, []).append(n)
    blocks, rest = list[_Block](), list[int]()
    for peer, some in by_peer.items():
        (lane, address), size = lanes[peer], 0
        tensors = list[tuple[int, int, int]]()
        for n in some:
            if messages[n].bytes:
                tensors.append((n, size, messages[n].bytes))
            size += rounded(messages[n].bytes)
        if size > lane.size:
            rest += some
        else:
            blocks.append(_Block(peer, lane, address, size, tuple(tensors)))
    return blocks, rest
