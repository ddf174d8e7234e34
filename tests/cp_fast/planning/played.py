"""Playing programs with tokens for data: every row of every buffer is the token that it holds.

All ranks' programs run side by side. A buffer is an array of token numbers (-1 for padding), a message is what its
sender puts in it, and a launch is the set of (query, key) pairs that its segments' window lets through. So what a plan
sends and computes can be compared with the specification's schedule, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cp_fast.program import KVStep, Launch, RankProgram
from cp_fast.rows import Rows
from cp_ref.spec import (
    Message,
    Problem,
    Program,
    Schedule,
    Step,
    Units,
    common,
    head_ranges,
    kv_fragments,
    q_fragments,
    real_rows,
)

__all__ = ["PlayedTile", "check_programs"]

Pairs = set[tuple[int, int]]
Mail = dict[tuple[int, int, int], np.ndarray]  # by sender, receiver and tag


class PlayedTile(NamedTuple):
    """One segment of a launch of the forward pass, with the tokens of its rows and columns."""

    step: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    left: int | None
    right: int | None


def check_programs(problem: Problem, programs: list[RankProgram], schedule: Schedule) -> list[list[PlayedTile]]:
    """Assert that the programs do what the schedule says; return the tiles of every rank's forward pass, in order."""
    worlds = [_Rank(problem, rank, program) for rank, program in enumerate(programs)]
    for world in worlds:
        world.check_home()
    exchanged = problem.cp_comm_type in ("a2a", "a2a+p2p")
    for backward in (False, True):
        wanted = [(schedule.backward if backward else schedule.forward)[w.rank] for w in worlds]
        wanted = [w[1:-1] for w in wanted] if exchanged else wanted
        _play(worlds, wanted, backward=backward)
    return [w.tiles for w in worlds]


def _play(worlds: list[_Rank], wanted: list[Program], *, backward: bool) -> None:
    for w, program in zip(worlds, wanted, strict=True):
        w.start()
        assert len(w.steps(backward)) == len(program)
    for number in range(len(wanted[0])):
        mail: Mail = {}
        for w, program in zip(worlds, wanted, strict=True):
            w.post(w.steps(backward)[number], mail, program[number])
        for w, program in zip(worlds, wanted, strict=True):
            w.step(w.steps(backward), number, mail, program, backward=backward)
        assert not mail, f"nobody receives {list(mail)}"


@dataclass
class _Rank:
    problem: Problem
    rank: int
    program: RankProgram
    queries: np.ndarray = field(init=False)
    own: np.ndarray = field(init=False)
    block: np.ndarray = field(init=False)
    grads: np.ndarray | None = field(init=False)
    tiles: list[PlayedTile] = field(default_factory=list)

    def __post_init__(self) -> None:
        p, heads = self.problem, self.program.heads
        if heads is None:
            self.queries, self.own = _home(p, self.rank, "q"), _home(p, self.rank, "kv")
        else:
            self.queries, self.own = self._group("q"), self._group("kv")

    def _group(self, side: str) -> np.ndarray:
        """The group's rows, and on the way there whether the exchange gives each rank what the schedule says."""
        p, heads = self.problem, self.program.heads
        assert heads is not None
        side_plan = heads.q if side == "q" else heads.kv
        units, unit = Units(p), self.rank // p.a2a_size
        active = units.active(unit, side)
        parts = []
        for peer in heads.peers:
            pieces = common(real_rows(p, peer, side), active)
            parts.append(_tokens(p, [(x.seq, x.start, x.stop) for x in pieces], side))
        assert side_plan.group_counts == tuple(map(len, parts))
        home = _home(p, self.rank, side)[_index(side_plan.home_rows)]
        assert home.tolist() == parts[heads.place].tolist()
        assert side_plan.home_count == len(home)
        group = np.full(side_plan.group_size, -1)
        group[_index(side_plan.group_rows)] = np.concatenate(parts)
        assert group.tolist() == _tokens(p, [(x.seq, x.start, x.stop) for x in active], side).tolist()
        assert side_plan.own_heads(heads.place) == slice(*head_ranges(p, heads.place)[0 if side == "q" else 1])
        return group

    def check_home(self) -> None:
        """The real query rows are those of the rank's fragments."""
        home = _home(self.problem, self.rank, "q")
        assert home[_index(self.program.real_q_rows)].tolist() == home[home >= 0].tolist()

    def steps(self, backward: bool) -> tuple[KVStep, ...]:
        return self.program.backward if backward else self.program.forward

    def start(self) -> None:
        self.block, self.grads = self.own, None

    def post(self, step: KVStep, mail: Mail, wanted: Step) -> None:
        """Send what the step sends."""
        for give in step.give_kv:
            mail[self.rank, give.peer, give.tag] = (self.own if give.own else self.block)[_index(give.rows)]
        for give in step.give_dkv:
            assert self.grads is not None
            mail[self.rank, give.peer, give.tag] = self.grads[_index(give.rows)]
        sends = {(m.peer, m.tag): _message(self.problem, m) for m in wanted.sends}
        posted = {(to, tag): x.tolist() for (by, to, tag), x in mail.items() if by == self.rank}
        assert posted == sends

    def step(self, steps: tuple[KVStep, ...], number: int, mail: Mail, wanted: Program, *, backward: bool) -> None:
        """Compute step `number` and take in what arrives."""
        step = steps[number]
        pairs = [pair for launch in step.launches for pair in _pairs(launch, self.queries, self.block)]
        if not backward:
            self.tiles += [t for launch in step.launches for t in _tiles(number, launch, self.queries, self.block)]
        assert len(pairs) == len(set(pairs)), "a pair is computed twice"
        assert set(pairs) == _wanted_pairs(self.problem, wanted[number])
        grads = self._grads(step, wanted[number + 1] if number + 1 < len(wanted) else None) if backward else None
        got: dict[tuple[int, int], list[int]] = {}
        coming = np.full(step.block_size, -1)
        for take in step.take_kv + step.take_dkv:
            arrived = mail.pop((take.peer, self.rank, take.tag))
            assert len(arrived) == take.size
            got[take.peer, take.tag] = arrived.tolist()
            if take in step.take_kv:
                coming[_index(take.rows)] = arrived
                continue
            target = self.own if take.home else grads
            assert target is not None
            assert target[_index(take.rows)].tolist() == arrived.tolist(), "gradients land in the wrong rows"
        assert got == {(m.peer, m.tag): _message(self.problem, m) for m in wanted[number].recvs}
        self.grads = grads
        if len(coming):
            self.block = coming

    def _grads(self, step: KVStep, following: Step | None) -> np.ndarray | None:
        """The tokens that the rows of the grads stand for: the own ones, or those that leave in the next step."""
        grads = self.own
        if not step.own:
            sent = [_message(self.problem, m) for m in (following.sends if following else ()) if m.what == "dkv"]
            if not sent:
                assert not step.launches
                return None
            grads = np.concatenate(sent)
            assert step.grad_size == len(grads)
        for launch in step.launches:
            assert grads[_index(launch.grad_rows)].tolist() == self.block[_index(launch.kv_rows)].tolist()
        return grads


