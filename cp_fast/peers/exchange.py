"""An exchange of parcels through lanes: see the package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cp_fast.peers.lanes import Lane, Place, rounded
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
        self.group, self._shared, self._streams, self._watch = group, shared, streams, watch
        self.rank, self.size = group.rank, group.size
        distances = [(peer - self.rank) % self.size for peer in range(self.size)]
        starts = [sum(shared.sizes[: d - 1]) for d in range(self.size)]  # of the lane to a distance
        lanes = enumerate(distances)
        self._out = {p: (Lane(shared.sizes[d - 1]), shared.lanes[self.rank] + starts[d]) for p, d in lanes if d}
        back = [self.size - d for d in distances]
        self._in = {
            p: (Lane(shared.sizes[d - 1]), shared.lanes[p] + starts[d]) for p, d in enumerate(back) if p != self.rank
        }
        self._last: _Pulled | None = None

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return self.group.all_gather_object(value)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post messages of contiguous tensors. Both ends of a pair post what they send each other in equal portions, in
        the same order.
        """
        self._watch.check()
        streams, shared, rest_sends, rest_recvs = self._streams, self._shared, list[Parcel](), list[Parcel]()
        if streams.capturing():
            return self.group.exchange(sends, recvs)
        if self._last is not None:  # an exchange that nobody waited for, as something was raised: its tensors go now
            self._last.wait()
        here, aside, peers = streams.here(), streams.aside, set[int]()
        for peer, parcels in _by_peer(sends).items():
            lane, address = self._out[peer]
            place = lane.place(_total(parcels))
            if place is None:
                rest_sends += parcels
                continue
            if place.over:
                streams.wait(here, shared.done[peer], place.over)
            for at, x in _placed(address + place.start, parcels):
                streams.copy(here, at, x.data_ptr(), x.nbytes)
            streams.signal(here, (shared.ready_of[peer], place.number))
            peers.add(peer)
        pulls: list[tuple[int, Place, int, list[Parcel]]] = []
        for peer, parcels in _by_peer(recvs).items():
            lane, address = self._in[peer]
            place = lane.place(_total(parcels))
            if place is None:
                rest_recvs += parcels
            else:
                pulls.append((peer, place, address + place.start, parcels))
        rest = self.group.exchange(rest_sends, rest_recvs) if rest_sends or rest_recvs else None
        if pulls or peers:
            pulls.sort(key=lambda pull: (pull[0] - self.rank) % self.size)  # not all from the same one at first
            streams.fork(here)
            for peer, place, address, parcels in pulls:
                streams.wait(aside, shared.ready[peer], place.number)
                for at, x in _placed(address, parcels):
                    streams.copy(aside, x.data_ptr(), at, x.nbytes)
            done = [(shared.done_of[peer], place.number) for peer, place, *_ in pulls]
            streams.signal(aside, *done, self._watch.posted(sorted(peers.union(pull[0] for pull in pulls))))
            streams.mark()
        self._last = _Pulled(self, bool(pulls or peers), [parcel.tensor for parcel in recvs], rest)
        return self._last

    def release(self) -> None:
        """Let this rank's streams wait for nothing any more; what they then copy means nothing."""
        self._shared.words.fill_(_FOR_EVER)

    def waited(self, pulled: _Pulled) -> None:
        """An exchange is taken in."""
        if pulled.marked:
            self._streams.join(self._streams.here())
        if self._last is pulled:
            self._last = None


class _Pulled:
    """An exchange under way. `by_copies`: no kernel carries any of it, see `cp_fast.overlap`."""

    def __init__(self, messages: PeerMessages, marked: bool, tensors: list[torch.Tensor], rest: Pending | None) -> None:
        self._messages, self.marked, self._tensors, self._rest = messages, marked, tensors, rest
        self.by_copies = rest is None

    def wait(self) -> None:
        """Let the current stream wait until everything has arrived."""
        self._messages.waited(self)
        self.marked, self._tensors = False, []
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.wait()


def _by_peer(parcels: Sequence[Parcel]) -> dict[int, list[Parcel]]:
    found: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        found.setdefault(parcel.peer, []).append(parcel)
    return found


def _total(parcels: Sequence[Parcel]) -> int:
    return sum(rounded(parcel.tensor.nbytes) for parcel in parcels)


def _placed(address: int, parcels: Sequence[Parcel]) -> Iterator[tuple[int, torch.Tensor]]:
    """Where the bytes of each parcel of a block lie that begins at this address; empty ones are left out."""
    for parcel in parcels:
        x = parcel.tensor
        assert x.is_contiguous()
        if x.nbytes:
            yield address, x
        address += rounded(x.nbytes)
