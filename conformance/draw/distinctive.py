"""The features of a problem, as words: what a smallest failing problem is explained on.

When a failure has been shrunk, whatever it still has beyond the plainest problem is taken to be needed for it. Later
draws skip problems with all these features, so another failure can appear.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from conformance.case import Case
from cp_ref.schedules.problem import Problem

__all__ = ["distinctive_features"]

_NUMBERS = {"seed", "magnitude", "sequences", "a2a_size", "repeat", "slots", "real", "rank", "dims", "heads", "choices"}


def distinctive_features(problem: Any) -> frozenset[str]:
    """The features of a problem beyond the plainest one of its kind; and its dtype, which each tier chooses.

    >>> from cp_ref.schedules.problem import Sequence
    >>> p = Problem(2, (Sequence(3, 5, 3, 5),), softmax_scale=2.0, window_size=(1, -1))
    >>> sorted(distinctive_features(Case(p, use_plan=True)))
    ['cross', 'dtype float32', 'softmax_scale', 'use_plan', 'window left']
    """
    if isinstance(problem, Case):
        dtype = {f"dtype {problem.problem.dtype}"}
        return frozenset(_of_problem(problem.problem) | _differing(problem, {"problem"}) | dtype)
    return frozenset(_differing(problem, {"name"}))


def _of_problem(p: Problem) -> set[str]:
    found = _differing(p, {"cp_size", "window_size", "heads_q", "heads_kv", "d_qk", "d_v", "dtype"})
    found |= {f"cp_size {p.cp_size}"} if p.cp_size > 2 else set()
    left, right = p.window_size
    found |= {"window left"} if left >= 0 else set()
    found |= {"window right"} if right >= 0 and not p.causal else set()
    found |= {"grouped heads"} if p.heads_q != p.heads_kv else set()
    found |= {"several heads"} if p.heads_kv > 1 else set()
    found |= {"d_qk != d_v"} if p.d_qk != p.d_v else set()
    found |= {"several sequences"} if len(p.sequences) > 1 else set()
    found |= {"cross"} if any(s.len_q != s.len_kv for s in p.sequences) else set()
    found |= {"padding"} if any((s.len_q, s.len_kv) != (s.slots_q, s.slots_kv) for s in p.sequences) else set()
    found |= {"empty sequence"} if any(not s.len_q or not s.len_kv for s in p.sequences) else set()
    return found


def _differing(thing: Any, without: set[str]) -> set[str]:
    """Fields that differ from their defaults: the name of a flag or number, and a choice with its name."""
    found = set()
    for f in fields(thing):
        value = getattr(thing, f.name)
        if f.name not in without | _NUMBERS and value != f.default:
            found.add(f"{f.name} {value}" if isinstance(value, str) else f.name)
    return found
