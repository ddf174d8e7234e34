"""Real processes over gloo, started once: each call runs one function in all of them."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Processes"]


def _main(rank: int, size: int, store: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    while (task := tasks.get()) is not None:
        fn, arguments = task
        try:
            results.put((rank, fn(*arguments)))
        except Exception as error:
            results.put((rank, error))
    dist.destroy_process_group()


class Processes:
    """A gloo group of `size` processes."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._results = context.SimpleQueue()
        self._tasks = [context.SimpleQueue() for _ in range(size)]
        store = str(Path(self._folder.name) / "store")
        self._processes = [
            context.Process(target=_main, args=(rank, size, store, tasks, self._results))
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()

    def run(self, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`fn(*arguments)` in every process; the results by rank, or the exceptions in their place."""
        for tasks in self._tasks:
            tasks.put((fn, arguments))
        return [value for _, value in sorted((self._results.get() for _ in self._tasks), key=lambda item: item[0])]

    def close(self) -> None:
        """End the processes."""
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(timeout=60)
        self._folder.cleanup()
