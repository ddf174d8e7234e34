"""One problem on all ranks of a pool of processes: who has said what, and whom the driver waits for."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import Any

from conformance.workers.forks import copies
from conformance.workers.worker import Worker

__all__ = ["GRACE_S", "Turn"]

GRACE_S = 5.0  # for the other ranks, when one has raised


class Turn:
    """One problem on all ranks: who has said what."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self.answers: dict[int, tuple[str, Any]] = {}
        self._outcomes: dict[int, tuple[bool, str, bytes | None]] = {}
        self.failed = 0.0  # when the first rank of this round raised

    @property
    def over(self) -> bool:
        """Whether every rank has answered."""
        return len(self.answers) == len(self._workers)

    def ready(self, timeout_s: float) -> list[int]:
        """The ranks that have something to say."""
        connections = [worker.connection for worker in self._workers]
        found = wait(connections, max(0.0, min(timeout_s, GRACE_S / 10)))
        return [rank for rank, connection in enumerate(connections) if connection in found]

    def take(self, rank: int) -> None:
        """Take in what a rank says; when all have said what they got, tell all. Raises WorkerDied."""
        word, *rest = self._workers[rank].receive(1.0)
        if word != "outcome":
            self.answers[rank] = (word, rest[0])
            return
        self._outcomes[rank] = (rest[0], rest[1], rest[2])
        if rest[0] and not self.failed:
            self.failed = time.monotonic()
        if len(self._outcomes) == len(self._workers):
            everyone = [self._outcomes[n][2] for n in range(len(self._workers))]
            self._outcomes, self.failed = {}, 0.0
            for worker in self._workers:
                worker.send(("outcomes", everyone))

    def errors(self) -> list[str]:
        """The errors that ranks raised in this round."""
        return [f"rank {rank} raised {said}" for rank, (failed, said, _) in sorted(self._outcomes.items()) if failed]

    def waiting(self, seconds: float) -> list[str]:
        """The ranks that have not come back, and where they are."""
        found = []
        for rank, worker in enumerate(self._workers):
            if rank not in self._outcomes and rank not in self.answers:
                if there := copies(worker.pid):
                    found.append(f"a call of rank {rank} forked the process, and left {len(there)} copies of it behind")
                places = "; ".join(worker.where()[:2]) or "nobody can say where"
                found.append(f"rank {rank} did not finish within {seconds:.3g} s: {places}")
        return found
