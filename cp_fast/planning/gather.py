"""The steps of all_gather, as `cp_ref.spec.all_gather` has them.

The gathered block has one message behind the other, so the keys of a sequence lie scattered over it, one piece from
each peer. A launch gathers its keys anyway, and where nothing is hidden they can come in any order: so each piece of
queries has one tile with all remote keys that it sees in full, and few with those that the band crosses, which come in
the order of their positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cp_fast.planning.batch import Array, Batch, by_sequence
from cp_fast.planning.blocks import Block, message_rows, packed, seen
from cp_fast.planning.drafts import DraftGive, DraftLaunch, DraftStep, DraftTake, draft_launch
from cp_fast.planning.placing import place_launches
from cp_fast.planning.tables import Tables
from cp_fast.planning.tiles import Cut, Slot, cut, join, launches, see
from cp_ref.spec.schedule import tag

__all__ = ["draft_gather"]


class _Arrived(NamedTuple):
    """A piece of keys of a peer in the gathered block, for every sequence that has it: the number of the sequence, the
    first position, the length, the first row. In every sequence the pieces lie in the order of `place`.
    """

    place: int
    seq: Array
    first: Array
    count: Array
    row: Array


class _Pieces(NamedTuple):
    """All of them, by sequence: how many there are up to the end of each sequence; positions [first, stop) of each
    piece, and what is to be added to a position for its row.
    """

    ends: Array
    first: Array
    stop: Array
    anchor: Array


def draft_gather(
    batch: Batch, rank: int, q_anchor: Array, own: Block, tables: Tables
) -> tuple[list[DraftStep], list[DraftStep]]:
    """The forward and the backward steps of one rank."""
    batch.kept = 2 * batch.count  # every unit is asked for several times
    peers = [(rank + n) % batch.count for n in range(1, batch.count)]
    gather, scatter = tag(0, "kv"), tag(2, "dkv")
    first, second, third = DraftStep(own=True, grad_size=own.size), DraftStep(), DraftStep()
    blocks: list[Block] = []
    for peer in peers:
        near = batch.near(peer, rank)
        rows, size = message_rows(tables, own, near.of(own.anchors[0]), seen(near, peer, rank))
        if size:
            first.give_kv.append(DraftGive(peer, gather, rows, True))
            third.take_dkv.append(DraftTake(peer, scatter, size, rows, True))
    start = 0
    for peer in peers:
        block = packed(seen(batch.near(rank, peer), rank, peer))
        blocks.append(block)
        if block.size:
            rows = slice(start, start + block.size)
            first.take_kv.append(DraftTake(peer, gather, block.size, rows, False))
            third.give_dkv.append(DraftGive(peer, scatter, rows, False))
        start += block.size
    second.grad_size = start
    first.launches = place_launches(tables, see(batch, rank, rank), q_anchor, own, own)
    if start:
        launched = _remote_plain(batch, rank, peers, blocks, q_anchor, tables)
        second.launches = _remote(batch, rank, peers, blocks, q_anchor, tables) if launched is None else launched
    return [first, second], [first, second, third]


def _remote_plain(
    batch: Batch, rank: int, peers: list[int], blocks: list[Block], q_anchor: Array, tables: Tables
) -> list[DraftLaunch] | None:
    """The launches over the gathered keys, where no piece of them is cut in any sequence; else None."""
    readers = batch.chunks(rank)
    if readers is None:
        return None
    visible: list[list[tuple[int, int]]] = []  # (number of the peer, piece of keys) by piece of queries
    for queries in readers:
        visible.append([])
        for n, peer in enumerate(peers):
            for other, keys in enumerate(batch.chunks(peer) or ()):
                how = batch.relation(queries, keys)
                if how == "crossed":
                    return None
                if how == "plain":
                    visible[-1].append((n, other))
    queries = batch.owned("q", rank)
    together = len(visible) == 2 and visible[0] == visible[1]
    base = np.cumsum([0, *(block.size for block in blocks)])
    found: list[DraftLaunch] = []
    for piece, pairs in enumerate(visible[:1] if together else visible):
        keys = [(batch.owned("kv", peers[n]), other) for n, other in pairs]
        counts = np.array([owned.count[other] for owned, other in keys]).reshape(-1, batch.size)
        rows = queries.total if together else queries.count[piece]
        columns = counts.sum(axis=0, dtype=batch.dtype)
        there = (rows > 0) & (columns > 0)
        if not there.any():
            continue
        starts = np.empty_like(counts)
        for row, (n, other), (owned, _) in zip(starts, pairs, keys, strict=True):
            anchors = blocks[n].anchors
            np.add(anchors[min(piece, len(anchors) - 1)], owned.offset[other], out=row)
            row += base[n]
        if not there.all():
            starts, counts = starts[:, there], counts[:, there]
        q = q_anchor + (0 if together else queries.offset[piece])
        spans = (starts.T.ravel(), counts.T.ravel())  # sequence after sequence
        found.append(draft_launch(tables, (None, None), (q[there], rows[there]), spans, None, columns[there]))
    return found


def _remote(
    batch: Batch, rank: int, peers: list[int], blocks: list[Block], q_anchor: Array, tables: Tables
) -> list[DraftLaunch]:
    """The launches over the gathered keys. Tiles keep the keys' positions: the keys belong to many token axes."""
    queries, gaps = batch.owned("q", rank), _gaps(batch, rank)
    cuts: list[Cut] = []
    full: list[Slot] = []
    wide: dict[tuple[int, int], Slot] = {}
    for piece, (first, count) in enumerate(zip(queries.first, queries.count, strict=True)):
        offset = (queries.offset[piece] - first, 0)
        here = [cut(batch, first, first + count, *gap, offset, piece) for gap in gaps]
        wide[piece, 0], left_over = _over_gaps(here)
        full += left_over
        cuts += here
    placed = launches(
        batch,
        [c.natural for c in cuts],
        [c.right for c in cuts],
        [*join(wide), *full],
        [c.left for c in cuts],
        [c.own for c in cuts],
    )
    arrived = _arrived(batch, rank, peers, blocks)
    orders: dict[bool, _Pieces] = {}
    found: list[DraftLaunch] = []
    for window, slots in placed:
        any_order = window == (None, None)  # then in the block's own, which may be a slice of it
        if any_order not in orders:
            ordered = arrived if any_order else sorted(arrived, key=lambda piece: piece.place)
            orders[any_order] = _by_sequence(batch, ordered)
        found.append(_launch(batch, window, slots, orders[any_order], q_anchor, tables))
    return found


