"""Who sees whom, by the definition: what the suite counts, draws and computes with, and no planner has a part in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from conformance.scores.score_formula import Places
from cp_ref.schedules.problem import Problem

__all__ = ["Scope", "scopes", "seen", "seen_table"]


class Scope(NamedTuple):
    """Queries and keys that see each other, and none besides: a sequence, or with attention slices all real tokens."""

    rows: Any  # an index that takes them from q and out
    keys: Any  # from k and v
    lse_rows: Any  # from lse
    visible: torch.Tensor  # bool [queries, keys]
    places: Places


def seen(problem: Problem) -> Iterator[tuple[int, Sequence[int]]]:
    """(query, its keys) as rows of the packed buffers, sequence after sequence with their padding; in bshd and sbhd,
    batch after batch. A query may come several times, with other keys.

    >>> from cp_ref.schedules.problem import Sequence
    >>> one = Problem(1, (Sequence(2, 3, 4, 4),), qkv_format="thd", areas=((0, 4, 0, 4, 0, 1),))
    >>> [(i, list(keys)) for i, keys in seen(one)]  # rows 2 and 3 are padding, and so is key 3
    [(0, [0, 1]), (1, [1, 2])]
    """
    if problem.areas is None:
        for s, q, k in zip(problem.sequences, problem.starts_q, problem.starts_kv, strict=False):
            band = problem.band(s)
            for i in range(s.len_q):
                start, stop = band.row(i, 0, s.len_kv)
                yield q + i, range(k + start, k + max(start, stop))
        return
    queries, keys = (set(_tokens(problem, side)) for side in ("q", "kv"))
    for q_start, q_stop, k_start, k_stop, left, right in problem.areas:
        for i in range(q_start, q_stop):
            aligned = i + k_stop - q_stop
            first = k_start if left < 0 else max(k_start, aligned - left)
            last = k_stop - 1 if right < 0 else min(k_stop - 1, aligned + right)
            if i in queries:
                yield i, [j for j in range(first, last + 1) if j in keys]


def seen_table(problem: Problem, rows_q: int, rows_kv: int) -> torch.Tensor:
    """Which packed query row sees which packed key row: bool [rows_q, rows_kv]."""
    visible = torch.zeros(rows_q, rows_kv, dtype=torch.bool)
    for row, keys in seen(problem):
        visible[row, slice(keys.start, keys.stop) if isinstance(keys, range) else keys] = True
    return visible


def scopes(problem: Problem, device: torch.device | str = "cpu") -> Iterator[Scope]:
    """All scopes of a problem; padding is in none."""
    if problem.areas is not None:
        rows, keys = (torch.tensor(_tokens(problem, side), dtype=torch.int64, device=device) for side in ("q", "kv"))
        visible = seen_table(problem, problem.starts_q[-1], problem.starts_kv[-1])
        places = Places(*(x.to(device) for x in _places(problem)))
        yield Scope((rows,), (keys,), (slice(None), rows), visible.to(device)[rows][:, keys], places)
        return
    for n, (s, q, k) in enumerate(zip(problem.sequences, problem.starts_q, problem.starts_kv, strict=False)):
        band = problem.band(s)
        offset = torch.arange(s.len_kv, device=device)[None] - torch.arange(s.len_q, device=device)[:, None]
        visible = torch.ones_like(offset, dtype=torch.bool)
        if band.lo is not None:
            visible &= offset >= band.lo
        if band.hi is not None:
            visible &= offset <= band.hi
        rows, keys = _index(problem, n, q, s.len_q), _index(problem, n, k, s.len_kv)
        lse_rows = (slice(None), *rows) if problem.qkv_format == "thd" else (n, slice(None), slice(0, s.len_q))
        positions = (torch.arange(length, device=device) for length in (s.len_q, s.len_kv))
        document, shift = (torch.full((1, 1), x, device=device) for x in (n, s.len_kv - s.len_q))
        q_idx, kv_idx = positions
        yield Scope(rows, keys, lse_rows, visible, Places(document, q_idx[:, None], kv_idx, shift))


def _places(problem: Problem) -> Places:
    """Those of all real tokens. A pair of two documents has none, and is hidden."""
    rows = [(n, i, s.len_kv - s.len_q) for n, s in enumerate(problem.sequences) for i in range(s.len_q)]
    columns = [j for s in problem.sequences for j in range(s.len_kv)]
    document, q_idx, shift = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return Places(document[:, None], q_idx[:, None], torch.tensor(columns, dtype=torch.int64), shift[:, None])


def _index(problem: Problem, n: int, start: int, length: int) -> Any:
    if problem.qkv_format == "thd":
        return (slice(start, start + length),)
    return (n, slice(0, length)) if problem.qkv_format == "bshd" else (slice(0, length), n)


def _tokens(problem: Problem, side: str) -> list[int]:
    """The packed rows of real tokens."""
    places = zip(problem.starts(side), problem.lengths.tokens(side), strict=False)
    return [row for start, length in places for row in range(start, start + length)]