def _tiles(step: int, launch: Launch, queries: np.ndarray, block: np.ndarray) -> list[PlayedTile]:
    s, q, k = launch.segments, queries[_index(launch.q_rows)].tolist(), block[_index(launch.kv_rows)].tolist()
    return [
        PlayedTile(step, tuple(q[a:b]), tuple(k[c:d]), s.left, s.right)
        for (a, b), (c, d) in zip(pairwise(s.cu_q), pairwise(s.cu_kv), strict=True)
    ]


def _pairs(launch: Launch, queries: np.ndarray, block: np.ndarray) -> list[tuple[int, int]]:
    s = launch.segments
    q_rows, kv_rows, grad_rows = _index(launch.q_rows), _index(launch.kv_rows), _index(launch.grad_rows)
    assert len(set(q_rows.tolist())) == len(q_rows), "a query row twice in one launch"
    assert len(set(kv_rows.tolist())) == len(kv_rows), "a key row twice in one launch"
    assert len(grad_rows) == len(kv_rows)
    assert s.device_cu_q.tolist() == list(s.cu_q)
    assert s.device_cu_kv.tolist() == list(s.cu_kv)
    assert (s.cu_q[-1], s.cu_kv[-1]) == (len(q_rows), len(kv_rows))
    assert s.left is None or s.left >= 0
    found: list[tuple[int, int]] = []
    for n in range(len(s.cu_q) - 1):
        q, k = queries[q_rows[s.cu_q[n] : s.cu_q[n + 1]]], block[kv_rows[s.cu_kv[n] : s.cu_kv[n + 1]]]
        assert len(q), "an empty segment"
        assert len(k), "an empty segment"
        diagonal = np.arange(len(k))[None, :] - np.arange(len(q))[:, None] - (len(k) - len(q))
        seen = np.ones_like(diagonal, dtype=bool)
        if s.left is not None:
            seen &= diagonal >= -s.left
        if s.right is not None:
            seen &= diagonal <= s.right
        assert seen.any(axis=1).all(), "a row that sees nothing"
        rows, columns = np.nonzero(seen)
        found += zip(q[rows].tolist(), k[columns].tolist(), strict=True)
    return found


def _wanted_pairs(problem: Problem, step: Step) -> Pairs:
    found: Pairs = set()
    for tile in step.tiles:
        r, band = tile.rect, problem.band(problem.sequences[tile.seq])
        for i in range(r.q0, r.q1):
            start, stop = band.row(i, r.k0, r.k1)
            q = problem.starts_q[tile.seq] + i
            found |= {(q, problem.starts_kv[tile.seq] + j) for j in range(start, stop)}
    return found


def _home(problem: Problem, rank: int, side: str) -> np.ndarray:
    """The token of each local row; -1 for padding."""
    fragments = (q_fragments if side == "q" else kv_fragments)(problem, rank)
    found: list[int] = []
    for f in fragments:
        s = problem.sequences[f.seq]
        start, length = (problem.starts_q[f.seq], s.len_q) if side == "q" else (problem.starts_kv[f.seq], s.len_kv)
        found += [start + n if n < length else -1 for n in range(f.start, f.stop)]
    return np.array(found, dtype=np.int64)


def _tokens(problem: Problem, pieces: list[tuple[int, int, int]], side: str) -> np.ndarray:
    starts = problem.starts_q if side == "q" else problem.starts_kv
    return np.array([starts[seq] + n for seq, a, b in pieces for n in range(a, b)], dtype=np.int64)


def _message(problem: Problem, message: Message) -> list[int]:
    return _tokens(problem, [(p.seq, p.start, p.stop) for p in message.pieces], "kv").tolist()


def _index(rows: Rows) -> np.ndarray:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows.cpu().numpy().astype(np.int64)
