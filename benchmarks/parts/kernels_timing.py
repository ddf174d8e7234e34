"""Times of kernels and of copies in turns: by CUDA graphs of several launches on a GPU, by the clock on a CPU.

Each launch in a row has tensors of its own, many times the size of the caches in all. A sample is the time of all of
them over their number.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["medians", "sets_for"]

MOST_BYTES, LEAST_BYTES = 3 << 30, 1 << 30  # of all sets together, on a GPU
CPU_BYTES = 256 << 20


def sets_for(moved: int, device: str) -> int:
    """How many sets of tensors, for launches that move so many bytes."""
    if device == "cpu":
        return min(max(CPU_BYTES // max(moved, 1), 2), 16)
    return min(max(LEAST_BYTES // max(moved, 1), min(8, MOST_BYTES // max(moved, 1))), 48)


class Graph:
    """All launches of one kind, captured. What they return is kept, so that each has a result of its own."""

    def __init__(self, launches: Sequence[Callable[[], object]]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launches[0]()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._results = [launch() for launch in launches]
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._launches = len(launches)
        self._graph.replay()

    def sample(self) -> None:
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        self._graph.replay()
        events[1].record()
        self._events.append(events)

    def microseconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) / self._launches for begin, end in self._events]


class Clock:
    """The same by the host's clock; with one thread, by that thread's, which leaves other programs' turns out."""

    def __init__(self, launches: Sequence[Callable[[], object]]) -> None:
        self._launches = launches
        self._samples: list[float] = []
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        # what is freed stays with the process from here on: else large results cost page faults on some calls
        torch.empty(31 << 20, dtype=torch.uint8)
        for launch in launches:
            launch()

    def sample(self) -> None:
        begin = self._now()
        for launch in self._launches:
            launch()
        self._samples.append(1e6 * (self._now() - begin) / len(self._launches))

    def microseconds(self) -> list[float]:
        return self._samples


def medians(kinds: Sequence[Sequence[Callable[[], object]]], device: str, rounds: int) -> list[float]:
    """The median time of a launch of each kind, in microseconds; in turns, A B A B."""
    timers = [(Clock if device == "cpu" else Graph)(launches) for launches in kinds]
    for _ in range(rounds):
        for timer in timers:
            timer.sample()
    return [statistics.median(timer.microseconds()) for timer in timers]
