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
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from cp_ref.groups.group import Parcel

__all__ = [
    "Deadlock",
    "MessageError",
    "PostedMessage",
    "RankScheduler",
    "SimGroup",
    "SimMember",
    "SimSubgroup",
    "deliver",
    "poison",
    "recorded_event",
    "same",
]


class MessageError(RuntimeError):
    """Messages that do not fit: another tag, shape or dtype, a send buffer that changed too early, one nobody took."""


@dataclass
class PostedMessage:
    """A message under way, with its content at the time of posting."""

    tag: int
    original: torch.Tensor
    content: torch.Tensor
    ready: torch.cuda.Event | None


def deliver(message: PostedMessage, parcel: Parcel, rank: int) -> None:
    """Copy a message into `rank`'s buffer; MessageError where tag, shape or dtype differ."""
    where = f"rank {rank}: the next message from rank {parcel.peer}"
    if message.tag != parcel.tag:
        raise MessageError(f"{where} has tag {message.tag}, but tag {parcel.tag} is expected")
    content, buffer = message.content, parcel.tensor
    if (content.shape, content.dtype) != (buffer.shape, buffer.dtype):
        raise MessageError(
            f"{where} (tag {message.tag}) is {content.dtype} {list(content.shape)}, "
            f"the buffer {buffer.dtype} {list(buffer.shape)}"
        )
    if message.ready is not None:
        torch.cuda.current_stream(content.device).wait_event(message.ready)
    with torch.no_grad():
        buffer.copy_(content)


def poison(buffer: torch.Tensor) -> None:
    """Fill a receive buffer with values that must not be read: NaN, or the lowest integer."""
    with torch.no_grad():
        if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
            buffer.fill_(float("nan"))
        elif buffer.dtype != torch.bool:
            buffer.fill_(torch.iinfo(buffer.dtype).min)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, NaN included."""
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A copy with plain strides: `contiguous` keeps odd ones where a size is 1."""
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def recorded_event(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """An event recorded where the content was cloned, for a receiver on another stream."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


class Deadlock(RuntimeError):
    """No rank can go on. The message names the operation that each rank waits for."""


@dataclass
class RankScheduler:
    """Runs one rank at a time, and sees when none can run.

    Delivered messages become None, so a long run needs no more memory than a short one.
    """

    size: int
    sent: dict[tuple[int, int], list[PostedMessage | None]] = field(default_factory=lambda: defaultdict(list))
    awaited: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    taken: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    errors: dict[int, BaseException] = field(default_factory=dict[int, BaseException])

    def __post_init__(self) -> None:
        self.gathered: dict[tuple[int, ...], dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self.read: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)  # how many ranks read it
        self._turns = [threading.Lock() for _ in range(self.size)]  # only the running rank's is free
        for turn in self._turns[1:]:
            turn.acquire()
        self._blocked: dict[int, tuple[Callable[[], bool], str]] = {}
        self._finished: set[int] = set()
        self._dead = ""

    def wait_to_run(self, rank: int) -> None:
        self._turns[rank].acquire()

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `ready()`."""
        if ready():
            return
        self._blocked[rank] = (ready, what)
        self._pass_on(rank)
        self.wait_to_run(rank)
        del self._blocked[rank]
        if not ready():
            raise Deadlock(self._dead)

    def finish(self, rank: int) -> None:
        self._finished.add(rank)
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        """Let the next rank run that can. If none can, the next blocked one runs, and raises."""
        others = [(rank + n) % self.size for n in range(1, self.size + 1)]
        waiting = [r for r in others if r not in self._finished]
        able = [r for r in waiting if r not in self._blocked or self._blocked[r][0]()]
        if not able and waiting and not self._dead:
            self._dead = self._describe()
        for following in (able or waiting)[:1]:
            self._turns[following].release()

    def _describe(self) -> str:
        lines = ["deadlock: no rank can go on"]
        for rank in range(self.size):
            if rank in self.errors:
                lines.append(f"  rank {rank} failed: {type(self.errors[rank]).__name__}: {self.errors[rank]}")
            elif rank in self._finished:
                lines.append(f"  rank {rank} has finished")
            else:
                lines.append(f"  rank {rank} waits for {self._blocked[rank][1]}")
        return "\n".join(lines)

    def raise_errors(self) -> None:
        """Raise the first error: a rank's failure, before the deadlock that it caused."""
        ranks = sorted(self.errors, key=lambda r: (isinstance(self.errors[r], Deadlock), r))
        if ranks:
            raise self.errors[ranks[0]]
        for (src, dst), messages in self.sent.items():
            for message in filter(None, messages):
                raise MessageError(
                    f"rank {src} sent a message with tag {message.tag} to rank {dst}, which never took it"
                )
        for (src, dst), tags in self.awaited.items():
            if len(tags) > self.taken[src, dst]:
                tag = tags[self.taken[src, dst]]
                raise MessageError(
                    f"rank {dst} posted a receive with tag {tag} from rank {src} and never waited for it"
                )


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
                try:
                    if device is not None:
                        torch.cuda.set_device(device)
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
    """One rank of a running `SimGroup`; implements `cp_ref.groups.group.Group`."""

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
