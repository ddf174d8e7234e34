"""What the native loops write: columns, and what these become.

What leaves some sequences out is written in whole vectors, to arrays with room for `SPARE` elements more.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cp_fast.planning.columns import Array, Borrowed, Spans
from cp_fast.planning.loops.base import RingStep, Tiles

__all__ = ["SPARE", "Facts", "is_wide", "new_columns", "new_sums", "ring_step", "step_arrays", "tiles_of", "zeros"]


SPARE = 16


class Facts(NamedTuple):
    """What csrc/cpu/plan_ring.cpp finds out of a step of a ring, in its order.

    Attributes:
        tiles: how many tiles there are.
        size, grad_size: see `RingStep`.
        apart: whether gradients have other rows than keys.
        sent, got: how many spans `RingStep.sent` and `got` have; `sent_total` and `got_total` are their rows.
        contiguous: a bit for each kind of rows that are one range: of queries, keys, gradients, sent, got.
    """

    tiles: int
    size: int
    grad_size: int
    apart: int
    sent: int
    sent_total: int
    got: int
    got_total: int
    contiguous: int


def step_arrays(like: Array) -> tuple[Array, ...]:
    """What the steps of a ring are written to, one after the other, in the order of `ring_step`."""
    size = len(like)
    return *new_columns(like, 5, size + SPARE), *new_sums(size), *new_columns(like, 4, size + SPARE)


def ring_step(fact: Facts, arrays: tuple[Array, ...], s: int, count: int) -> RingStep:
    """Step s of a ring of `count`, from what was written of it, which the next step is written over."""
    q, rows, k, columns, grad, cu_q, cu_kv, sent, sent_count, got, got_count = arrays
    n, sends, gets = fact.tiles, s + 1 < count, s > 1
    rows, columns, one = rows[:n], columns[:n], fact.contiguous
    cu_q, cu_kv = cu_q[: n + 1], cu_kv[: n + 1]
    queries, keys = int(cu_q[n]), int(cu_kv[n])
    return RingStep(
        size=fact.size,
        grad_size=fact.grad_size,
        tiles=Tiles(
            q=Borrowed(q[:n], rows, queries, bool(one & 1)),
            kv=Borrowed(k[:n], columns, keys, bool(one & 2)),
            grad=Borrowed(grad[:n], columns, keys, bool(one & 4)) if fact.apart else None,
            cu_q=cu_q,
            cu_kv=cu_kv,
        ),
        sent=Borrowed(sent[: fact.sent], sent_count[: fact.sent], fact.sent_total, bool(one & 8)) if sends else None,
        got=Borrowed(got[: fact.got], got_count[: fact.got], fact.got_total, bool(one & 16)) if gets else None,
    )


def tiles_of(
    q: Array, rows: Array, k: Array, columns: Array, cu_q: Array, cu_kv: Array, one: int, grad: Array | None = None
) -> Tiles:
    """What was written of tiles, with room to spare. `one`: bits of the rows that are one range."""
    q, rows, k, columns, queries, keys = *(x[:-SPARE] for x in (q, rows, k, columns)), int(cu_q[-1]), int(cu_kv[-1])
    of_grads = None if grad is None else Spans(grad[:-SPARE], columns, keys, bool(one & 4))
    return Tiles(Spans(q, rows, queries, bool(one & 1)), Spans(k, columns, keys, bool(one & 2)), of_grads, cu_q, cu_kv)


def new_sums(size: int) -> tuple[Array, Array]:
    """Cumulative lengths of so many tiles, not yet written."""
    return np.empty(size + 1, dtype=np.int32), np.empty(size + 1, dtype=np.int32)


def new_columns(like: Array, number: int, size: int | None = None) -> tuple[Array, ...]:
    """Columns, not yet written. Each is memory of its own: a small piece that was given back is got again while it is
    in the cache.
    """
    size, kind, empty = len(like) if size is None else size, like.dtype, np.empty
    return tuple([empty(size, kind) for _ in range(number)])  # a generator would take as long as what it makes


def zeros(like: Array) -> Array:
    """Zeros of the same length and dtype, not to be written to."""
    return _zeros_of(len(like), like.dtype)


@lru_cache(maxsize=8)
def _zeros_of(size: int, dtype: np.dtype[np.signedinteger]) -> Array:
    found = np.zeros(size, dtype)
    found.flags.writeable = False
    return found


def is_wide(x: Array) -> int:
    """Whether its integers have 64 bits."""
    return x.dtype.itemsize > 4
