"""Proof by integers that a schedule computes its problem: no tensor, no float, no knowledge of how it was planned.

`verify` plays the schedule on sets of positions. Every rank starts with what it owns; messages are matched in order
between each pair of ranks and cost a rendezvous, as on a real wire; results carry the name of the tile they come from.
It finds

    a pair computed twice or never          a receive without a send, a send without a receive
    an operand that is not there            messages that do not agree
    a result that does not reach its owner  a deadlock

and names rank and step of each. What is left is a report: work, balance and bytes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from cp_ref.spec.coverage import TileUse, coverage_errors
from cp_ref.spec.head_cuts import HeadCuts
from cp_ref.spec.problem import Problem
from cp_ref.spec.report import Report, report
from cp_ref.spec.schedule import RESULTS, Message, Piece, Program, Schedule, Tile
from cp_ref.spec.spans import Spans
from cp_ref.spec.units import real_rows

__all__ = ["InvalidSchedule", "verify"]

_MOST_ERRORS = 20


class InvalidSchedule(ValueError):
    """The schedule does not compute its problem. `errors` has one sentence for each finding."""

    def __init__(self, errors: list[str]) -> None:
        self.errors = errors
        more = [f"... and {len(errors) - _MOST_ERRORS} more"] if len(errors) > _MOST_ERRORS else []
        super().__init__("\n".join(["the schedule is wrong:", *errors[:_MOST_ERRORS], *more]))


def verify(problem: Problem, schedule: Schedule) -> Report:
    """Check that `schedule` computes `problem`, forward and backward.

    Returns:
        What it costs: for every rank tokens, tiles, visible pairs and bytes, and the balance.

    Raises:
        InvalidSchedule: with every finding.
    """
    if schedule.cp_size != problem.cp_size or len(schedule.backward) != problem.cp_size:
        sizes = f"{schedule.cp_size} forward and {len(schedule.backward)} backward"
        raise InvalidSchedule([f"the schedule has programs for {sizes} ranks, but cp_size is {problem.cp_size}"])
    heads = HeadCuts(problem, schedule)
    forward = _Pass("forward", problem, heads, schedule.forward, ("q", "kv"), "out")
    forward.play([_owned(problem, heads, rank, ("q", "kv")) for rank in range(problem.cp_size)])
    starts = [_owned(problem, heads, rank, ("q", "kv", "do")) for rank in range(problem.cp_size)]
    for rank, start in enumerate(starts):
        for (what, seq, cut), spans in forward.has[rank].items():
            if what in schedule.saved:
                for span in spans:
                    start[what, seq, cut].add(*span)
    backward = _Pass("backward", problem, heads, schedule.backward, ("q", "kv", "do"), "dq")
    backward.play(starts)
    errors = forward.errors + backward.errors
    if errors:
        raise InvalidSchedule(errors)
    return report(problem, schedule)


Key = tuple[str, int, int]  # what, sequence, head cut
Store = defaultdict[Key, Spans]
Record = tuple[int, int, int]  # start, stop, index of the tile in the pass


def _owned(problem: Problem, heads: HeadCuts, rank: int, kinds: tuple[str, ...]) -> Store:
    store: Store = defaultdict(Spans)
    for what in kinds:
        for seq, start, stop in _spans(problem, rank, what):
            for cut in heads.of(what, None):
                store[what, seq, cut].add(start, stop)
    return store


def _spans(problem: Problem, rank: int, what: str) -> list[tuple[int, int, int]]:
    """The real tokens (no padding) that a rank owns on the side of `what`, as (sequence, start, stop)."""
    side = "kv" if what in ("kv", "dkv") else "q"
    return [(p.seq, p.start, p.stop) for p in real_rows(problem, rank, side)]


@dataclass
class _Rank:
    """Where one rank is in its program."""

    program: Program
    step: int = 0
    waiting: list[tuple[str, Message, int]] = field(
        default_factory=list[tuple[str, Message, int]]
    )  # verb, message, place in its channel


class _Pass:
    """One pass (forward or backward) of all ranks, played until it ends or nothing moves."""

    def __init__(
        self,
        name: str,
        problem: Problem,
        heads: HeadCuts,
        programs: tuple[Program, ...],
        needed: tuple[str, ...],
        result: str,
    ) -> None:
        self.name, self.problem, self.heads, self.needed = name, problem, heads, needed
        self.row_result = result  # what a tile adds to its query rows
        self.ranks = [_Rank(program) for program in programs]
        self.errors: list[str] = []
        self.tiles: list[TileUse] = []
        self.has: list[Store] = []
        self.results: list[dict[Key, list[Record]]] = [{} for _ in programs]
        size = range(len(programs))
        # the messages posted so far from rank a to rank b, in order: each send with what it carries
        self.sent: dict[tuple[int, int], list[tuple[Message, list[tuple[Key, list[Record]]], str]]] = {
            (a, b): [] for a in size for b in size
        }
        self.awaited: dict[tuple[int, int], list[tuple[Message, str]]] = {(a, b): [] for a in size for b in size}

    def play(self, starts: list[Store]) -> None:
        """Run every rank as far as it goes; then look at what remains."""
        self.has = starts
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
        if not self._stuck():
            self.errors += coverage_errors(self.problem, self.name, self.tiles, self.heads.cuts, self._holders)
            self._check_owners()

    def _where(self, rank: int) -> str:
        return f"{self.name} rank {rank} step {self.ranks[rank].step}"

    def _post(self, rank: int) -> None:
        """Begin the rank's current step: post its messages, note its tiles."""
        state = self.ranks[rank]
        if state.step >= len(state.program):
            return
        step, where = state.program[state.step], self._where(rank)
        for message in step.sends + step.recvs:
            if not 0 <= message.peer < len(self.ranks) or message.peer == rank:
                self.errors.append(f"{where}: {message.what} to or from rank {message.peer}, which is no peer")
        for message in step.sends:
            channel = self.sent.setdefault((rank, message.peer), [])
            state.waiting.append(("send", message, len(channel)))
            channel.append((message, self._take(rank, message, where), where))
        for message in step.recvs:
            channel = self.awaited.setdefault((message.peer, rank), [])
            state.waiting.append(("recv", message, len(channel)))
            channel.append((message, where))
        for tile in step.tiles:
            self._compute(rank, tile, where)

    def _take(self, rank: int, message: Message, where: str) -> list[tuple[Key, list[Record]]]:
        """Check that the rank has what it sends; results leave it."""
        taken: list[tuple[Key, list[Record]]] = []
        for piece in message.pieces:
            for cut in self.heads.of(message.what, piece.heads):
                key = (message.what, piece.seq, cut)
                if message.what in RESULTS:
                    records = self.results[rank].get(key, [])
                    moved, kept = _split(records, piece.start, piece.stop)
                    self.results[rank][key] = kept
                    there = Spans()
                    for start, stop, _ in moved:
                        there.add(start, stop)
                    taken.append((key, moved))
                else:
                    there = self.has[rank][key]
                if not there.cover(piece.start, piece.stop):
                    self.errors.append(
                        f"{where}: sends {message.what} {piece} to rank {message.peer}, but does not have it"
                    )
        return taken

    def _compute(self, rank: int, tile: Tile, where: str) -> None:
        rect, seq = tile.rect, tile.seq
        for what in self.needed:
            start, stop = (rect.k0, rect.k1) if what == "kv" else (rect.q0, rect.q1)
            cuts = self.heads.kv_of_tile(tile.heads) if what == "kv" else self.heads.of(what, tile.heads)
            if not all(self.has[rank][what, seq, cut].cover(start, stop) for cut in cuts):
                self.errors.append(f"{where}: {tile} needs {what} {Piece(seq, start, stop)}, which is not there")
        number = len(self.tiles)
        self.tiles.append(TileUse(tile, rank, self.ranks[rank].step))
        cuts = self.heads.of(self.row_result, tile.heads)
        self._add(rank, [((self.row_result, seq, cut), [(rect.q0, rect.q1, number)]) for cut in cuts])
        if self.name == "backward":
            kv_cuts = self.heads.kv_of_tile(tile.heads)
            self._add(rank, [(("dkv", seq, cut), [(rect.k0, rect.k1, number)]) for cut in kv_cuts])

    def _add(self, rank: int, contributions: list[tuple[Key, list[Record]]]) -> None:
        for key, records in contributions:
            self.results[rank].setdefault(key, []).extend(records)

    def _finished_step(self, rank: int) -> bool:
        """End the rank's step if all its messages are matched, and begin the next."""
        state = self.ranks[rank]
        if state.step >= len(state.program):
            return False
        for verb, message, place in state.waiting:
            other = (
                self.awaited.get((rank, message.peer), [])
                if verb == "send"
                else self.sent.get((message.peer, rank), [])
            )
            if place >= len(other):
                return False
        for verb, message, place in state.waiting:
            if verb == "recv":
                self._receive(rank, message, *self.sent[message.peer, rank][place])
        state.waiting = []
        state.step += 1
        self._post(rank)
        return True

    def _receive(
        self, rank: int, message: Message, sent: Message, taken: list[tuple[Key, list[Record]]], sender: str
    ) -> None:
        if (sent.what, sent.pieces, sent.tag) != (message.what, message.pieces, message.tag):
            self.errors.append(
                f"{self._where(rank)}: expects {message.text('recv')!r}, "
                f"but the next message is {sent.text('send')!r} ({sender})"
            )
        if sent.what in RESULTS:
            self._add(rank, taken)
            return
        for piece in sent.pieces:
            for cut in self.heads.of(sent.what, piece.heads):
                self.has[rank][sent.what, piece.seq, cut].add(piece.start, piece.stop)

    def _stuck(self) -> bool:
        """Name what the ranks wait for when nothing moves any more."""
        done = [state.step >= len(state.program) for state in self.ranks]
        blocked: list[str] = []
        for rank, state in enumerate(self.ranks):
            for verb, message, place in state.waiting:
                line = f"{self._where(rank)}: {message.text(verb)!r}"
                peer_done = not 0 <= message.peer < len(done) or done[message.peer]
                if verb == "recv" and place >= len(self.sent.get((message.peer, rank), [])):
                    blocked.append(f"{line}: a receive without a send" if peer_done else f"{line}: waits")
                if verb == "send" and place >= len(self.awaited.get((rank, message.peer), [])):
                    blocked.append(f"{line}: a send without a receive" if peer_done else f"{line}: waits")
        if blocked and not any("without" in line for line in blocked):
            blocked = [f"{line} in a deadlock" for line in blocked]
        self.errors += blocked
        return not all(done)

    def _holders(self, seq: int, q: int, k: int) -> str:
        """Who has a pair's query and key at the end, for the message about a pair that nobody computed."""
        ranks = range(len(self.ranks))
        owners_q = [r for r in ranks if any(s == seq and a <= q < b for s, a, b in _spans(self.problem, r, "q"))]
        owners_k = [r for r in ranks if any(s == seq and a <= k < b for s, a, b in _spans(self.problem, r, "kv"))]
        steps = [
            f"rank {rank} step {step}"
            for rank in owners_q
            for step, now in enumerate(self.ranks[rank].program)
            if any(p.seq == seq and p.start <= k < p.stop for m in now.recvs if m.what == "kv" for p in m.pieces)
        ]
        met = f"; the key arrives during {', '.join(steps)}" if steps else ""
        return f"query of rank {owners_q[0]}, key of rank {owners_k[0]}{met}"

    def _check_owners(self) -> None:
        """Every result has to end at the rank that owns its rows."""
        for rank, results in enumerate(self.results):
            for (what, seq, _), records in results.items():
                owned = Spans()
                for s, start, stop in _spans(self.problem, rank, what):
                    if s == seq:
                        owned.add(start, stop)
                for start, stop, number in records:
                    if not owned.cover(start, stop):
                        use = self.tiles[number]
                        self.errors.append(
                            f"{self.name} rank {rank} step {len(self.ranks[rank].program)}: ends with {what} "
                            f"{Piece(seq, start, stop)} of rank {use.rank} step {use.step}, "
                            "which belongs to another rank"
                        )


def _split(records: list[Record], start: int, stop: int) -> tuple[list[Record], list[Record]]:
    """The parts of the records inside [start, stop), and the rest."""
    inside: list[Record] = []
    outside: list[Record] = []
    for a, b, number in records:
        if (low := max(a, start)) < (high := min(b, stop)):
            inside.append((low, high, number))
            outside += [(x, y, number) for x, y in ((a, low), (high, b)) if x < y]
        else:
            outside.append((a, b, number))
    return inside, outside
