"""Bugs in who sees which key: windows, diagonals, lengths, documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cp_ref.schedules.attention_slices import UNBOUNDED, AttentionSlices, crop
from cp_ref.schedules.problem import DiagonalBand, Problem, Sequence
from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]


Edges = tuple[int, int]  # lo, hi


def _band(change: Callable[[int, int], Edges]) -> Callable[[Any], Any]:
    """The tiles' mask with another diagonal band; the plan keeps the right one."""

    def wrong(visible_pairs: Any, rows: slice, columns: slice, lo: int, hi: int, device: torch.device) -> torch.Tensor:
        return visible_pairs(rows, columns, *change(lo, hi), device)

    return wrap(wrong)


def _wider(lo: int, hi: int) -> Edges:
    return lo - 1, hi


def _narrower(lo: int, hi: int) -> Edges:
    return lo + 1, hi


def _no_window(lo: int, hi: int) -> Edges:
    return -UNBOUNDED, hi


def _minus_one(lo: int, hi: int) -> Edges:
    """A window side of -1 taken for minus one: the first key is the one after the query."""
    return (1 if lo <= -UNBOUNDED else lo), hi


def _diagonal_hidden(lo: int, hi: int) -> Edges:
    return lo, hi - 1


def _future_shown(lo: int, hi: int) -> Edges:
    return lo, hi + 1


def _believed(band: Callable[[Problem, Sequence], DiagonalBand]) -> Callable[[Any], Any]:
    """Attention slices by a wrong diagonal band, which plan, `verify` and probes believe: only the oracle knows
    better.
    """

    def wrong(areas_of: Any, problem: Problem) -> AttentionSlices:
        if not problem.bottom_right:
            return areas_of(problem)
        rows: list[tuple[int, ...]] = []
        for s, q, k in zip(problem.sequences, problem.starts_q, problem.starts_kv, strict=False):
            found, shift = band(problem, s), k - q
            lo = -UNBOUNDED if found.lo is None else found.lo + shift
            hi = UNBOUNDED if found.hi is None else found.hi + shift
            cropped = crop(*(np.array([x]) for x in (q, q + s.len_q, k, k + s.len_kv, lo, hi)))
            q0, q1, k0, k1 = (int(x[0]) for x in cropped)
            if q0 < q1 and k0 < k1 and s.len_q and s.len_kv:
                rows.append((q0, q1, k0, k1, lo, hi))
        return AttentionSlices.of_rows(rows)

    return wrap(wrong)


def _bottom_right_off_by_one(problem: Problem, sequence: Sequence) -> DiagonalBand:
    right = problem.band(sequence)
    return right if right.hi is None else right._replace(hi=right.hi + 1)


def _always_top_left(problem: Problem, sequence: Sequence) -> DiagonalBand:
    return problem.band(replace(sequence, len_kv=sequence.len_q))


def _first_key_lost_in_long_rows(visible_pairs: Any, *arguments: Any) -> torch.Tensor:
    """One key too few in the last row of a tile: what no bound on errors sees in long rows."""
    visible = visible_pairs(*arguments).clone()
    if visible.numel() and visible[-1].sum() > 4:
        visible[-1, int(visible[-1].int().argmax())] = False
    return visible


def _lengths(change: Callable[[Problem, Sequence], Sequence]) -> Callable[[Any], Any]:
    """What the call is read as has other lengths."""

    def changed(read_call: Any, *arguments: Any, **named: Any) -> Problem:
        problem = read_call(*arguments, **named)
        return replace(problem, sequences=tuple(change(problem, s) for s in problem.sequences))

    return wrap(changed)


def _all_slots(_: Problem, s: Sequence) -> Sequence:
    return replace(s, len_q=s.slots_q, len_kv=s.slots_kv)


