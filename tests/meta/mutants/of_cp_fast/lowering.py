"""Bugs of the lowering: windows, joined tiles, rows in buffers, and where results go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cp_fast.compile.program import Launch
from cp_ref.schedules.attention_slices import UNBOUNDED
from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]


def _last_span_lost(merge_dense: Any, tiles: Any) -> Any:
    """Segments with several spans of keys lose their last one."""
    found = merge_dense(tiles)
    k = found.k
    last = np.append(k.segment[1:] != k.segment[:-1], True)
    several = np.bincount(k.segment, minlength=len(found))[k.segment] > 1
    return replace(found, k=k.take(~(last & several)))


def _too_wide(side: str) -> Any:
    def wrong(windowed: Any, *columns: Any) -> Any:
        tiles = windowed(*columns)
        window = getattr(tiles, side)
        return replace(tiles, **{side: np.where(window >= 0, window + 1, window)})

    return wrap(wrong)


def _first_parts(cut: Any, tiles: Any, rule: Any) -> Any:
    """Of a tile that is cut only the first part is computed."""
    found = [cut(tiles.take(np.array([n])), rule).take(slice(0, 1)) for n in range(len(tiles))]
    return type(tiles).concat(found) if found else cut(tiles, rule)


def _squares_in_windows(merge_causal: Any, tiles: Any, rule: Any) -> Any:
    """What a window hides on the left is not looked at."""
    return merge_causal(replace(tiles, lo=np.full_like(tiles.lo, -UNBOUNDED)), rule)


def _tiles_of_one_launch(tile_launches: Any, *arguments: Any, **named: Any) -> Any:
    """Of several launches of a step the last is left out."""
    found = tile_launches(*arguments, **named)
    return found[:-1] if len(found) > 1 else found


def _home_twice(accumulates: Any, self: Any, *arguments: Any) -> Any:
    found = accumulates(self, *arguments)
    return found + [one for one in found if self.buffers.specs[one.target.buffer].rows is None]


def _never_home(accumulates: Any, self: Any, *arguments: Any) -> Any:
    """Of a partial result that goes to several places the last gets nothing."""
    found = accumulates(self, *arguments)
    return found[:-1] if len(found) > 1 else found


def _first_rows_for_all(announce: Any, self: Any, *arguments: Any) -> Any:
    """Every peer gets the first rows of what is handed over."""

    def first(view: Any) -> Any:
        return replace(view, rows=slice(0, view.rows.stop - view.rows.start))

    return [
        (copies, [replace(send, source=first(send.source)) for send in sends])
        for copies, sends in announce(self, *arguments)
    ]


def _received_in_another_order(receive: Any, self: Any, *arguments: Any) -> Any:
    arriving, recvs = receive(self, *arguments)
    ends = dict[int, int]()
    for n, one in reversed(list(enumerate(recvs))):
        if one.rows is not None:
            begin = ends.get(one.buffer, 0)
            ends[one.buffer] = begin + one.size
            recvs[n] = replace(one, rows=(slice(begin, begin + one.size),))
    return arriving, recvs


def _first_heads_for_all(stacked_sends: Any, self: Any, *arguments: Any) -> Any:
    """Every peer gets the first peer's heads."""
    copies, sends = stacked_sends(self, *arguments)
    return [replace(one, first_heads=one.first_heads[:1] * len(one.first_heads)) for one in copies], sends


def _heads_one_early(view: Any, self: Any, *arguments: Any) -> Any:
    found = view(self, *arguments)
    first, last = found.heads
    return replace(found, heads=(first - 1, last - 1)) if first else found


def _first_head_is_zero(launch: Any, self: Any, *arguments: Any) -> Any:
    for one in launch(self, *arguments):
        yield replace(one, first_head=0) if isinstance(one, Launch) else one


def _copies_reversed(gather: Any, self: Any, *arguments: Any) -> Any:
    """Rows that are put together from several buffers lie in each other's places, where they are as many."""
    held, copies = gather(self, *arguments)
    rows = [self.tables.count(c.source.rows) for c in copies]
    same = len(copies) > 1 and len(set(rows)) == 1 and len({c.target.heads for c in copies}) == 1
    turned = [*copies[1:], *copies[:1]] if same else copies
    return held, [replace(c, target=other.target) for c, other in zip(copies, turned, strict=True)]


def _one_row_early(of: Any, self: Any, *arguments: Any) -> Any:
    """Contiguous rows begin at the row before their first one."""
    found = of(self, *arguments)
    if isinstance(found.rows, slice) and found.rows.start > 0:
        return replace(found, rows=slice(found.rows.start - 1, found.rows.stop - 1))
    return found


def _folded_tiles_of_one_sequence(fold: Any, steps: Any, problem: Any) -> Any:
    def tiles(t: Any) -> Any:
        return replace(t, head_stop=np.minimum(t.head_stop, problem.heads_q))

    return tuple(tuple(s._replace(tiles=tiles(s.tiles)) for s in program) for program in fold(steps, problem))


def _complete_rows_sorted(arrived: Any, state: Any, *arguments: Any) -> Any:
    """Complete results are written behind one another from row 0 on, in the order in which they were sent."""
    return [
        replace(copy, target=replace(copy.target, rows=slice(0, state.shared.tables.count(copy.target.rows))))
        for copy in arrived(state, *arguments)
    ]


def _causal_keys_first(prepend_keys: Any, segments: Any) -> Any:
    """Keys that are seen by all queries come after those of the causal attention slice, which are then hidden by the
    window.
    """
    found = prepend_keys(segments)
    if found is segments:
        return found
    order = np.lexsort((-found.k.start, found.k.segment))
    return replace(found, k=found.k.take(order))


