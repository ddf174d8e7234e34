"""What the native loops write: columns, and what these become.

What leaves some sequences out is written to arrays with room for one more: a loop writes every sequence, and the next
one over it where it has nothing, so that there is no branch to guess wrong.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cp_fast.planning.columns import Array, Spans
from cp_fast.planning.loops.base import RingStep, Tiles

__all__ = ["Facts", "is_wide", "new_columns", "new_sums", "ring_step", "step_arrays", "tiles_of", "zeros"]


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


def step_arrays(like: Array, fact: Facts) -> tuple[Any, ...]:
    """What is written of a step, in the order of `ring_step`; every array with room for one more."""
    q, rows, k, columns = new_columns(like, 4, fact.tiles + 1)
    grad = new_columns(like, 1, fact.tiles + 1)[0] if fact.apart else ()
    cu_q, cu_kv = new_sums(fact.tiles + 1)
    return (
        q,
        rows,
        k,
        columns,
        grad,
        cu_q,
        cu_kv,
        *new_columns(like, 2, fact.sent + 1),
        *new_columns(like, 2, fact.got + 1),
    )


def ring_step(fact: Facts, arrays: tuple[Any, ...], s: int, count: int) -> RingStep:
    """Step s of a ring of `count`, from what was written of it."""
    q, rows, k, columns, grad, cu_q, cu_kv, sent, sent_count, got, got_count = arrays
    sends, gets = fact.contiguous >> 3 & 1, fact.contiguous >> 4 & 1
    return RingStep(
        size=fact.size,
        grad_size=fact.grad_size,
        tiles=tiles_of(q, rows, k, columns, cu_q, cu_kv, fact.contiguous, *([grad] if fact.apart else [])),
        sent=Spans(sent[:-1], sent_count[:-1], fact.sent_total, bool(sends)) if s + 1 < count else None,
        got=Spans(got[:-1], got_count[:-1], fact.got_total, bool(gets)) if s > 1 else None,
    )


def tiles_of(
    q: Array, rows: Array, k: Array, columns: Array, cu_q: Array, cu_kv: Array, one: int, grad: Array | None = None
) -> Tiles:
    """What was written of tiles, with room for one more. `one`: bits of the rows that are one range."""
    rows, columns, queries, keys = rows[:-1], columns[:-1], int(cu_q[-1]), int(cu_kv[-1])
    of_grads = None if grad is None else Spans(grad[:-1], columns, keys, bool(one & 4))
    return Tiles(
        Spans(q[:-1], rows, queries, bool(one & 1)), Spans(k[:-1], columns, keys, bool(one & 2)), of_grads, cu_q, cu_kv
    )


def new_sums(size: int) -> tuple[Array, Array]:
    """Cumulative lengths, not yet written."""
    return np.empty(size, dtype=np.int32), np.empty(size, dtype=np.int32)


def new_columns(like: Array, number: int, size: int | None = None) -> tuple[Array, ...]:
    """Columns, not yet written. Each is memory of its own: a small piece that was given back is got again while it is
    in the cache.
    """
    size, kind = len(like) if size is None else size, like.dtype
    return tuple(np.empty(size, kind) for _ in range(number))


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
