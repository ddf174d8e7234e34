"""A simulated group: every rank a thread of this process, all on one device, one running at a time.

Any schedule of either package runs over it, forward and backward, at any cp_size, on a laptop or on one GPU. It is
stricter than a network, so a program that is right here is right there:

- a receive buffer holds NaN until the receive has been waited for, and a send buffer must not change until the send
  has;
- a send's wait returns only when its receive has been posted (no hidden buffering), and the other way round;
- between two ranks messages arrive in the order they were posted in, as on NCCL, and tags, shapes and dtypes must
  agree, as on gloo; tensors must be contiguous, as on both;
- when no rank can go on, every waiting rank raises `Deadlock`, naming the operation of each; a message that nobody took
  is an error.

One rank runs at a time. It runs until it comes to a wait, and the ranks follow in order, so a run is deterministic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from cp_ref.simulator.posted_messages import MessageError, PostedMessage, deliver, poison, recorded_event, same
from cp_ref.simulator.rank_scheduler import Deadlock, RankScheduler
from cp_ref.spec import Parcel

__all__ = ["Deadlock", "MessageError", "SimGroup", "SimMember", "SimSubgroup"]

T = TypeVar("T")


class SimGroup:
    """`cp_size` ranks in this process.

    >>> def fn(member):
    ...     peer = 1 - member.rank
    ...     box = torch.zeros(1)
    ...     member.exchange([Parcel(peer, 0, torch.tensor([10.0 + member.rank]))], [Parcel(peer, 0, box)]).wait()
    ...     return box.item()
    >>> SimGroup(2).run(fn)
    [11.0, 10.0]
    """

    def __init__(self, cp_size: int) -> None:
        """Raises ValueError unless cp_size is a positive integer."""
        if not _is_positive(cp_size):
            raise ValueError(f"cp_size is {cp_size!r}; it must be a positive integer")
        self.cp_size = cp_size

    def run(self, fn: Callable[[SimMember], T]) -> list[T]:
        """Call `fn(member)` as every rank, each in its own thread, and return the results by rank.

        `fn` may build autograd graphs and call `backward`: a rank's backward runs in that rank's thread.

        Raises:
            Whatever the first rank (by number) raised; Deadlock and MessageError as described above.
        """
        scheduler = RankScheduler(self.cp_size)
        results: list[Any] = [None] * self.cp_size
        grad_enabled, num_threads = torch.is_grad_enabled(), torch.get_num_threads()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def rank_main(rank: int) -> None:
            scheduler.wait_to_run(rank)
            # Until its first parallel loop, a new thread's matrix products would use the machine's number of threads,
            # whatever was set; another number of threads rounds differently.
            torch.set_num_threads(num_threads)
            # One autograd worker serves all ranks of a device: a backward that waits for a peer would block the peer's.
            with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(grad_enabled):
                if device is not None:
                    torch.cuda.set_device(device)
                try:
                    results[rank] = fn(SimMember(rank, self.cp_size, scheduler))
                except BaseException as error:
                    scheduler.errors[rank] = error
            scheduler.finish(rank)

        threads = [
            threading.Thread(target=rank_main, args=(r,), name=f"rank {r}", daemon=True) for r in range(self.cp_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        scheduler.raise_errors()
        return results


class SimMember:
    """One rank of a running `SimGroup`; implements `cp_ref.spec.Group`."""

    def __init__(self, rank: int, size: int, scheduler: RankScheduler) -> None:
        self.rank = rank
        self.size = size
        self._scheduler = scheduler

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> SimPending:
        """Post the messages. Receive buffers are filled with NaN (the lowest value for integers) until `wait`."""
        posted_sends: list[tuple[Parcel, PostedMessage, int]] = []
        posted_recvs: list[tuple[Parcel, int]] = []
        for parcel in sends:
            self._check(parcel)
            message = PostedMessage(
                parcel.tag, parcel.tensor, parcel.tensor.detach().clone(), recorded_event(parcel.tensor)
            )
            channel = self._scheduler.sent[self.rank, parcel.peer]
            posted_sends.append((parcel, message, len(channel)))
            channel.append(message)
        for parcel in recvs:
            self._check(parcel)
            poison(parcel.tensor)
            channel = self._scheduler.awaited[parcel.peer, self.rank]
            posted_recvs.append((parcel, len(channel)))
            channel.append(parcel.tag)
        return SimPending(self, self._scheduler, posted_sends, posted_recvs)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return self.gather_from(tuple(range(self.size)), value)

    def gather_from(self, ranks: tuple[int, ...], value: Any) -> list[Any]:
        """The values of some ranks, this one among them; all of them take part."""
        gathered = self._scheduler.gathered[ranks]
        number = len(gathered[self.rank])
        gathered[self.rank].append(value)
        for peer in ranks:
            what = f"rank {peer} to take part in all_gather_object number {number} of ranks {list(ranks)}"
            self._scheduler.wait(self.rank, lambda peer=peer: len(gathered[peer]) > number, what)
        values = [gathered[peer][number] for peer in ranks]
        self._scheduler.read[ranks, number] += 1
        if self._scheduler.read[ranks, number] == len(ranks):
            del self._scheduler.read[ranks, number]
            for peer in ranks:
                gathered[peer][number] = None
        return values

    def split(self, a2a_size: int) -> tuple[SimSubgroup, SimSubgroup]:
        """This rank's place in its a2a group and in its p2p group: rank = p2p_rank * a2a_size + a2a_rank.

        Raises:
            ValueError: a2a_size does not divide the group's size.
        """
        if not _is_positive(a2a_size) or self.size % a2a_size:
            raise ValueError(f"a2a_size is {a2a_size!r}; it must divide the group's size {self.size}")
        first = self.rank - self.rank % a2a_size
        row = tuple(range(first, first + a2a_size))
        return SimSubgroup(self, row), SimSubgroup(self, tuple(range(self.rank % a2a_size, self.size, a2a_size)))

    def _check(self, parcel: Parcel) -> None:
        if not 0 <= parcel.peer < self.size or parcel.peer == self.rank:
            raise MessageError(
                f"rank {self.rank}: a message with tag {parcel.tag} names rank {parcel.peer}, which is no peer"
            )
        if not parcel.tensor.is_contiguous():
            raise MessageError(
                f"rank {self.rank}: the tensor of a message with tag {parcel.tag} and rank {parcel.peer} is not "
                "contiguous"
            )


class SimSubgroup:
    """One rank's place among some ranks of a running `SimGroup`."""

    def __init__(self, member: SimMember, ranks: tuple[int, ...]) -> None:
        self._member, self._ranks, self.ranks = member, ranks, frozenset(ranks)
        self.rank, self.size = ranks.index(member.rank), len(ranks)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> SimPending:
        """As `SimMember.exchange`, with peers counted in this subgroup."""
        there, back = ([p._replace(peer=self._ranks[p.peer]) for p in parcels] for parcels in (sends, recvs))
        return self._member.exchange(there, back)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return self._member.gather_from(self._ranks, value)


