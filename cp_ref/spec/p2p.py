"""The p2p schedule: K/V blocks visit the ranks while every rank computes on the block it has (ring attention).

Without a window the blocks travel round a ring. At step s rank r has the block of rank r - s and passes it on:

    step      rank 0    rank 1    rank 2    rank 3          cp_size 4, the number is the owner of the block in hand
      0          0         1         2         3            on its way meanwhile: every block to the next rank
      1          3         0         1         2
      2          2         3         0         1
      3          1         2         3         0

In the backward pass the gradients of a block travel one step behind it, collecting what each rank adds, and end at its
owner.

With a window on both sides a rank sees little of most blocks and nothing of many. Then every rank receives just the
rows that it sees (the halo), straight from their owner: rank r hears from rank r - s at step s - 1, and its gradients
of these rows go straight back. In both cases rows that nobody needs any more are not sent, and a tile that sees nothing
is not computed.

From Ring Attention (Liu et al., 2023); the dual_chunk balance from Striped Attention and from Megatron-LM's context
parallelism.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from cp_ref.spec.layout import Fragment, kv_fragments, q_fragments
from cp_ref.spec.mask import Rect
from cp_ref.spec.problem import Problem
from cp_ref.spec.schedule import Message, Piece, Program, Schedule, Step, Tile

__all__ = ["plan_p2p", "plan_p2p_rank", "tiles_between", "union"]


def plan_p2p(problem: Problem) -> Schedule:
    """The p2p schedule of all ranks."""
    needs = _Needs(problem)
    programs = [_rank_programs(needs, rank) for rank in range(problem.cp_size)]
    return Schedule("p2p", tuple(f for f, _ in programs), tuple(b for _, b in programs))


def plan_p2p_rank(problem: Problem, rank: int) -> tuple[Program, Program]:
    """One rank's forward and backward program: the same as `plan_p2p` has for it, without planning all of the
    others.
    """
    return _rank_programs(_Needs(problem), rank)


def tiles_between(problem: Problem, rank: int, owner: int) -> tuple[Tile, ...]:
    """What `rank`'s queries see of `owner`'s keys, as cropped rectangles; real tokens only."""
    keys = _by_sequence(kv_fragments(problem, owner))
    tiles: list[Tile] = []
    for q in q_fragments(problem, rank):
        sequence = problem.sequences[q.seq]
        band = problem.band(sequence)
        for k in keys.get(q.seq, ()):
            whole = Rect(q.start, min(q.stop, sequence.len_q), k.start, min(k.stop, sequence.len_kv))
            if (rect := band.crop(whole)) is not None:
                tiles.append(Tile(q.seq, rect))
    return tuple(tiles)


def union(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same positions as few pieces, sorted; all heads.

    >>> union([Piece(0, 4, 8), Piece(0, 0, 4), Piece(1, 2, 3), Piece(0, 6, 9)])
    (Piece(seq=0, start=0, stop=9, heads=None), Piece(seq=1, start=2, stop=3, heads=None))
    """
    merged: list[Piece] = []
    for p in sorted(pieces, key=lambda p: (p.seq, p.start)):
        if merged and merged[-1].seq == p.seq and p.start <= merged[-1].stop:
            merged[-1] = Piece(p.seq, merged[-1].start, max(merged[-1].stop, p.stop))
        else:
            merged.append(Piece(p.seq, p.start, p.stop))
    return tuple(merged)


