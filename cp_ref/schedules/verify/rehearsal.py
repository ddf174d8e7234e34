"""One pass (forward or backward) of all ranks, rehearsed on sets of rows until it ends or nothing moves.

A send and its receive are a rendezvous: a step ends when all its messages have met their counterparts. Between two
ranks the n-th message that one sends is the n-th that the other receives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from cp_ref.schedules.schedule import OPERANDS, RESULTS, STATES, Message, RankSchedule, Scans, Schedule, Tiles, side_of
from cp_ref.schedules.table import Column
from cp_ref.schedules.verify.coverage import Cells, Grid, TileUses, boxes_of

__all__ = [
    "Contributions",
    "Rehearsal",
    "Store",
]

# ---- complete results
#
# Is a result that is marked complete all there is of its rows and heads? The mark is proved, never believed.
#
# An executor may round such a result before it sends it, and its owner may write it where it belongs, without adding.
# So the message has to end at the owner of its rows. In the whole pass, nothing else may touch these rows and heads
# there: no tile of the owner, no other message, and no message from the owner.


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


Store = dict[str, Column]  # By kind of operand: whether the rank has each cell of the grid, [cells], bool.

_NEEDS = {"forward": ("q", "kv"), "backward": ("q", "kv", "do")}
_GIVES = {"forward": ("out",), "backward": ("dq", "dkv")}


class RehearsedMessage(NamedTuple):
    """A message that was posted, and its content."""

    message: Message
    cells: Cells
    tiles: Column  # Of results: the number of a tile in each cell's sum, or -1.
    where: str


@dataclass
class _Rank:
    """Where one rank is in its schedule. `waiting`: verb, message, its number between the two ranks."""

    rank_schedule: RankSchedule
    step: int = 0
    waiting: list[tuple[str, Message, int]] = field(default_factory=list[tuple[str, Message, int]])


class Rehearsal:
    """A pass, rehearsed on sets of rows before an executor plays it with tensors: `run`, then read the findings.

    Attributes:
        errors: a sentence for each finding.
        stuck: whether a rank did not reach its end.
        has, results: the cells that each rank has at the end, by kind; of results the number of a tile in each cell's
            sum.
        contributions: what happened to the results.
        uses: the tiles of all ranks.
    """

    def __init__(
        self,
        name: Literal["forward", "backward"],
        schedule: Schedule,
        grids: Mapping[str, Grid],
        has: Sequence[Store],
        describe: Callable[[str, int, int], str],
    ) -> None:
        """`has`: the cells that each rank starts with; `describe(kind, start, stop)`: words for rows of a kind."""
        self.name, self.schedule, self.grids, self.describe = name, schedule, grids, describe
        rank_schedules = schedule.forward if name == "forward" else schedule.backward
        self.ranks = [_Rank(rank_schedule) for rank_schedule in rank_schedules]
        self.has = [{k: start.get(k, self._new(k, False)) for k in OPERANDS + STATES} for start in has]
        self.results = [{k: self._new(k, -1) for k in RESULTS} for _ in rank_schedules]
        self.contributions = Contributions(grids, len(rank_schedules))
        self.errors: list[str] = []
        self.stuck = False
        self._tiles: list[tuple[Tiles, int, int]] = []
        self._count = 0
        channels = [(a, b) for a in range(len(rank_schedules)) for b in range(len(rank_schedules))]
        self._sent: dict[tuple[int, int], list[RehearsedMessage]] = {channel: [] for channel in channels}
        self._awaited: dict[tuple[int, int], int] = dict.fromkeys(channels, 0)  # how many receives were posted

    @property
    def uses(self) -> TileUses:
        """The tiles that were computed, in the order of their numbers."""
        place = [np.array([[rank, step]] * len(tiles), dtype=np.int64) for tiles, rank, step in self._tiles]
        places = np.concatenate([np.zeros((0, 2), dtype=np.int64), *place])
        return TileUses(Tiles.concat([tiles for tiles, _, _ in self._tiles]), places[:, 0], places[:, 1])

    def run(self) -> None:
        """Run every rank as far as it goes."""
        ready = deque(range(len(self.ranks)))
        for rank in ready:
            self._post(rank)
        while ready:
            rank = ready.popleft()
            moved = False
            while self._finished_step(rank):
                moved = True
            if moved:
                ready.extend(r for r in range(len(self.ranks)) if r != rank and r not in ready)
        self._look_for_stuck()

    def _new(self, kind: str, value: int) -> Column:
        return np.full(self.grids[side_of(kind)].size, value)

    def _where(self, rank: int) -> str:
        return f"{self.name} rank {rank} step {self.ranks[rank].step}"

    def _post(self, rank: int) -> None:
        """Begin the rank's current step: post its messages, compute its tiles."""
        state = self.ranks[rank]
        if state.step >= len(state.rank_schedule):
            return
        step = state.rank_schedule[state.step]
        for message in step.sends:
            channel = self._sent[rank, message.peer]
            state.waiting.append(("send", message, len(channel)))
            channel.append(self._take(rank, message))
        for message in step.recvs:
            state.waiting.append(("recv", message, self._awaited[message.peer, rank]))
            self._awaited[message.peer, rank] += 1
        if len(step.tiles):
            self._compute(rank, step.tiles)
        if len(step.scans):
            self._compose(rank, step.scans)

    def _take(self, rank: int, message: Message) -> RehearsedMessage:
        """The rows that the rank sends; results leave the rank."""
        cells = self.grids[side_of(message.kind)].cells(*message.pieces.columns)
        if message.kind in RESULTS:
            tiles = self.results[rank][message.kind][cells.cell]
            self.results[rank][message.kind][cells.cell] = -1
            self.contributions.send(rank, message.kind, cells)
            lacking = tiles < 0
        else:
            tiles, lacking = cells.cell[:0], ~self.has[rank][message.kind][cells.cell]
        pieces = message.pieces
        for n in np.unique(cells.box[lacking]).tolist():
            rows = self.describe(message.kind, int(pieces.start[n]), int(pieces.stop[n]))
            self.errors.append(f"{self._where(rank)}: sends {rows} to rank {message.peer}, but does not have it")
        return RehearsedMessage(message, cells, tiles, self._where(rank))

    def _compute(self, rank: int, tiles: Tiles) -> None:
        """Check that the operands are there, and leave results."""
        cells = {side: self.grids[side].cells(*boxes_of(side, tiles, self.schedule)) for side in ("q", "kv")}
        for kind in _NEEDS[self.name]:
            of_kind = cells[side_of(kind)]
            lacking = ~self.has[rank][kind][of_kind.cell]
            for n in np.unique(of_kind.box[lacking]).tolist():
                tile = next(tiles.take(slice(n, n + 1)).rows())
                rows = self.describe(kind, *(tile[3:5] if kind == "kv" else tile[1:3]))
                text = self.schedule.tile_text(tile)
                self.errors.append(f"{self._where(rank)}: {text} needs {rows}, which is not there")
        for kind in _GIVES[self.name]:
            of_kind = cells[side_of(kind)]
            self.results[rank][kind][of_kind.cell] = self._count + of_kind.box
            self.contributions.compute(rank, kind, of_kind)
        self._tiles.append((tiles, rank, self.ranks[rank].step))
        self._count += len(tiles)

    def _compose(self, rank: int, scans: Scans) -> None:
        """Check that the maps are there."""
        kind = "state" if self.name == "forward" else "dstate"
        all_heads = (np.full_like(scans.start, head) for head in self.schedule.all_heads(kind))
        cells = self.grids[side_of(kind)].cells(scans.start, scans.stop, *all_heads)
        for n in np.unique(cells.box[~self.has[rank][kind][cells.cell]]).tolist():
            rows = self.describe(kind, int(scans.start[n]), int(scans.stop[n]))
            self.errors.append(f"{self._where(rank)}: a scan needs {rows}, which is not there")

    def _finished_step(self, rank: int) -> bool:
        """End the rank's step if all its messages are matched, and begin the next."""
        state = self.ranks[rank]
        if state.step >= len(state.rank_schedule) or not all(
            self._matched(rank, *waiting) for waiting in state.waiting
        ):
            return False
        for verb, message, number in state.waiting:
            if verb == "recv":
                self._receive(rank, message, self._sent[message.peer, rank][number])
        state.waiting = []
        state.step += 1
        self._post(rank)
        return True

    def _matched(self, rank: int, verb: str, message: Message, number: int) -> bool:
        """Whether the peer has posted the other half of a message."""
        if verb == "send":
            return number < self._awaited[rank, message.peer]
        return number < len(self._sent[message.peer, rank])

    def _receive(self, rank: int, message: Message, sent: RehearsedMessage) -> None:
        arrives = replace(sent.message, peer=message.peer)
        kind = arrives.kind
        if arrives != message:
            self.errors.append(
                f"{self._where(rank)}: expects {self.schedule.message_text(message, 'recv')!r}, but the next message "
                f"is {self.schedule.message_text(sent.message, 'send')!r} ({sent.where})"
            )
        if kind in RESULTS:
            there = sent.tiles >= 0
            self.results[rank][kind][sent.cells.cell[there]] = sent.tiles[there]
            self.contributions.receive(rank, arrives, sent.cells, self._where(rank))
        else:
            self.has[rank][kind][sent.cells.cell] = True

    def _look_for_stuck(self) -> None:
        """Name the messages that the ranks wait for when nothing moves any more."""
        done = [state.step >= len(state.rank_schedule) for state in self.ranks]
        self.stuck = not all(done)
        blocked: list[str] = []
        for rank, state in enumerate(self.ranks):
            for verb, message, number in state.waiting:
                if not self._matched(rank, verb, message, number):
                    lone = "a receive without a send" if verb == "recv" else "a send without a receive"
                    line = f"{self._where(rank)}: {self.schedule.message_text(message, verb)!r}"
                    blocked.append(f"{line}: {lone if done[message.peer] else 'waits'}")
        if blocked and not any("without" in line for line in blocked):
            blocked = [f"{line} in a deadlock" for line in blocked]
        self.errors += blocked