def _last_rectangle_lost(factor_keys: Any, segments: Any) -> Any:
    found = factor_keys(segments)
    return found.take(np.arange(len(found) - 1)) if len(found) > 1 else found


def _one_layer(layers: Any, segments: Any) -> Any:
    """Keys that segments have in common are forgotten."""
    found = layers(segments)
    return None if found is None else np.zeros_like(found)


_LOWER, _LAUNCHES = "cp_fast.compile.lower", "cp_fast.compile.launches"
_SUMS, _OPERANDS = "cp_fast.compile.buffers.Sums", "cp_fast.compile.buffers.Operands"


def _pieces_exchanged(pieces: Any, *arguments: Any) -> Any:
    """Of a message that is received in pieces the first and the last change places, where they have as many rows."""
    found = pieces(*arguments)
    if found is None:
        return None
    return [
        (some[-1], *some[1:-1], some[0])
        if len(some) > 1 and some[0].stop - some[0].start == some[-1].stop - some[-1].start
        else some
        for some in found
    ]


MUTANTS: dict[str, Mutant] = {
    "pieces-of-a-message-exchanged": Mutant(
        "two pieces of a message are received in each other's rows",
        "cp_fast.compile.instruction_passes._pieces",
        wrap(_pieces_exchanged),
        "logic",
    ),
    "strip-loses-a-span": Mutant(
        "of several spans of keys the last is not seen", f"{_LAUNCHES}.merge_dense", wrap(_last_span_lost), "logic"
    ),
    "left-side-too-wide": Mutant(
        "a tile's window has one key too many on the left",
        "cp_fast.compile.segments.windowed",
        _too_wide("left"),
        "special",
        where="window-in-a-batch",
    ),
    "right-side-too-wide": Mutant(
        "a tile's window has one key too many on the right",
        "cp_fast.compile.segments.windowed",
        _too_wide("right"),
        "special",
        where="window-in-a-batch",
    ),
    "keys-behind-the-causal-ones": Mutant(
        "keys that all queries see come after those of a causal area",
        f"{_LAUNCHES}.prepend_keys",
        wrap(_causal_keys_first),
        "special",
        where="areas-before-a-causal-one",
    ),
    "rectangle-of-a-staircase-lost": Mutant(
        "of the rectangles of several areas the last is lost",
        f"{_LAUNCHES}.factor_keys",
        wrap(_last_rectangle_lost),
        "special",
        where="areas-of-blocks",
    ),
    "keys-again-in-one-layer": Mutant(
        "gradients of keys that a launch has again are written, not added",
        f"{_LAUNCHES}.layers",
        wrap(_one_layer),
        "special",
        where="areas-of-blocks",
    ),
    "first-parts-alone": Mutant(
        "of a tile that is cut the first part is computed",
        f"{_LAUNCHES}.split_windows",
        wrap(_first_parts),
        "special",
        where="bottom-right-window",
    ),
    "squares-in-windows": Mutant(
        "chunks of a sequence with a window are joined to a causal square",
        f"{_LAUNCHES}.merge_causal",
        wrap(_squares_in_windows),
        "special",
        where="window-one-short-of-all",
    ),
    "last-launch-left-out": Mutant(
        "of several launches of a step the last is left out",
        "cp_fast.compile.tile_groups.tile_launches",
        wrap(_tiles_of_one_launch),
        "logic",
    ),
    "results-home-twice": Mutant(
        "results of own rows are added twice", f"{_SUMS}.accumulates", wrap(_home_twice), "logic"
    ),
    "results-lost": Mutant(
        "of a result that goes to several places the last gets nothing",
        f"{_SUMS}.accumulates",
        wrap(_never_home),
        "logic",
    ),
    "first-results-for-all-peers": Mutant(
        "every peer gets the first peer's results", f"{_SUMS}.announce", wrap(_first_rows_for_all), "logic"
    ),
    "received-in-another-order": Mutant(
        "blocks of several peers lie in a buffer in another order",
        f"{_LOWER}._recvs",
        wrap(_received_in_another_order),
        "logic",
    ),
    "first-heads-for-all-peers": Mutant(
        "every peer gets the first peer's heads",
        f"{_LOWER}._stacked_sends",
        wrap(_first_heads_for_all),
        "logic",
    ),
    "operand-heads-one-early": Mutant(
        "heads of a buffer are counted one too low", f"{_OPERANDS}._view", wrap(_heads_one_early), "logic"
    ),
    "first-head-is-zero": Mutant(
        "max_logit of any heads is that of the first ones",
        f"{_LOWER}._launch",
        wrap(_first_head_is_zero),
        "logic",
    ),
    "gathered-from-each-other": Mutant(
        "rows that are put together lie in each other's places", f"{_OPERANDS}.gather", wrap(_copies_reversed), "logic"
    ),
    "rows-one-early": Mutant(
        "operands that are contiguous begin a row too early", f"{_OPERANDS}.view", wrap(_one_row_early), "logic"
    ),
    "folded-tiles-of-one-sequence": Mutant(
        "of a folded batch only the first sequence is computed",
        "cp_fast.compile.pipeline.fold_batch",
        wrap(_folded_tiles_of_one_sequence),
        "special",
        where="sbhd-of-equal-lengths",
    ),
    "complete-results-from-row-0": Mutant(
        "complete results come home to the first rows",
        f"{_LOWER}.arrived_results",
        wrap(_complete_rows_sorted),
        "special",
    ),
}