def _by_division(problem: Problem, s: Sequence) -> Sequence:
    """Every rank has an equal part of the real tokens: what is left over is lost."""
    unit = 2 * problem.cp_size
    return replace(s, len_q=s.len_q // unit * unit, len_kv=s.len_kv // unit * unit)


def _last_token_lost(_: Problem, s: Sequence) -> Sequence:
    return replace(s, len_q=max(s.len_q - (s.len_q < s.slots_q), 0), len_kv=max(s.len_kv - (s.len_kv < s.slots_kv), 0))


def _keys_as_long_as_queries(_: Problem, s: Sequence) -> Sequence:
    return replace(s, len_kv=min(s.len_q, s.slots_kv))


def _documents_joined(read_call: Any, *arguments: Any, **named: Any) -> Problem:
    """Where there is no padding the packed buffer is taken for one document."""
    problem = read_call(*arguments, **named)
    full = all(s.len_q == s.slots_q == s.len_kv == s.slots_kv for s in problem.sequences)
    if problem.qkv_format != "thd" or not full or not problem.sequences:
        return problem
    total = problem.starts_q[-1]
    return replace(problem, sequences=(Sequence(total, total, total, total),))


def _of_areas(change: Callable[[AttentionSlices], AttentionSlices]) -> Callable[[Any], Any]:
    """Where the user gave attention slices, others."""

    def wrong(areas_of: Any, problem: Problem) -> AttentionSlices:
        found = areas_of(problem)
        return change(found) if problem.areas is not None and len(found) else found

    return wrap(wrong)


def _last_area_lost(areas: AttentionSlices) -> AttentionSlices:
    return areas.take(slice(0, len(areas) - 1))


def _one_row_too_many(areas: AttentionSlices) -> AttentionSlices:
    """All begin a row earlier."""
    return replace(areas, q_start=np.maximum(areas.q_start - 1, 0))


def _one_counted_twice(areas: AttentionSlices) -> AttentionSlices:
    return AttentionSlices.concat([areas, areas.take(slice(0, 1))])


_MASK = "cp_ref.executor.play_schedule.visible_pairs"
_AREAS = "cp_ref.schedules.problem.areas_of"
_READ = "cp_ref.reference_attention.read_call cp_ref.contract.plan_arguments.read_call"

MUTANTS: dict[str, Mutant] = {
    "window-off-by-one": Mutant("the window shows one key more", _MASK, _band(_wider), "probes"),
    "window-one-short": Mutant("the window shows one key less", _MASK, _band(_narrower), "probes"),
    "window-dropped": Mutant("the left window is ignored inside tiles", _MASK, _band(_no_window), "probes"),
    "minus-one-taken-literally": Mutant("an unbounded side is minus one", _MASK, _band(_minus_one), "probes"),
    "diagonal-hidden": Mutant("no query sees its own key", _MASK, _band(_diagonal_hidden), "probes"),
    "future-shown": Mutant("every query sees the next key", _MASK, _band(_future_shown), "probes"),
    "one-key-lost-in-long-rows": Mutant(
        "one key of some rows is hidden", _MASK, wrap(_first_key_lost_in_long_rows), "probes"
    ),
    "diagonal-off-by-one-in-the-spec": Mutant(
        "d is one too large, and everything but the oracle believes it",
        "cp_ref.schedules.problem.areas_of",
        _believed(_bottom_right_off_by_one),
        "logic",
    ),
    "bottom-right-taken-for-top-left": Mutant(
        "d is 0, and everything but the oracle believes it",
        "cp_ref.schedules.problem.areas_of",
        _believed(_always_top_left),
        "logic",
    ),
    "area-lost": Mutant(
        "the last area is not seen", _AREAS, _of_areas(_last_area_lost), "special", where="areas-prompt-and-answers"
    ),
    "area-of-one-row-too-many": Mutant(
        "areas begin a row too early",
        _AREAS,
        _of_areas(_one_row_too_many),
        "special",
        where="areas-prompt-and-answers",
    ),
    "overlap-counted-twice": Mutant(
        "pairs of an area are counted twice",
        _AREAS,
        _of_areas(_one_counted_twice),
        "special",
        where="areas-prompt-and-answers",
    ),
    "padding-is-attended": Mutant("slots are taken for tokens", _READ, _lengths(_all_slots), "hygiene"),
    "padding-counted-by-division": Mutant(
        "each rank has length // (2 * cp_size) tokens a chunk", _READ, _lengths(_by_division), "probes"
    ),
    "last-real-token-lost": Mutant(
        "a padded sequence loses its last token", _READ, _lengths(_last_token_lost), "probes"
    ),
    "keys-as-long-as-queries": Mutant("len_kv is len_q", _READ, _lengths(_keys_as_long_as_queries), "probes"),
    "documents-joined": Mutant("packed documents see each other", _READ, wrap(_documents_joined), "probes"),
}
