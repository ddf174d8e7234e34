"""An exchange of parcels through lanes: see the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cp_fast.peers.lanes import Lane, Place, rounded
from cp_fast.peers.streams import Streams
from cp_fast.peers.watch import Watch
from cp_ref.spec import Group, Parcel, Pending

__all__ = ["PeerMessages", "Shared"]

_MOST_VIEWS = 4096
_FOR_EVER = 2**30  # a number that no exchange of a trial has


@dataclass(frozen=True)
class Shared:
    """The memory of all ranks of a group, as one of them sees it.

    Attributes:
        lanes: by rank, its lanes as bytes, uint8 [bytes].
        ready: this rank's words that senders write, by sender; ready_of: the same words of every receiver.
        done: this rank's words that receivers write, by receiver; done_of: the same words of every sender.
        sizes: of the lanes of every rank, by the distance of the receiver from 1.
        words: all words of this rank, int32; keeps: what owns the memory.
    """

    lanes: Sequence[torch.Tensor]
    ready: Sequence[Any]
    ready_of: Sequence[Any]
    done: Sequence[Any]
    done_of: Sequence[Any]
    sizes: tuple[int, ...]
    words: torch.Tensor
    keeps: Any = None


class PeerMessages:
    """One rank's place in a group whose messages are pulled out of the peers' memory."""

    def __init__(self, group: Group, shared: Shared, streams: Streams, watch: Watch) -> None:
        self.group, self._shared, self._streams, self._watch = group, shared, streams, watch
        self.rank, self.size = group.rank, group.size
        distances = [(peer - self.rank) % self.size for peer in range(self.size)]
        starts = [sum(shared.sizes[: d - 1]) for d in range(self.size)]  # of the lane to a distance
        self._out = {p: (Lane(shared.sizes[d - 1]), starts[d]) for p, d in enumerate(distances) if d}
        self._in = {
            p: (Lane(shared.sizes[self.size - d - 1]), starts[self.size - d]) for p, d in enumerate(distances) if d
        }
        self._views: dict[tuple[int, int, torch.dtype, torch.Size], torch.Tensor] = {}
        self._last: _Pulled | None = None

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return self.group.all_gather_object(value)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post messages. Both ends of a pair post what they send each other in equal portions, in the same order."""
        self._watch.check()
        if self._streams.capturing():
            return self.group.exchange(sends, recvs)
        if self._last is not None:  # an exchange that nobody waited for, as something was raised: its tensors go now
            self._last.wait()
        streams, shared, rest_sends, rest_recvs = self._streams, self._shared, list[Parcel](), list[Parcel]()
        peers: list[int] = []
        for peer, parcels in _by_peer(sends).items():
            lane, first = self._out[peer]
            place = lane.place(_total(parcels))
            if place is None:
                rest_sends += parcels
                continue
            if place.over:
                streams.wait(shared.done[peer], place.over)
            for view, parcel in self._seen(self.rank, first, place, parcels):
                view.copy_(parcel.tensor)
            streams.signal((shared.ready_of[peer], place.number))
            peers.append(peer)
        pulls: list[tuple[int, Place, list[tuple[torch.Tensor, Parcel]]]] = []
        for peer, parcels in _by_peer(recvs).items():
            lane, first = self._in[peer]
            place = lane.place(_total(parcels))
            if place is None:
                rest_recvs += parcels
            else:
                pulls.append((peer, place, self._seen(peer, first, place, parcels)))
        rest = self.group.exchange(rest_sends, rest_recvs) if rest_sends or rest_recvs else None
        mark = None
        if pulls or peers:
            pulls.sort(key=lambda pull: (pull[0] - self.rank) % self.size)  # not all from the same one at first
            with streams.aside():
                for peer, place, views in pulls:
                    streams.wait(shared.ready[peer], place.number)
                    for view, parcel in views:
                        parcel.tensor.copy_(view)
                here = self._watch.posted(sorted({*peers, *(pull[0] for pull in pulls)}))
                streams.signal(*((shared.done_of[peer], place.number) for peer, place, _ in pulls), here)
                mark = streams.mark()
        self._last = _Pulled(self, mark, [parcel.tensor for parcel in recvs], rest)
        return self._last

    def release(self) -> None:
        """Let this rank's streams wait for nothing any more; what they then copy means nothing."""
        self._shared.words.fill_(_FOR_EVER)

    def waited(self, pulled: _Pulled) -> None:
        """An exchange is taken in."""
        if pulled.mark is not None:
            self._streams.join(pulled.mark)
        if self._last is pulled:
            self._last = None

    def _seen(
        self, rank: int, first: int, place: Place, parcels: Sequence[Parcel]
    ) -> list[tuple[torch.Tensor, Parcel]]:
        """The bytes of a block in a rank's memory, in the form of its parcels' tensors; empty ones are left out."""
        found, start = [], first + place.start
        for parcel in parcels:
            x = parcel.tensor
            size = x.numel() * x.element_size()
            if size:
                key = rank, start, x.dtype, x.shape
                view = self._views.get(key)
                if view is None:
                    if len(self._views) > _MOST_VIEWS:
                        self._views.clear()
                    view = self._shared.lanes[rank][start : start + size].view(x.dtype).view(x.shape)
                    self._views[key] = view
                found.append((view, parcel))
            start += rounded(size)
        return found


class _Pulled:
    """An exchange under way. `by_copies`: no kernel carries any of it, see `cp_fast.overlap`."""

    def __init__(self, messages: PeerMessages, mark: Any, tensors: list[torch.Tensor], rest: Pending | None) -> None:
        self._messages, self.mark, self._tensors, self._rest = messages, mark, tensors, rest
        self.by_copies = rest is None

    def wait(self) -> None:
        """Let the current stream wait until everything has arrived."""
        self._messages.waited(self)
        self.mark, self._tensors = None, []
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.wait()


def _by_peer(parcels: Sequence[Parcel]) -> dict[int, list[Parcel]]:
    found: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        found.setdefault(parcel.peer, []).append(parcel)
    return found


def _total(parcels: Sequence[Parcel]) -> int:
    return sum(rounded(p.tensor.numel() * p.tensor.element_size()) for p in parcels)