class SimPending:
    """The messages of one exchange."""

    def __init__(
        self,
        member: SimMember,
        scheduler: RankScheduler,
        sends: list[tuple[Parcel, PostedMessage, int]],
        recvs: list[tuple[Parcel, int]],
    ) -> None:
        self._member, self._scheduler, self._sends, self._recvs = member, scheduler, sends, recvs

    def wait(self) -> None:
        """Take the messages in; return when all have arrived and all sent ones have a receiver."""
        rank = self._member.rank
        for parcel, place in self._recvs:
            channel = self._scheduler.sent[parcel.peer, rank]
            self._scheduler.wait(
                rank, lambda c=channel, p=place: len(c) > p, f"a receive from rank {parcel.peer} with tag {parcel.tag}"
            )
            message = channel[place]
            assert message is not None, "a message is taken once"
            deliver(message, parcel, rank)
            channel[place] = None
            self._scheduler.taken[parcel.peer, rank] += 1
        for parcel, message, place in self._sends:
            posted = self._scheduler.awaited[rank, parcel.peer]
            self._scheduler.wait(
                rank, lambda c=posted, p=place: len(c) > p, f"a send to rank {parcel.peer} with tag {parcel.tag}"
            )
            if not same(message.original, message.content):
                raise MessageError(
                    f"rank {rank}: the send to rank {parcel.peer} with tag {parcel.tag} changed before its wait"
                )
        self._sends, self._recvs = [], []


def _is_positive(value: Any) -> bool:
    """Whether a caller's value, which may be anything, is a positive integer."""
    return isinstance(value, int) and value >= 1
