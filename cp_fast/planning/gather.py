"""The steps of all_gather, as `cp_ref.spec.all_gather` has them.

The gathered block has one message behind the other, so the keys of a sequence lie scattered over it, one piece from
each peer. A launch gathers its keys anyway, and where nothing is hidden they can come in any order: so each piece of
queries has one tile with all remote keys that it sees in full, and few with those that the band crosses, which come in
the order of their positions.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from cp_fast.planning.batch import Batch
from cp_fast.planning.blocks import Block, message_rows, packed, seen
from cp_fast.planning.columns import Array, Arrived, Cut, Pieces, Range, Slot
from cp_fast.planning.drafts import DraftGive, DraftLaunch, DraftStep, DraftTake, draft_launch
from cp_fast.planning.placing import place_launches
from cp_fast.planning.tables import Tables
from cp_fast.planning.tiles import cut, join, launches, see
from cp_fast.planning.views import Pair, View, Views
from cp_ref.spec.schedule import tag

__all__ = ["draft_gather"]


def draft_gather(
    batch: Batch, rank: int, q_anchor: Array, own: Block, tables: Tables
) -> tuple[list[DraftStep], list[DraftStep]]:
    """The forward and the backward steps of one rank."""
    batch.kept = 2 * batch.count  # every unit is asked for several times
    peers = [(rank + n) % batch.count for n in range(1, batch.count)]
    gather, scatter = tag(0, "kv"), tag(2, "dkv")
    first, second, third = DraftStep(own=True, grad_size=own.size), DraftStep(), DraftStep()
    blocks: list[Block] = []
    views = Views(batch, rank)
    visible = _visible(views, rank, peers)
    for peer in peers:
        view = views.of(peer, rank)
        rows, size = message_rows(tables, own, view.batch.of(own.anchors[0]), seen(view))
        if size:
            first.give_kv.append(DraftGive(peer, gather, rows, True))
            third.take_dkv.append(DraftTake(peer, scatter, size, rows, True))
    start = 0
    for peer in peers:
        view = views.of(rank, peer)
        block = packed(view.batch, seen(view))
        # ranges are needed where pieces are cut; kept for nothing they would be most of a plan's memory
        blocks.append(block if visible is None else block._replace(ranges=()))
        if block.size:
            rows = slice(start, start + block.size)
            first.take_kv.append(DraftTake(peer, gather, block.size, rows, False))
            third.give_dkv.append(DraftGive(peer, scatter, rows, False))
        start += block.size
    second.grad_size = start
    first.launches = place_launches(batch, tables, see(views.of(rank, rank)), q_anchor, own, own)
    if start:
        if visible is None:
            second.launches = _remote(batch, rank, peers, views, blocks, q_anchor, tables)
        else:
            second.launches = _remote_plain(batch, rank, peers, visible, blocks, q_anchor, tables)
    return [first, second], [first, second, third]


def _visible(views: Views, rank: int, peers: list[int]) -> list[list[Pair]] | None:
    """What each piece of queries sees: (number of the peer, piece of its keys). None where a piece may be cut."""
    found: list[list[Pair]] = [[] for _ in views.of(rank, rank).sights]
    for n, peer in enumerate(peers):
        view = views.of(rank, peer)
        if view.crossed:
            return None
        for piece, other in view.plain:
            found[piece].append((n, other))
    return found


def _remote_plain(
    batch: Batch,
    rank: int,
    peers: list[int],
    visible: list[list[Pair]],
    blocks: list[Block],
    q_anchor: Array,
    tables: Tables,
) -> list[DraftLaunch]:
    """The launches over the gathered keys, where no piece of them is cut in any sequence."""
    queries = batch.owned("q", rank)
    together = len(visible) == 2 and visible[0] == visible[1]
    base = list(accumulate((block.size for block in blocks), initial=0))
    found: list[DraftLaunch] = []
    for piece, pairs in enumerate(visible[:1] if together else visible):
        if not pairs:
            continue
        rows = queries.total if together else queries.count[piece]
        columns, kv = batch.loops.gathered_whole(
            rows,
            [(batch.owned("kv", peers[n]), other) for n, other in pairs],
            [blocks[n].anchors[min(piece, len(blocks[n].anchors) - 1)] for n, _ in pairs],
            [base[n] for n, _ in pairs],
        )
        offset = batch.nothing if together else batch.offset(queries, piece)
        every = Slot(offset, rows * (columns > 0), batch.nothing, columns)  # the keys' rows are those of the spans
        tiles = batch.loops.tiles([every], q_anchor, [batch.nothing], None)
        if tiles.q.total:
            found.append(draft_launch(tables, (None, None), tiles._replace(kv=kv)))
    return found


def _remote(
    batch: Batch,
    rank: int,
    peers: list[int],
    views: Views,
    blocks: list[Block],
    q_anchor: Array,
    tables: Tables,
) -> list[DraftLaunch]:
    """The launches over the gathered keys. Tiles keep the keys' positions: the keys belong to many token axes."""
    queries, gaps = batch.owned("q", rank), _gaps(batch, rank)
    cuts: list[Cut] = []
    full: list[Slot] = []
    wide: dict[tuple[int, int], Slot] = {}
    for piece, (first, count) in enumerate(zip(queries.first, queries.count, strict=True)):
        offsets = (queries.shifts[piece], batch.nothing)
        here = [cut(batch, Range(first, count), gap, offsets, piece) for gap in gaps]
        wide[piece, 0], left_over = _over_gaps(batch, here, piece)
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
    arrived = _arrived([views.of(rank, peer) for peer in peers], blocks)
    orders: dict[bool, Pieces] = {}
    found: list[DraftLaunch] = []
    for window, given in placed:
        slots = [slot for slot in given if slot.rows.any()]
        if not slots:
            continue
        any_order = window == (None, None)  # then in the block's own, which may be a slice of it
        if any_order not in orders:
            ordered = arrived if any_order else sorted(arrived, key=lambda piece: piece[0])
            ends = next((other.ends for other in orders.values()), None)
            orders[any_order] = batch.loops.pieces([piece for _, piece in ordered], batch.size, ends)
        found.append(draft_launch(tables, window, batch.loops.gathered(slots, q_anchor, orders[any_order])))
    return found