class _Needs:
    """Who computes what with whose keys; each answer is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cp_size = problem.cp_size
        bands = [problem.band(s) for s in problem.sequences]
        self.windowed = bool(bands) and all(b.lo is not None and b.hi is not None for b in bands)
        self._tiles: dict[tuple[int, int], tuple[Tile, ...]] = {}
        self._keys: dict[tuple[int, int], tuple[Piece, ...]] = {}
        self._on: dict[tuple[int, int, int], tuple[Piece, ...]] = {}

    def tiles(self, rank: int, owner: int) -> tuple[Tile, ...]:
        where = (rank % self.cp_size, owner % self.cp_size)
        if where not in self._tiles:
            self._tiles[where] = tiles_between(self.problem, *where)
        return self._tiles[where]

    def keys(self, rank: int, owner: int) -> tuple[Piece, ...]:
        """The rows of `owner`'s block that `rank` sees."""
        where = (rank % self.cp_size, owner % self.cp_size)
        if where not in self._keys:
            self._keys[where] = union(Piece(t.seq, t.rect.k0, t.rect.k1) for t in self.tiles(*where))
        return self._keys[where]

    def of_ranks(self, owner: int, first: int, last: int) -> tuple[Piece, ...]:
        """The rows of `owner`'s block that any of the ranks owner + first ... owner + last sees."""
        where = (owner % self.cp_size, first, last)
        if where not in self._on:
            self._on[where] = union(p for hop in range(first, last + 1) for p in self.keys(owner + hop, owner))
        return self._on[where]


def _rank_programs(needs: _Needs, rank: int) -> tuple[Program, Program]:
    """At step s the rank computes on the block of rank - s; the three kinds of message are worked out beside it."""
    route = _halo if needs.windowed else _ring
    last = needs.cp_size - 1
    forward: list[Step] = []
    backward: list[Step] = []
    for s in range(needs.cp_size):
        tiles = needs.tiles(rank, rank - s)
        sends, recvs = route(needs, rank, s) if s < last else ((), ())
        forward.append(Step(sends, recvs, tiles))
        grad_sends, grad_recvs = _gradients(needs, rank, s) if s >= 2 else ((), ())
        backward.append(Step(sends + grad_sends, recvs + grad_recvs, tiles))
    if last > 0:
        backward.append(Step(*_gradients(needs, rank, needs.cp_size)))
    return tuple(forward), tuple(backward)


def _ring(needs: _Needs, rank: int, s: int) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Pass the block in hand to the next rank: the rows that it or a rank behind it still needs."""
    last = needs.cp_size - 1
    out = _message(needs, "kv", needs.of_ranks(rank - s, s + 1, last), rank + 1, s)
    back = _message(needs, "kv", needs.of_ranks(rank - 1 - s, s + 1, last), rank - 1, s)
    return out, back


def _halo(needs: _Needs, rank: int, s: int) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Give the rank that is s + 1 ahead what it sees of the own block."""
    out = _message(needs, "kv", needs.keys(rank + s + 1, rank), rank + s + 1, s)
    back = _message(needs, "kv", needs.keys(rank, rank - s - 1), rank - s - 1, s)
    return out, back


def _gradients(needs: _Needs, rank: int, s: int) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """What was added at step s - 1: on to the next rank with the ring's sum so far, or straight home."""
    hop = s - 1
    if needs.windowed:
        out = _message(needs, "dkv", needs.keys(rank, rank - hop), rank - hop, s)
        back = _message(needs, "dkv", needs.keys(rank + hop, rank), rank + hop, s)
    else:
        out = _message(needs, "dkv", needs.of_ranks(rank - hop, 1, hop), rank + 1, s)
        back = _message(needs, "dkv", needs.of_ranks(rank - 1 - hop, 1, hop), rank - 1, s)
    return out, back


def _message(needs: _Needs, what: str, pieces: tuple[Piece, ...], peer: int, s: int) -> tuple[Message, ...]:
    """A message, or none where there is nothing to say. The tag tells a step's kv from its dkv."""
    tag = 2 * s + (what == "dkv")
    return (Message(what, pieces, peer % needs.cp_size, tag),) if pieces else ()


def _by_sequence(fragments: Iterable[Fragment]) -> dict[int, list[Fragment]]:
    groups: dict[int, list[Fragment]] = defaultdict(list)
    for f in fragments:
        groups[f.seq].append(f)
    return groups
