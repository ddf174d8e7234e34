"""Bugs in who sees which key: windows, diagonals, lengths, documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from conformance.mutants.model import Mutant, wrap
from cp_ref.spec import Band, Problem, Sequence

__all__ = ["MUTANTS"]


def _band(change: Callable[[Band], Band]) -> Callable[[Any], Any]:
    """The tiles' mask with another band; the plan keeps the right one."""
    return wrap(lambda visible_pairs, band, *rest: visible_pairs(change(band), *rest))


def _wider(band: Band) -> Band:
    return band if band.lo is None else replace(band, lo=band.lo - 1)


def _narrower(band: Band) -> Band:
    return band if band.lo is None else replace(band, lo=band.lo + 1)


def _no_window(band: Band) -> Band:
    return replace(band, lo=None)


def _minus_one(band: Band) -> Band:
    """A window side of -1 taken for minus one: the first key is the one after the query."""
    return replace(band, lo=1) if band.lo is None else band


def _diagonal_hidden(band: Band) -> Band:
    return band if band.hi is None else replace(band, hi=band.hi - 1)


def _future_shown(band: Band) -> Band:
    return band if band.hi is None else replace(band, hi=band.hi + 1)


def _bottom_right_off_by_one(band: Any) -> Any:
    """In the specification itself, which plan, `verify` and probes believe: only the oracle knows better."""

    def shifted(self: Problem, sequence: Sequence) -> Band:
        right = band(self, sequence)
        return replace(right, hi=right.hi + 1) if self.bottom_right and right.hi is not None else right

    return shifted


def _always_top_left(band: Any) -> Any:
    def unshifted(self: Problem, sequence: Sequence) -> Band:
        return band(self, replace(sequence, len_kv=sequence.len_q) if self.bottom_right else sequence)

    return unshifted


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


_MASK = "cp_ref.execute.visible_pairs"
_READ = "cp_ref.api.read_call cp_ref.common.plans.read_call"

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
        "cp_ref.spec.problem.Problem.band",
        _bottom_right_off_by_one,
        "logic",
    ),
    "bottom-right-taken-for-top-left": Mutant(
        "d is 0, and everything but the oracle believes it",
        "cp_ref.spec.problem.Problem.band",
        _always_top_left,
        "logic",
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
