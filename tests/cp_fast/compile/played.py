"""Playing lowered programs with names for values: no tensors, and nothing of how they were made.

All ranks' programs run side by side on the host. A cell of an operand's buffer holds the name of the row and head that
lies there (-1: nothing). A cell of a partial result has a name, too, and for every pair of the problem how often it was
computed into it. So what arrives at the owners in the end can be compared with what is visible, pair by pair.

    cell of      counts, one for each
    out, dq      key row
    dkv          query row and query head
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from cp_fast.program import OWN, Contribution, Copy, Launch, LoweredProgram, LoweredStep, Operand

from cp_fast.compile.lower import COMPLETE
from cp_fast.rows import Rows
from cp_ref.spec import Workload

__all__ = ["play"]

Names = np.ndarray  # [rows, heads]: row * number of heads + head
Mail = dict[tuple[int, int, int], list[tuple[str, Names, np.ndarray | None]]]  # by sender, receiver, tag


@dataclass
class _Partial:
    """Cells of results."""

    names: Names
    counts: np.ndarray  # [rows, heads, pairs]


def play(work: Workload, programs: list[LoweredProgram[Rows]], sizes: tuple[int, int] | None = None) -> None:
    """Assert that the programs compute every visible pair once, and bring it to the owners of its query and key.

    `sizes`: rows of every rank's buffers of q and of k and v; as many as it owns by default.
    """
    ranks = [_Rank(work, rank, program, sizes) for rank, program in enumerate(programs)]
    for backward in (False, True):
        mail: Mail = {}
        running = {rank.rank: rank.run(mail, backward=backward) for rank in ranks}
        while running:
            posted = {key: len(box) for key, box in mail.items()}
            ended = [number for number, steps in running.items() if next(steps, "end") == "end"]
            if not ended and posted == {key: len(box) for key, box in mail.items()}:
                raise AssertionError(f"ranks {sorted(running)} wait for messages that nobody sends")
            for number in ended:
                del running[number]
        assert not any(mail.values()), f"nobody receives {[key for key, box in mail.items() if box]}"
        for rank in ranks:
            rank.check_results(backward=backward)


@dataclass
class _Rank:
    work: Workload
    rank: int
    program: LoweredProgram[Rows]
    sizes: tuple[int, int] | None
    held: dict[str, Names] = field(default_factory=dict)
    kept: dict[str, Names] = field(default_factory=dict)
    sums: dict[str, _Partial] = field(default_factory=dict)
    arrived: list[tuple[str, Contribution[Rows], _Partial]] = field(default_factory=list)

    def __post_init__(self) -> None:
        areas = self.work.areas
        keys, queries = (int(x.max(initial=0)) for x in (areas.k_stop, areas.q_stop))
        self.pairs = {"out": keys, "dq": keys, "dkv": queries * self.work.heads_q}
        self.visible = np.zeros((queries, keys), dtype=np.int64)
        for q0, q1, k0, k1, lo, hi in areas.rows():
            diagonal = np.arange(k0, k1)[None] - np.arange(q0, q1)[:, None]
            self.visible[q0:q1, k0:k1] += (lo <= diagonal) & (diagonal <= hi)

    # ---- a pass

    def run(self, mail: Mail, *, backward: bool) -> Iterator[None]:
        """Play one pass; hand over where a message is not there yet."""
        kinds = ("q", "kv", "do", "res") if backward else ("q", "kv")
        saved = (
            {name: self.held[name] for name in self.instructions.saved if name not in OWN.values()} if backward else {}
        )
        self.held = saved | {OWN[kind]: self._own(kind) for kind in kinds}
        if backward:
            for name in (OWN["q"], OWN["kv"]):
                if name not in self.instructions.saved:
                    del self.held[name]
            self.held |= {name: self.kept[sums] for sums, name in self.instructions.saved_sums.items()}
        self.sums, self.arrived = {}, []
        for step in self.instructions.backward if backward else self.instructions.forward:
            yield from self._step(step, mail)
        names = set(self.held) - set(OWN.values())
        assert names == (set() if backward else {x for x in self.instructions.saved if x not in OWN.values()})

    def _step(self, step: LoweredStep[Rows], mail: Mail) -> Iterator[None]:
        for copy in step.packed:
            self._copy(copy)
        self._send(step, mail)
        for copy in step.copies:
            self._copy(copy)
        for launch in step.launches:
            self._launch(launch)
        filled: dict[str, int] = {}
        for recv in step.recvs:
            while not mail.get((recv.peer, self.rank, recv.tag)):
                yield
            kind, names, _ = mail[recv.peer, self.rank, recv.tag].pop(0)
            buffer = self.instructions.buffers[recv.buffer]
            begin = filled.get(recv.buffer, 0)
            if not begin:
                assert recv.buffer not in self.held
                self._new(recv.buffer)
            filled[recv.buffer] = begin + recv.size
            assert kind == buffer.kind
            assert names.shape == (recv.size, buffer.heads[1] - buffer.heads[0])
            self.held[recv.buffer][begin : begin + recv.size] = names
        for recv in step.result_recvs:
            while not mail.get((recv.peer, self.rank, recv.tag)):
                yield
            kind, names, counts = mail[recv.peer, self.rank, recv.tag].pop(0)
            assert counts is not None
            assert kind == (f"complete {recv.kind}" if recv.complete else recv.kind)
            assert names.shape == (recv.size, recv.heads[1] - recv.heads[0])
            partial = _Partial(names, counts)
            if recv.complete:
                self.arrived += [(recv.kind, c, partial) for c in recv.into]
                assert {c.sums for c in recv.into} == {COMPLETE}
            else:
                self._contribute(recv.into, partial)
        for name in step.last_use:
            del self.held[name]

    def _send(self, step: LoweredStep[Rows], mail: Mail) -> None:
        for send in step.sends:
            kind = self.instructions.buffers[send.buffer].kind
            rows = self.held[send.buffer][_index(send.rows)]
            for peer, tag, first in zip(send.peers, send.tags, send.first_heads, strict=True):
                assert first + send.heads <= rows.shape[1]
                names = rows[:, first : first + send.heads]
                assert not len(names) or (names[0] >= 0).all(), f"nothing to send of {kind}"
                mail.setdefault((self.rank, peer, tag), []).append((kind, names.copy(), None))
        together = {send.sums for send in step.result_sends}
        handed = {name: self.sums.pop(name, None) or self._nothing(name) for name in together}
        for send in step.result_sends:
            sums, rows = self.instructions.sums[send.sums], slice(send.start, send.start + send.size)
            kind = f"complete {sums.kind}" if sums.complete else sums.kind
            names, counts = handed[send.sums].names[rows], handed[send.sums].counts[rows]
            assert len(names) == send.size
            mail.setdefault((self.rank, send.peer, send.tag), []).append((kind, names, counts))
        for name, partial in handed.items():
            if self.instructions.sums[name].complete:  # the owner may round it, and others may need it again
                self._check_whole(self.instructions.sums[name].kind, partial.names, partial.counts)
                self.kept[name] = partial.names

    # ---- operands

    def _own(self, kind: str) -> Names:
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

    def _new(self, name: str) -> None:
        buffer = self.instructions.buffers[name]
        self.held[name] = np.full((buffer.size + self.instructions.spare_rows, buffer.heads[1] - buffer.heads[0]), -1)

    def _take(self, what: Operand[Rows]) -> Names:
        assert 0 <= what.heads[0] < what.heads[1] <= self.held[what.buffer].shape[1]
        return self.held[what.buffer][_index(what.rows), what.heads[0] : what.heads[1]]

    def _copy(self, copy: Copy[Rows]) -> None:
        names, target = self._take(copy.source), copy.target
        if target.buffer not in self.held:
            self._new(target.buffer)
        assert self.instructions.buffers[copy.source.buffer].kind == self.instructions.buffers[target.buffer].kind
        rows = _index(target.rows)
        assert len(rows) == len(names)
        self.held[target.buffer][rows, target.heads[0] : target.heads[1]] = names

    # ---- results

    def _launch(self, launch: Launch[Rows]) -> None:
        q, kv, s = self._take(launch.q), self._take(launch.kv), launch.segments
        heads, heads_kv = self.work.heads_q, self.work.heads_kv
        for operand, kind in ((launch.do, "do"), (launch.res, "res")):
            assert operand is None or self.instructions.buffers[operand.buffer].kind == kind
            if operand is not None:
                assert (self._take(operand)[: s.cu_q[-1]] == q[: s.cu_q[-1]]).all()
        assert (s.device_cu_q.tolist(), s.device_cu_kv.tolist()) == (list(s.cu_q), list(s.cu_kv))
        live_q, live_kv = q[: s.cu_q[-1]], kv[: s.cu_kv[-1]]
        assert self.instructions.spare_rows or (len(q), len(kv)) == (len(live_q), len(live_kv))
        for names in (live_q, live_kv):
            assert (names >= 0).all(), "a launch reads what is not there"
        assert len(np.unique(live_q)) == live_q.size, "a row of queries twice in one launch"
        assert (live_q % heads == launch.first_head + np.arange(q.shape[1])).all()
        shared = q.shape[1] // kv.shape[1]  # the kernel's rule: so many query heads use one kv head
        out = np.zeros((*q.shape, self.pairs["out"]), dtype=np.int64)
        dkv = np.zeros((*kv.shape, self.pairs["dkv"]), dtype=np.int64)
        for (a, b), (c, d) in zip(pairwise(s.cu_q), pairwise(s.cu_kv), strict=True):
            diagonal = np.arange(d - c)[None] - np.arange(b - a)[:, None] - (d - c - b + a)
            seen = np.ones_like(diagonal, dtype=bool)
            seen &= diagonal >= -s.left if s.left is not None else True
            seen &= diagonal <= s.right if s.right is not None else True
            assert seen.any(axis=1).all(), "a row that sees nothing"
            for i, j in np.argwhere(seen).tolist():
                for h in range(q.shape[1]):
                    query, key = int(q[a + i, h]), int(kv[c + j, h // shared])
                    assert query % heads // self.work.group_size == key % heads_kv, "another head's keys"
                    out[a + i, h, key // heads_kv] += 1
                    dkv[c + j, h // shared, query] += 1
        self._contribute(launch.results, _Partial(q, out))
        self._contribute(launch.results_kv, _Partial(kv, dkv))

    def _nothing(self, name: str) -> _Partial:
        """Sums that nothing was added to; of the rank's own rows the names are known."""
        sums = self.instructions.sums[name]
        if sums.home:
            names = self._own(sums.kind)[:, sums.heads[0] : sums.heads[1]]
            names = np.concatenate([names, np.full((self.instructions.spare_rows, names.shape[1]), -1)])
        else:
            names = np.full((sums.size + self.instructions.spare_rows, sums.heads[1] - sums.heads[0]), -1)
        return _Partial(names, np.zeros((*names.shape, self.pairs[sums.kind]), dtype=np.int64))

    def _contribute(self, into: tuple[Contribution[Rows], ...], partial: _Partial) -> None:
        given = np.zeros(partial.names.shape, dtype=np.int64)
        for c in into:
            if c.sums not in self.sums:
                self.sums[c.sums] = self._nothing(c.sums)
            total = self.sums[c.sums]
            rows, target = _index(c.rows), _index(c.into)
            assert len(rows) == len(target)
            spare = len(total.names) - 1 if self.instructions.spare_rows else len(total.names)
            rows, target = rows[target < spare], target[target < spare]
            assert len(np.unique(target)) == len(target), "results are added to one row twice"
            heads, target_heads = slice(*c.heads), slice(*c.into_heads)
            names, there = partial.names[rows, heads], total.names[target, target_heads]
            assert names.shape == there.shape
            known = names >= 0  # of a row that saw nothing a message has no name
            assert not partial.counts[rows, heads][~known].any()
            assert ((there == names) | (there < 0))[known].all(), "results of one row are added to another"
            assert not self.instructions.sums[c.sums].home or (there == names)[known].all(), (
                "results end at another rank"
            )
            total.names[target, target_heads] = np.where(known, names, there)
            total.counts[target, target_heads] += partial.counts[rows, heads]
            given[rows, heads] += 1
        assert not len(into) or (given[partial.counts.any(axis=2)] == 1).all(), "a result goes nowhere, or twice"

    def _check_whole(self, kind: str, names: Names, counts: np.ndarray) -> None:
        """All that is visible of these cells is there, once."""
        on_kv = kind == "dkv"
        heads = self.work.heads_kv if on_kv else self.work.heads_q
        for row, head in np.argwhere(names >= 0).tolist():
            name = int(names[row, head])
            if on_kv:
                want = np.zeros((len(self.visible), self.work.heads_q), dtype=np.int64)
                if name // heads < self.visible.shape[1]:
                    group = slice(name % heads * self.work.group_size, (name % heads + 1) * self.work.group_size)
                    want[:, group] = self.visible[:, name // heads, None]
            elif name // heads < len(self.visible):
                want = self.visible[name // heads]
            else:
                want = np.zeros_like(counts[row, head])
            assert counts[row, head].tolist() == want.ravel().tolist(), f"{kind} of row {name // heads}"

    def check_results(self, *, backward: bool) -> None:
        """Everything is at home, complete."""
        for name, partial in self.sums.items():
            assert self.instructions.sums[name].home or not partial.counts.any(), f"{name} never leaves"
        for kind in ("dq", "dkv") if backward else ("out",):
            names = self._own(kind)
            counts = np.zeros((*names.shape, self.pairs[kind]), dtype=np.int64)
            for name, partial in self.sums.items():
                sums = self.instructions.sums[name]
                if sums.kind == kind and sums.home:
                    counts[:, sums.heads[0] : sums.heads[1]] += partial.counts[: len(counts)]
            for of_kind, into, partial in self.arrived:
                if of_kind == kind:
                    rows, target = _index(into.rows), _index(into.into)
                    rows, target = rows[target < len(names)], target[target < len(names)]
                    heads = slice(*into.into_heads)
                    known = partial.names[rows] >= 0
                    assert (names[target, heads] == partial.names[rows])[known].all()
                    assert not counts[target, heads].any(), "a complete result is not all there is"
                    counts[target, heads] = partial.counts[rows]
            self._check_whole(kind, names, counts)


def _index(rows: Rows) -> np.ndarray:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows.cpu().numpy().astype(np.int64)