def _gaps(batch: Batch, rank: int) -> list[Range]:
    """The positions of every sequence's keys that are not the rank's own: before its first piece, between its pieces,
    behind its last.
    """
    begin, gaps = np.zeros_like(batch.len_kv), []
    for start, stop in batch.spans("kv", batch.count, rank):
        end = np.minimum(np.maximum(start, begin), batch.len_kv)
        gaps.append(Range(begin, end - begin))
        begin = np.minimum(np.maximum(stop, begin), batch.len_kv)
    return [*gaps, Range(begin, batch.len_kv - begin)]


def _over_gaps(batch: Batch, cuts: list[Cut], piece: int) -> tuple[Slot, list[Slot]]:
    """Unmasked tiles of one piece of queries: those with the same rows as the first become one, whose range of
    positions goes on over the own keys (nothing is hidden from these rows in between); and what is left over. The keys
    of a gap that has a tile of the user's window are not for a second one that reaches over them.
    """
    nothing = Slot(batch.nothing, batch.nothing, batch.nothing, batch.nothing, piece)
    whole, left_over = cuts[0].full or nothing, []
    blocked = np.zeros_like(whole.rows, dtype=bool)
    for slot, natural in ((c.full or nothing, c.natural or nothing) for c in cuts[1:]):
        empty = whole.rows == 0
        blocked = blocked | (~empty & (natural.rows > 0))
        same = (slot.rows > 0) & (empty | (~blocked & (slot.q == whole.q) & (slot.rows == whole.rows)))
        begin = np.where(empty, slot.k, whole.k)
        whole = Slot(
            np.where(same, slot.q, whole.q),
            np.where(same, slot.rows, whole.rows),
            np.where(same, begin, whole.k),
            np.where(same, slot.k + slot.columns - begin, whole.columns),
            piece,
        )
        left_over.append(slot.only(~same))
    return whole, left_over


def _arrived(views: list[View], blocks: list[Block]) -> list[tuple[int, Arrived]]:
    """Every piece of the gathered block, in the order of its rows; before it its place among all pieces: in every
    sequence they lie in that order.
    """
    base, found = 0, []
    for view, block in zip(views, blocks, strict=True):
        near = view.batch
        keys, chunks = near.owned("kv", view.owner), near.chunks(view.owner)
        some = {*view.plain, *view.crossed}
        for reader, (tokens, anchor) in enumerate(zip(block.ranges, block.anchors, strict=True)):
            for piece in range(keys.pieces):
                if len(block.ranges) == 1 or (reader, piece) in some:
                    here = Arrived(tokens, keys, piece, anchor, base, near.numbers)
                    found.append((chunks[piece][0] if chunks else view.owner, here))
        base += block.size
    return found
