"""An exchange of parcels through staging buffers: see the package."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from cp_fast.runtime.prepared_exchange import Exchange, Located, MessageSpec, by_tag, places, prepare
from cp_fast.transport.streams import Streams
from cp_fast.transport.watch import Watch
from cp_ref.groups.group import Group, Parcel, Pending
from cp_ref.problems.room import Room
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Problem, slice_rows

__all__ = [
    "ALIGNMENT",
    "PART",
    "BlockPlace",
    "PeerMessages",
    "SharedMemory",
    "StagingBuffer",
    "rounded",
    "staging_sizes",
]

# ---- staging buffers
#
# The place of each message's bytes between two ranks: both ends compute it without communication.
#
# A staging buffer is a ring of bytes in the sender's memory, for one receiver. All messages to it in one exchange form
# one block. Both ends place the same blocks in the same order, so both know the place of each. A large block has
# several parts: the first can be pulled while the next ones are still copied into the staging buffer.


ALIGNMENT = 256  # Bytes, of tensors in a block.
PART = 2**25  # Bytes of each part except a block's last one.


class BlockPlace(NamedTuple):
    """A block: its start, the number of its last part (parts of a staging buffer are counted from 1), and that of the
    last earlier block at this place, 0 for none.
    """

    start: int
    number: int
    over: int


class StagingBuffer:
    """The staging buffer from one rank to another.

    >>> staging = StagingBuffer(1000)
    >>> [staging.place(400, 1), staging.place(400, 2), staging.place(300, 1), staging.place(300, 1)]
    [BlockPlace(start=0, number=1, over=0), BlockPlace(start=400, number=3, over=0), \
BlockPlace(start=0, number=4, over=1), BlockPlace(start=300, number=5, over=3)]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._end = self._number = 0
        self._lying: deque[tuple[int, int, int]] = deque()  # Start, stop, number; the oldest first.

    def place(self, size: int, parts: int) -> BlockPlace:
        """The place of the next block, which must fit in the staging buffer."""
        over, start = 0, self._end
        if start + size > self.size:
            start = 0
            while self._lying and self._lying[0][0] >= self._end:  # Of the lap before, past the free bytes.
                over = self._lying.popleft()[2]
        while self._lying and self._lying[0][0] < start + size and start < self._lying[0][1]:
            over = self._lying.popleft()[2]
        self._end, self._number = start + size, self._number + parts
        self._lying.append((start, start + size, self._number))
        return BlockPlace(start, self._number, over)


def rounded(size: int) -> int:
    """Bytes, rounded up to the alignment; never zero, so that every block has a place.

    >>> rounded(0), rounded(256), rounded(257)
    (256, 256, 512)
    """
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT


def staging_sizes(problem: Problem, room: Room | None, way: str, ranks: int) -> tuple[int, ...]:
    """Bytes of the staging buffers to the ranks at distance 1, 2, ... for any exchange of a planner's schedule.

    Args:
        room: of a plan that is updated, whose messages have the most rows of any batch; else None.
        way: "ring" (a block and the gradients of another, to the next rank; where they go straight, what each rank may
            see of another), "gather" (either of them) or "heads" (all kinds, for a share of the heads).

    >>> from cp_ref.schedules.problem import Problem, Sequence
    >>> sizes = dict(heads_q=4, heads_kv=2, d_qk=64, d_v=64, dtype="bfloat16", qkv_format="thd")
    >>> problem = Problem(cp_size=2, cp_comm_type="p2p", sequences=(Sequence(64, 64, 64, 64),), **sizes)
    >>> [staging_sizes(problem, None, way, 2) for way in ("ring", "gather", "heads")]
    [(57344,), (40960,), (25088,)]
    """
    element = {"float64": 8, "float32": 4}.get(problem.dtype, 2)
    wide = max(element, 4)
    q, kv = (room.rows_q, room.rows_kv) if room is not None else (_rows(problem, side) for side in ("q", "kv"))
    head, slack = problem.d_qk + problem.d_v, 32 * ALIGNMENT
    heads_kv = max(problem.heads_kv, problem.a2a_size)  # Replicated if there are fewer heads than ranks.
    if way == "heads":
        partial = wide if heads_kv > problem.heads_kv else element
        sized = q * problem.heads_q * (max(problem.d_qk, problem.d_v) * element + 2 * wide)
        return (rounded((sized + kv * heads_kv * head * partial) // ranks) + slack,) * (ranks - 1)
    block = rounded(kv * heads_kv * head * (wide + (element if way == "ring" else 0)) + slack)
    if way == "gather" or ranks == 2:
        return (block,) * (ranks - 1)
    visibility = Visibility(problem.workload)
    if problem.a2a_size > 1:
        visibility = visibility.exchanged
    if not visibility.sends_directly:
        return (block, *(0,) * (ranks - 2))
    row = heads_kv // problem.a2a_size * head
    lent, here = visibility.rows_lent, np.arange(ranks)
    if room is not None:
        lent = np.where(lent > 0, kv * problem.a2a_size, 0)
    sizes = list[int]()
    for distance in range(1, ranks):  # keys to a reader, and gradients of keys to their owner
        peer = (here + distance) % ranks
        most = int((lent[here, peer] * row * element + lent[peer, here] * row * wide).max()) + slack
        sizes.append(min(block, 1 << (max(most, PART // 16) - 1).bit_length()))  # A new size is shared anew: few sizes.
    return tuple(sizes)


def _rows(problem: Problem, side: str) -> int:
    """The most rows of a rank, padding included."""
    return slice_rows(problem, side) * (1 if problem.qkv_format == "thd" else len(problem.sequences))


# ---- the exchange


_FOR_EVER = 2**30  # Larger than the number of any trial's exchange.


@dataclass(frozen=True)
class SharedMemory:
    """The memory of all ranks of a group, in one rank's addresses.

    Attributes:
        staging_buffers: by rank, the address of its staging buffers.
        ready: this rank's words that senders write, by sender; ready_of: the same words of every receiver.
        done: this rank's words that receivers write, by receiver; done_of: the same words of every sender.
        sizes: of the staging buffers of every rank, by the distance of the receiver from 1.
        words: all words of this rank, int32; keeps: the owner of the memory.
    """

    staging_buffers: Sequence[int]
    ready: Sequence[Any]
    ready_of: Sequence[Any]
    done: Sequence[Any]
    done_of: Sequence[Any]
    sizes: tuple[int, ...]
    words: torch.Tensor
    keeps: Any


class PeerMessages:
    """One rank of a group whose messages are pulled from the peers' memory."""

    def __init__(self, group: Group, shared: SharedMemory, streams: Streams, watch: Watch) -> None:
        self.group, self.shared, self.streams, self.watch = group, shared, streams, watch
        self.rank, self.size = group.rank, group.size
        distances = [(peer - self.rank) % self.size for peer in range(self.size)]
        starts = [sum(shared.sizes[: d - 1]) for d in range(self.size)]  # Of the staging buffer to a distance.
        self.out = {
            p: (StagingBuffer(shared.sizes[d - 1]), shared.staging_buffers[self.rank] + starts[d])
            for p, d in enumerate(distances)
            if d
        }
        back = [self.size - d for d in distances]
        self.back = {
            p: (StagingBuffer(shared.sizes[d - 1]), shared.staging_buffers[p] + starts[d])
            for p, d in enumerate(back)
            if p != self.rank
        }
        self.last: _Pulled | None = None

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return self.group.all_gather_object(value)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        """Post messages of contiguous tensors. Both ends of a pair post their messages in equal portions, with the same
        tags.
        """
        out, back = (
            [MessageSpec(peer, tag, (x.nbytes,), True) for peer, tag, x in parcels] for parcels in (sends, recvs)
        )
        return self.prepared("", out, back).post(self, [x.tensor for x in sends], [x.tensor for x in recvs])

    def prepared(self, where: str, sends: Sequence[MessageSpec], recvs: Sequence[MessageSpec]) -> Exchange:
        """See `cp_fast.runtime.prepared_exchange.Prepares`."""
        return _Pulls(self, where, sends, recvs)

    def release(self) -> None:
        """End all waits of this rank's streams; the bytes that they then copy are not valid."""
        self.shared.words.fill_(_FOR_EVER)


class _Block(NamedTuple):
    """The bytes between two ranks in one exchange. `aside`: kernels run during the copy into the staging buffer, and
    its tensors are held. The words: one that this rank waits for, and one that it then writes.
    """

    peer: int
    staging: StagingBuffer
    size: int
    parts: tuple[tuple[_Copied, ...], ...]
    aside: bool
    awaited: Any
    written: Any


class _Copied(NamedTuple):
    """Bytes of a tensor: its number, the first byte, the address in a staging buffer that begins at the block, the
    number of bytes.
    """

    tensor: int
    offset: int
    address: int
    size: int


class _Pulls:
    """An exchange of the same messages in every call: blocks in staging buffers, and `rest`, the messages too large for
    a staging buffer.
    """

    def __init__(
        self, messages: PeerMessages, where: str, sends: Sequence[MessageSpec], recvs: Sequence[MessageSpec]
    ) -> None:
        self._messages, self._where = messages, where
        self._captured = prepare(messages.group, where, sends, recvs)
        shared = messages.shared
        out, rest_sends = _blocks(messages.out, sends, shared.done, shared.ready_of)
        self._first, self._aside = ([block for block in out if block.aside == aside] for aside in (False, True))
        self._back, rest_recvs = _blocks(messages.back, recvs, shared.ready, shared.done_of)
        self._back.sort(key=lambda block: (block.peer - messages.rank) % messages.size)  # Spread the first pulls.
        streams = messages.streams
        self._streams = (streams.filling, streams.pulling) if self._aside else (streams.pulling,)
        self._peers = sorted({block.peer for block in (*out, *self._back)})
        self._rest = None
        if rest_sends or rest_recvs:
            self._rest = prepare(
                messages.group, where, *([x.message for x in rest] for rest in (rest_sends, rest_recvs))
            )
        self._rest_sends, self._rest_recvs = places(rest_sends), places(rest_recvs)

    def post(self, group: Group, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> Pending:
        messages = self._messages
        assert group is messages
        streams, watch = messages.streams, messages.watch
        watch.check()
        if streams.capturing():
            return self._captured.post(messages.group, sends, recvs)
        if messages.last is not None:  # An exchange without a wait, after an error: free its tensors.
            messages.last.wait()
        if self._peers:
            here = streams.here()
            _fill(streams, here, self._first, sends)
            streams.fork(here, *self._streams)
            _fill(streams, streams.filling, self._aside, sends)
        rest = None
        if self._rest is not None:
            some = [sends[n] for n in self._rest_sends], [recvs[n] for n in self._rest_recvs]
            rest = self._rest.post(messages.group, *some)
        if self._peers:
            ended = self._pull(streams, recvs)
            if self._aside:
                streams.meet()  # Before the signal: if a staging buffer never gets free, the exchange has not ended.
            streams.signal(streams.pulling, *ended, watch.posted(self._peers, self._where))
            streams.mark()
        messages.last = _Pulled(messages, bool(self._peers), (*recvs, *sends) if self._aside else recvs, rest)
        return messages.last

    def _pull(self, streams: Streams, recvs: Sequence[torch.Tensor]) -> list[tuple[Any, int]]:
        """Copy the received bytes from the peers' staging buffers; returns the words to signal, and their numbers."""
        pulling, ended = streams.pulling, list[tuple[Any, int]]()
        for _, staging, size, parts, _, ready, done in self._back:
            start, number, _ = staging.place(size, len(parts))
            for number_of_part, part in enumerate(parts, number - len(parts) + 1):
                streams.wait(pulling, ready, number_of_part)
                for n, offset, address, count in part:
                    streams.copy(pulling, recvs[n].data_ptr() + offset, address + start, count)
            ended.append((done, number))
        return ended


class _Pulled:
    """An exchange in flight, and the tensors that are copied on other streams than the current one."""

    def __init__(
        self, messages: PeerMessages, marked: bool, tensors: Sequence[torch.Tensor], rest: Pending | None
    ) -> None:
        self._messages, self._marked, self._tensors, self._rest = messages, marked, tensors, rest
        self.by_copies = rest is None

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


def _fill(streams: Streams, stream: Any, blocks: Sequence[_Block], sends: Sequence[torch.Tensor]) -> None:
    """Copy the sent tensors into staging buffers."""
    for _, staging, size, parts, _, done, ready in blocks:
        start, number, over = staging.place(size, len(parts))
        if over:
            streams.wait(stream, done, over)
        for number_of_part, part in enumerate(parts, number - len(parts) + 1):
            for n, offset, address, count in part:
                streams.copy(stream, address + start, sends[n].data_ptr() + offset, count)
            streams.signal(stream, (ready, number_of_part))


def _blocks(
    staging_buffers: dict[int, tuple[StagingBuffer, int]],
    messages: Sequence[MessageSpec],
    awaited: Sequence[Any],
    written: Sequence[Any],
) -> tuple[list[_Block], list[Located]]:
    """Messages by peer, in the order of their tags: a block for each staging buffer that is large enough, and the rest.
    The words by peer.
    """
    by_peer: dict[int, list[Located]] = {}
    for located in by_tag(messages):
        by_peer.setdefault(located.message.peer, []).append(located)
    blocks, rest = list[_Block](), list[Located]()
    for peer, some in by_peer.items():
        (staging, address), size = staging_buffers[peer], 0
        parts: dict[int, list[_Copied]] = {}
        for (_, _, pieces, _), first in some:
            starts = accumulate(pieces, initial=size)
            for n, (at, count) in enumerate(zip(starts, pieces, strict=False), first):
                for part, begin, end in _cut(at, at + count):
                    parts.setdefault(part, []).append(_Copied(n, begin - at, address + begin, end - begin))
            size += rounded(sum(pieces))
        if size > staging.size:
            rest += some
        else:
            by_part = tuple(tuple(parts.get(part, ())) for part in range(-(-size // PART)))
            aside = all(message.held for message, _ in some)
            blocks.append(_Block(peer, staging, size, by_part, aside, awaited[peer], written[peer]))
    return blocks, rest


def _cut(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Bytes of a block by parts: (part, begin, end).

    >>> list(_cut(PART - 4, 2 * PART)) == [(0, PART - 4, PART), (1, PART, 2 * PART)], list(_cut(8, 8))
    (True, [])
    """
    while begin < end:
        part = begin // PART
        upto = min(end, (part + 1) * PART)
        yield part, begin, upto
        begin = upto
