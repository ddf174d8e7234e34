"""Playing programs with names for values: no tensors, and nothing of how the programs were made.

The programs of all ranks run side by side on the host. A cell of a buffer holds the name of the row and head that lies
there (-1: nothing). A cell of a result also counts, for every pair of the problem, how often it was computed into it.
So what arrives at the owners in the end can be compared with what is visible, pair by pair.

    cell of      counts, one for each
    out, dq      key row; of out, the sink too
    dkv          query row and query head
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cp_fast.compile.program import (
    OWN,
    Accumulate,
    BufferSpec,
    Copy,
    Free,
    Launch,
    Program,
    Programs,
    Recv,
    Send,
    View,
    Wait,
)
from cp_fast.movers.mover_protocol import Rows
from cp_ref.schedules.problem import Workload
from tests.cp_fast.compile.brute_force import Cells, Pairs

__all__ = ["play"]

InFlight = dict[tuple[int, int, int], list[tuple[str, Cells]]]  # kinds and cells, by sender, receiver, tag


def play(
    work: Workload, of_ranks: list[Programs[Rows]], sizes: tuple[int, int] | None = None, *, sink: bool = False
) -> None:
    """Assert that the programs compute every visible pair once, and bring it to the owners of its query and its key.

    `sizes`: rows of every rank's buffers of q and of k and v; as many as it owns by default.
    """
    ranks = [_Rank(work, rank, programs, sizes, Pairs.of(work, sink=sink)) for rank, programs in enumerate(of_ranks)]
    for direction in ("forward", "backward"):
        in_flight: InFlight = {}
        running = {rank.rank: rank.run(in_flight, direction) for rank in ranks}
        while running:
            posted = {key: len(box) for key, box in in_flight.items()}
            ended = [number for number, steps in running.items() if next(steps, "end") == "end"]
            if not ended and posted == {key: len(box) for key, box in in_flight.items()}:
                raise AssertionError(f"ranks {sorted(running)} wait for messages that nobody sends")
            for number in ended:
                del running[number]
        assert not any(in_flight.values()), f"nobody receives {[key for key, box in in_flight.items() if box]}"


@dataclass
class _Rank:
    work: Workload
    rank: int
    programs: Programs[Rows]
    sizes: tuple[int, int] | None
    pairs: Pairs
    held: dict[int, Cells] = field(default_factory=dict)
    kept: dict[int, Cells] = field(default_factory=dict)
    given: dict[int, np.ndarray] = field(default_factory=dict)  # how often each cell of a partial result was added
    handed: set[int] = field(default_factory=set)  # sums whose memory may be that of a message or a result
    posted: list[Recv] = field(default_factory=list)
    leaving: set[int] = field(default_factory=set)  # buffers whose rows are under way

    # ---- a pass

    def run(self, in_flight: InFlight, direction: str) -> Iterator[None]:
        """Play one pass; hand over where a message is not there yet."""
        self.program: Program[Rows] = getattr(self.programs, direction)
        self.buffers = self.program.buffers
        kinds = ("q", "kv") if direction == "forward" else ("do", "res")
        saved = {there: Cells(self.kept[here].names) for here, there in self.programs.saved} if self.kept else {}
        self.held = saved | {OWN[kind]: Cells(self._own(kind)) for kind in kinds}
        self.given, self.handed = {}, set()
        for one in self.program.instructions:
            if isinstance(one, Send):
                self._send(one, in_flight)
            elif isinstance(one, Recv):
                self.posted.append(one)
            elif isinstance(one, Wait):
                yield from self._wait(in_flight)
            elif isinstance(one, Copy):
                self._copy(one)
            elif isinstance(one, Launch):
                self._launch(one)
            elif isinstance(one, Accumulate):
                self._accumulate(one)
            else:
                self._free(one)
        assert not self.posted, "nobody waits for messages"
        self._end(direction)

    def _end(self, direction: str) -> None:
        """Everything is at home, complete; nothing else is held but what is kept."""
        needed = {here for here, _ in self.programs.saved} if direction == "forward" else set[int]()
        there = set(self.held) - set(OWN.values()) - set(self.program.results.values())
        if any(self.program.of(Free)):
            assert there == needed - set(OWN.values())
        self.kept = {number: self.held[number] for number in needed}
        for number in there & needed:
            if self.buffers[number].kind == "out":  # a backward launch reads it
                self._check_whole(number)
        for number in there:
            self._check_given(number)
        for kind in ("out",) if direction == "forward" else ("dq", "dkv"):
            number = self.program.results[kind]
            held = self.held.setdefault(number, self._nothing(number))
            assert (held.names[: len(held.names) - self.programs.spare_rows] == self._own(kind)).all()
            self._check_whole(number)

    def _check_whole(self, number: int) -> None:
        self.pairs.check_whole(self.buffers[number].kind, self.held[number])

    def _free(self, one: Free) -> None:
        for number in one.buffers:
            assert not any(recv.buffer == number for recv in self.posted), "freed while a message arrives"
            self._check_given(number)
            del self.held[number]

    def _check_given(self, number: int) -> None:
        """Every cell of a partial result was added somewhere, once."""
        cells = self.held[number]
        if self.buffers[number].role == "partial" and not self.buffers[number].parts:
            assert cells.counts is not None
            given = self.given.get(number, np.zeros(cells.names.shape, dtype=np.int64))
            assert (given[cells.counts.any(axis=2)] == 1).all(), "a result goes nowhere, or twice"

    # ---- buffers

    def _own(self, kind: str) -> np.ndarray:
        """Names of the rank's own rows: nothing in padding."""
        side = "kv" if kind in ("kv", "dkv") else "q"
        heads = self.work.heads_kv if side == "kv" else self.work.heads_q
        fragments = self.work.ownership.side(side).of(self.rank)
        least = int((fragments.row + fragments.stop - fragments.start).max(initial=0))
        size = least if self.sizes is None else self.sizes[side == "kv"]
        names = np.full((size, heads), -1)
        for _, start, stop, row in fragments.rows():
            names[row : row + stop - start] = np.arange(start, stop)[:, None] * heads + np.arange(heads)
        return names

    def _nothing(self, number: int) -> Cells:
        """A buffer that nothing was written to; of the rank's own rows the names are known."""
        spec = self.buffers[number]
        spare = self.programs.spare_rows * (spec.role in ("operand", "sum", "result") and not spec.parts)
        if spec.rows is None:
            names = np.pad(self._own(spec.kind)[:, slice(*spec.heads)], ((0, spare), (0, 0)), constant_values=-1)
        else:
            parts = (spec.parts,) if spec.parts else ()
            names = np.full((*parts, spec.rows + spare, spec.heads[1] - spec.heads[0]), -1)
        return self.pairs.nothing(spec.kind, names)

    def _read(self, view: View[Rows]) -> Cells:
        assert view.buffer in self.held, f"{self.buffers[view.buffer].name} is not there"
        held, (first, last) = self.held[view.buffer], view.heads
        assert 0 <= first < last <= held.names.shape[1]
        rows = _index(view.rows, len(held.names))
        return held.of(rows, first, last)

    def _target(self, view: View[Rows]) -> tuple[Cells, np.ndarray]:
        """A buffer that is written to, and the rows."""
        assert view.buffer not in self.leaving, "a buffer is changed while it is sent"
        held = self.held.setdefault(view.buffer, self._nothing(view.buffer))
        return held, _index(view.rows, len(held.names))

    def _put(self, into: Cells, rows: np.ndarray, heads: tuple[int, int], cells: Cells, spec: BufferSpec) -> None:
        """Add cells to others of the same names; what pads a table goes to the spare row, which nobody reads."""
        spare = len(into.names) - self.programs.spare_rows * (spec.role in ("operand", "sum", "result"))
        cells, rows = cells.of(np.flatnonzero(rows < spare)), rows[rows < spare]
        assert len(np.unique(rows)) == len(rows), "two rows are written to one"
        there = into.names[rows, slice(*heads)]
        assert there.shape == cells.names.shape
        known = cells.names >= 0  # of a row that saw nothing a message has no name
        assert ((there == cells.names) | (there < 0))[known].all(), "a row is written to another one's place"
        assert spec.rows is not None or (there == cells.names)[known].all(), "results end at another rank"
        into.names[rows, slice(*heads)] = np.where(known, cells.names, there)
        if into.counts is not None:
            assert cells.counts is not None
            assert not cells.counts[~known].any()
            into.counts[rows, slice(*heads)] += cells.counts

    # ---- messages

    def _send(self, one: Send[Rows], in_flight: InFlight) -> None:
        spec = self.buffers[one.source.buffer]
        cells = self._read(one.source) if one.part is None else self.held[one.source.buffer].of(one.part)
        if spec.role in ("own", "operand"):
            assert self.programs.spare_rows or (cells.names >= 0).all(), f"nothing to send of {spec.kind}"
        in_flight.setdefault((self.rank, one.peer, one.tag), []).append((spec.kind, cells))
        self.leaving.add(one.source.buffer)

    def _wait(self, in_flight: InFlight) -> Iterator[None]:
        assert self.posted or self.leaving, "nothing is under way"
        for recv in self.posted:
            while not in_flight.get((recv.peer, self.rank, recv.tag)):
                yield
            kind, cells = in_flight[recv.peer, self.rank, recv.tag].pop(0)
            spec = self.buffers[recv.buffer]
            assert kind == spec.kind
            assert len(cells.names) == recv.size
            if recv.rows is None:
                assert recv.part is not None or recv.buffer not in self.held, "a buffer is received twice"
            into = self.held.setdefault(recv.buffer, self._nothing(recv.buffer))
            part = into if recv.part is None else into.of(recv.part, copied=False)
            rows = np.concatenate([_index(rows, 0) for rows in recv.rows or (slice(0, recv.size),)])
            assert (part.names[rows] < 0).all(), "a message overwrites what is there"
            self._put(part, rows, (0, part.names.shape[1]), cells, spec)
        self.posted, self.leaving = [], set()

    # ---- copies

    def _copy(self, one: Copy[Rows]) -> None:
        source, target = self.buffers[one.source.buffer], self.buffers[one.target.buffer]
        assert source.kind == target.kind
        if source.role == "sum":
            self.held.setdefault(one.source.buffer, self._nothing(one.source.buffer))
            self.handed.add(one.source.buffer)
        into, rows = self._target(one.target)
        if target.parts:
            cells = self._read(one.source)
            for part, first in enumerate(one.first_heads):
                some = cells.of(slice(None), first, first + into.names.shape[2])
                into.names[part] = some.names
            return
        if source.parts:
            parts = self.held[one.source.buffer]
            blocks = [(parts.of(part), first) for part, first in enumerate(one.first_heads)]
        else:
            blocks = [(self._read(one.source), one.target.heads[0])]
        for cells, first in blocks:
            heads = first, first + cells.names.shape[1]
            if one.source.rows is None and one.target.rows is None:  # one of them may have spare rows
                n = min(len(cells.names), len(rows))
                cells, rows = cells.of(np.arange(n)), rows[:n]
            if into.counts is None:
                used = rows[rows < len(into.names) - self.programs.spare_rows]
                assert (into.names[used, slice(*heads)] < 0).all(), "a cell is copied twice"
            else:
                pairs = into.counts[..., :-1] if target.kind == "out" else into.counts  # a sink of nothing may be there
                assert not pairs[rows, slice(*heads)].any(), "a copy overwrites a result"
                into.counts[rows, slice(*heads)] = 0
            self._put(into, rows, heads, cells, target)

    # ---- results

    def _launch(self, one: Launch[Rows]) -> None:
        operands = [self._read(view).names for view in one.operands]
        kinds = ["q", "kv", "do", "res"][: len(operands)]
        assert [self.buffers[view.buffer].kind for view in one.operands] == kinds
        results = self.pairs.of_launch(one, operands, padded=self.programs.spare_rows > 0)
        if one.into is not None:
            into, rows = self._target(one.into)
            named = (results[0].names >= 0).all(axis=1)
            self._put(
                into, rows[named], one.into.heads, results[0].of(np.flatnonzero(named)), self.buffers[one.results[0]]
            )
            return
        of_kind: dict[str, Any] = {"out": results[0], "dq": results[0], "dkv": results[1]}
        for number in one.results:
            self.held[number] = of_kind[self.buffers[number].kind]

    def _accumulate(self, one: Accumulate[Rows]) -> None:
        assert one.target.buffer not in self.handed, "a sum is changed after it was handed over"
        into, rows = self._target(one.target)
        spec, heads = self.buffers[one.target.buffer], one.target.heads
        if one.source.buffer == OWN["sink"]:
            assert one.source.heads == (spec.heads[0] + heads[0], spec.heads[0] + heads[1])
            self.pairs.add_sink(into, rows)
            return
        assert self.buffers[one.source.buffer].kind == spec.kind
        cells = self._read(one.source)
        self._put(into, rows, heads, cells, spec)
        given = self.given.setdefault(
            one.source.buffer, np.zeros(self.held[one.source.buffer].names.shape, dtype=np.int64)
        )
        used = rows < len(into.names) - self.programs.spare_rows
        given[_index(one.source.rows, len(given))[used], slice(*one.source.heads)] += 1


def _index(rows: Rows | None, size: int) -> np.ndarray:
    if rows is None:
        return np.arange(size)
    if isinstance(rows, slice):
        return np.arange(rows.start, rows.stop)
    found = rows.cpu().numpy()
    return np.flatnonzero(found) if found.dtype == bool else found.astype(np.int64)