def _launch(
    batch: Batch,
    window: tuple[int | None, int | None],
    slots: list[Slot],
    pieces: _Pieces,
    q_anchor: Array,
    tables: Tables,
) -> DraftLaunch:
    q, rows, begin, columns = (
        by_sequence(x) for x in zip(*((s.q + q_anchor, s.rows, s.k, s.columns) for s in slots), strict=True)
    )
    there = np.flatnonzero(rows > 0)
    q, rows, begin, end = (x.take(there) for x in (q, rows, begin, begin + columns))
    seqs = there // len(slots)
    number = np.diff(pieces.ends, prepend=0).take(seqs)  # pieces of each segment's sequence
    behind = np.cumsum(number)
    piece = np.repeat(pieces.ends.take(seqs) - behind, number)
    piece += np.arange(behind[-1])
    start = pieces.first.take(piece)
    np.maximum(start, np.repeat(begin, number), out=start)
    length = pieces.stop.take(piece)
    np.minimum(length, np.repeat(end, number), out=length)
    length -= start
    np.maximum(length, 0, out=length)
    total = np.add.reduceat(length, behind - number)
    there = np.flatnonzero(length > 0)
    spans = (pieces.anchor.take(piece.take(there)) + start.take(there), length.take(there))
    return draft_launch(tables, window, (q, rows), spans, None, total)


def _gaps(batch: Batch, rank: int) -> list[tuple[Array, Array]]:
    """The positions of every sequence's keys that are not the rank's own: before its first piece, between its pieces,
    behind its last.
    """
    begin, gaps = np.zeros_like(batch.len_kv), []
    for start, stop in batch.spans("kv", batch.count, rank):
        gaps.append((begin, np.minimum(np.maximum(start, begin), batch.len_kv)))
        begin = np.minimum(np.maximum(stop, begin), batch.len_kv)
    return [*gaps, (begin, batch.len_kv)]


def _over_gaps(cuts: list[Cut]) -> tuple[Slot, list[Slot]]:
    """Unmasked tiles of one piece of queries: those with the same rows as the first become one, whose range of
    positions goes on over the own keys (nothing is hidden from these rows in between); and what is left over. The keys
    of a gap that has a tile of the user's window are not for a second one that reaches over them.
    """
    whole, left_over = cuts[0].full, []
    blocked = np.zeros_like(whole.rows, dtype=bool)
    for slot, natural in ((c.full, c.natural) for c in cuts[1:]):
        empty = whole.rows == 0
        blocked = blocked | (~empty & (natural.rows > 0))
        same = (slot.rows > 0) & (empty | (~blocked & (slot.q == whole.q) & (slot.rows == whole.rows)))
        begin = np.where(empty, slot.k, whole.k)
        whole = Slot(
            np.where(same, slot.q, whole.q),
            np.where(same, slot.rows, whole.rows),
            np.where(same, begin, whole.k),
            np.where(same, slot.k + slot.columns - begin, whole.columns),
            whole.piece,
        )
        left_over.append(slot.only(~same))
    return whole, left_over


def _arrived(batch: Batch, rank: int, peers: list[int], blocks: list[Block]) -> list[_Arrived]:
    """Every piece of the gathered block, in the order of its rows."""
    base, found = 0, []
    small = np.uint16 if batch.size < 2**16 else np.int64  # sorts fast, and takes little fresh memory
    for peer, block in zip(peers, blocks, strict=True):
        near = batch.near(rank, peer)
        keys, chunks = near.owned("kv", peer), near.chunks(peer)
        for (start, count), anchor in zip(block.ranges, block.anchors, strict=True):
            for piece, (offset, first, length) in enumerate(zip(keys.offset, keys.first, keys.count, strict=True)):
                begin = np.maximum(start, offset)
                size = np.minimum(start + count, offset + length) - begin
                there = np.flatnonzero(size > 0)
                if len(there):
                    seq = (there if near.numbers is None else near.numbers.take(there)).astype(small)
                    begin, size = begin.take(there), size.take(there)
                    positions = begin + (first - offset).take(there)
                    rows = begin + (anchor + base).take(there)
                    found.append(_Arrived(chunks[piece][0] if chunks else peer, seq, positions, size, rows))
        base += block.size
    return found


def _by_sequence(batch: Batch, arrived: list[_Arrived]) -> _Pieces:
    """The pieces sequence by sequence, those of each in the order given."""
    seq = np.concatenate([a.seq for a in arrived])
    order = np.argsort(seq, kind="stable")
    first, count, row = (np.concatenate(x).take(order) for x in zip(*(a[2:] for a in arrived), strict=True))
    ends = np.cumsum(np.bincount(seq, minlength=batch.size))
    return _Pieces(ends, first, first + count, row - first)
