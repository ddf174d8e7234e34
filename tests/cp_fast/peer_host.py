"""Peer memory without GPUs: the ranks of a job are threads, whose words and memory are tensors on a CPU."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from cp_fast.transport.peer_exchange import PeerMessages, SharedMemory
from cp_fast.transport.watch import Watch
from cp_ref.groups.group import Parcel

__all__ = ["HERE", "PATIENCE", "Here", "Host", "Stream", "Streams", "Wires", "member", "run"]

PATIENCE = 20.0  # seconds that a thread waits before the test fails


class Host:
    """What the ranks of a job have in common."""

    def __init__(self, size: int, sizes: tuple[int, ...]) -> None:
        self.size, self.sizes = size, sizes
        self.changed = threading.Condition()
        self.staging_buffers = [torch.full((sum(sizes),), 255, dtype=torch.uint8) for _ in range(size)]
        self.words = [torch.zeros(2 * size, dtype=torch.int32) for _ in range(size)]
        self.queues: dict[Any, SimpleQueue[Any]] = {}
        self.by_group: list[int] = []  # peers of the group's own messages
        self.said: list[str] = []  # what is said of messages that do not come

    def queue(self, *key: Any) -> SimpleQueue[Any]:
        with self.changed:
            return self.queues.setdefault(key, SimpleQueue())


class Stream:
    """Operations in a thread of their own, in order."""

    def __init__(self) -> None:
        self._todo = SimpleQueue[Callable[[], Any]]()
        self._failed: BaseException | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            operation = self._todo.get()
            try:
                if self._failed is None:
                    operation()
            except BaseException as error:
                self._failed = error

    def does(self, operation: Callable[[], Any]) -> None:
        self._todo.put(operation)

    def end(self) -> None:
        """Wait for what it has to do so far."""
        ended = threading.Event()
        self._todo.put(ended.set)
        while not ended.wait(0.05):
            if self._failed is not None:
                raise self._failed


class Streams:
    """The current stream's operations are done at once, in the rank's thread; those of the other two in threads of
    theirs. Before each of them any other rank and stream may run ahead.
    """

    def __init__(self, host: Host, rank: int) -> None:
        self._host, self._random = host, random.Random(rank)
        self.captures, self.filling, self.pulling, self._marked = False, Stream(), Stream(), threading.Event()

    def capturing(self) -> bool:
        return self.captures

    def here(self) -> Here:
        return HERE

    def copy(self, stream: Stream | Here, to: int, source: int, size: int) -> None:
        stream.does(lambda: ctypes.memmove(to, source, size))

    def signal(self, stream: Stream | Here, *words: tuple[torch.Tensor, int]) -> None:
        pause = self._random.choice([0.0, 0.0, 2e-3])

        def write() -> None:
            time.sleep(pause)
            with self._host.changed:
                for word, number in words:
                    word.fill_(number)
                self._host.changed.notify_all()

        stream.does(write)

    def wait(self, stream: Stream | Here, word: torch.Tensor, number: int) -> None:
        def wait() -> None:
            with self._host.changed:
                come = self._host.changed.wait_for(lambda: int(word) >= number, PATIENCE)
            assert come, "a word was waited for in vain"

        stream.does(wait)

    def fork(self, here: Here, *streams: Stream) -> None:
        """What is done here is done."""

    def meet(self) -> None:
        filled = threading.Event()
        self.filling.does(filled.set)
        self.pulling.does(lambda: filled.wait(PATIENCE))

    def mark(self) -> None:
        self._marked = threading.Event()
        self.pulling.does(self._marked.set)

    def join(self, here: Here) -> None:
        self.pulling.end()
        assert self._marked.is_set()


class Here:
    """The current stream."""

    def does(self, operation: Callable[[], Any]) -> None:
        operation()


HERE = Here()


class Wires:
    """The group's own messages, by queues."""

    def __init__(self, host: Host, rank: int) -> None:
        self._host, self.rank, self.size = host, rank, host.size

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Wires:
        self._host.by_group += [parcel.peer for parcel in sends]
        for peer, tag, x in sends:
            self._host.queue(self.rank, peer, tag).put(x.clone())
        for peer, tag, x in recvs:
            x.copy_(self._host.queue(peer, self.rank, tag).get(timeout=PATIENCE))
        return self

    def wait(self) -> None:
        pass

    def all_gather_object(self, value: Any) -> list[Any]:
        for peer in range(self.size):
            self._host.queue(self.rank, peer, "object").put(value)
        return [self._host.queue(peer, self.rank, "object").get(timeout=PATIENCE) for peer in range(self.size)]


def member(host: Host, rank: int, limit: float = 600.0, group: Any = None) -> PeerMessages:
    """One rank's place; limit: seconds of the time-out; group: whose own messages there are, those of `Wires`."""

    def word(where: int, number: int) -> torch.Tensor:
        return host.words[where][number : number + 1]

    ranks, ended = range(host.size), torch.zeros(1, dtype=torch.int32)
    shared = SharedMemory(
        [x.data_ptr() for x in host.staging_buffers],
        [word(rank, sender) for sender in ranks],
        [word(receiver, rank) for receiver in ranks],
        [word(rank, host.size + receiver) for receiver in ranks],
        [word(sender, host.size + rank) for sender in ranks],
        host.sizes,
        host.words[rank],
        keeps=host,
    )
    watch = Watch([f"rank {n}" for n in ranks], rank, limit, lambda: int(ended), ended, host.said.append)
    return PeerMessages(group or Wires(host, rank), shared, Streams(host, rank), watch)


def run(host: Host, fn: Callable[[PeerMessages], Any]) -> list[Any]:
    """fn of every rank, in threads."""
    results: list[Any] = [None] * host.size

    def one(rank: int) -> None:
        try:
            results[rank] = fn(member(host, rank))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(host.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
