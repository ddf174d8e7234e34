"""Is a result that is marked complete all there is of its rows and heads? The mark is proved, never believed.

An executor may round such a result before it sends it, and its owner may write it where it belongs, without adding. So
the message has to end at the owner of its rows. In the whole pass, nothing else may touch these rows and heads there:
no tile of the owner, no other message, and no message from the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from cp_ref.spec.tables.messages import RESULTS, Message, side_of
from cp_ref.spec.tables.schedule import Schedule
from cp_ref.spec.tables.table import Column
from cp_ref.spec.verify.grid import Cells, Grid

__all__ = ["Contributions"]


class Contributions:
    """Everything that happens to every cell of every rank's results while a pass is played."""

    def __init__(self, grids: Mapping[str, Grid], cp_size: int) -> None:
        def none() -> list[dict[str, Column]]:
            sizes = {kind: grids[side_of(kind)].size for kind in RESULTS}
            return [{kind: np.zeros(size, dtype=np.int64) for kind, size in sizes.items()} for _ in range(cp_size)]

        self._grids = grids
        self._computed, self._sent, self._arrived = none(), none(), none()
        self._marked: list[tuple[int, Message, Column, str]] = []

    def compute(self, rank: int, kind: str, cells: Cells) -> None:
        """A tile of the rank adds to these cells."""
        self._computed[rank][kind][cells.cell] = 1

    def send(self, rank: int, kind: str, cells: Cells) -> None:
        """The rank sends these cells."""
        self._sent[rank][kind][cells.cell] = 1

    def receive(self, rank: int, message: Message, cells: Cells, where: str) -> None:
        """Results arrive at the rank, at this place."""
        self._arrived[rank][message.kind][cells.cell] += 1
        if message.complete:
            self._marked.append((rank, message, cells.cell, where))

    def errors(
        self, schedule: Schedule, owned: Sequence[Mapping[str, Column]], rows: Callable[[str, int, int], str]
    ) -> Iterator[str]:
        """A sentence for each message whose mark is wrong. `owned`: by rank and side, which cells it owns;
        `rows(kind, start, stop)`: words for rows of a kind.
        """
        for rank, message, cells, where in self._marked:
            kind, side = message.kind, side_of(message.kind)
            found = {
                "belongs to another rank": ~owned[rank][side][cells],
                f"is computed by rank {rank} too": self._computed[rank][kind][cells] > 0,
                "arrives in another message too": self._arrived[rank][kind][cells] > 1,
                f"is handed on by rank {rank}": self._sent[rank][kind][cells] > 0,
            }
            for why, wrong in found.items():
                if wrong.any():
                    first = rows(kind, *self._grids[side].rows_of(int(cells[wrong][0])))
                    yield f"{where}: {schedule.message_text(message, 'recv')!r} is not complete: {first} {why}"
