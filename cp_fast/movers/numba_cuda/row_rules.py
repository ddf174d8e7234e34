# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportOptionalSubscript=false, reportAttributeAccessIssue=false
# (kernels are compiled by Numba: their types are not Python's)
"""The target of each row, computed on the device: the kinds of `cp_fast.movers.mover_protocol` in Numba.

A map is 8 numbers, integers, the same for every kind, so that kernels have one signature:

    data, wide      address of the cumulative lengths or of the row index; 1 if they have 64 bits
    sequences       how many there are
    other, other_wide   the real lengths of `valid` and `unpad`
    tokens          rows of the whole
    a, b            span: the first row; slice: cp_size, cp_rank; the two orders: cp_size; half: which one, and 1 if the
                    tail goes along; in_half: which one; unpad: rows with padding

A map gives the row for row i, or -1 for none, and never one past the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from numba import cuda

from cp_fast.movers.numba_cuda.memory import divide, load_int
from cp_fast.movers.row_arithmetic import row_arithmetic

__all__ = [
    "entry",
    "find",
    "map_is_right",
    "row_key",
    "row_map",
]

_load32, _load64 = load_int(4), load_int(8)


@cuda.jit(device=True)
def entry(data, wide, s):
    """lengths[s]"""
    if wide:
        return _load64(data + 8 * s)
    return _load32(data + 4 * s)


@cuda.jit(device=True)
def _last_between(data, wide, low, high, row):
    """The last s with lengths[s] <= row, of those from low - 1 to high - 1."""
    while low < high:
        middle = (low + high) >> 1
        if entry(data, wide, middle) <= row:
            low = middle + 1
        else:
            high = middle
    return low - 1


@cuda.jit(device=True)
def find(data, wide, sequences, row):
    """The last s with lengths[s] <= row: never an empty sequence; `sequences` in the tail, -1 in front of all."""
    return _last_between(data, wide, 0, sequences + 1, row)


@cuda.jit(device=True)
def find_near(data, wide, sequences, row, hint):
    """The same result as `find`, fast if it is at or soon after `hint`; hint -1 for anywhere."""
    if hint < 0 or entry(data, wide, hint) > row:
        return find(data, wide, sequences, row)
    low, step = hint, 1
    while low + step <= sequences and entry(data, wide, low + step) <= row:
        low += step
        step += step
    return _last_between(data, wide, low + 1, min(low + step, sequences + 1), row)


@cuda.jit(device=True)
def lengths_are_right(data, wide, sequences, divisor, tail_divisor, tokens, from_zero, thread, threads):
    """Whether this thread's share of the lengths obeys all rules. Neighbours are compared before they are subtracted:
    the difference of any two may not fit.
    """
    right = True
    s = thread
    while s <= sequences:
        here = entry(data, wide, s)
        if s == 0 and (here < 0 or (from_zero and here != 0)):
            right = False
        if s == sequences:
            if here > tokens or (tokens - here) % tail_divisor != 0:
                right = False
        else:
            following = entry(data, wide, s + 1)
            if following < here or (following - here) % divisor != 0:
                right = False
        s += threads
    return right


@cuda.jit(device=True)
def real_lengths_are_right(real, real_wide, data, wide, sequences, thread, threads):
    """Whether the real lengths begin at 0 and fit into the slots."""
    right = True
    s = thread
    while s < sequences:
        here = entry(real, real_wide, s)
        following = entry(real, real_wide, s + 1)
        if (s == 0 and here != 0) or following < here:
            right = False
        if following - here > entry(data, wide, s + 1) - entry(data, wide, s):
            right = False
        s += threads
    return right


@cuda.jit(device=True)
def _inside(row, tokens):
    return row if row >= 0 and row < tokens else -1


@cuda.jit(device=True)
def _span(i, numbers, hint):
    return numbers[6] + i


@cuda.jit(device=True)
def _index(i, numbers, hint):
    return _inside(entry(numbers[0], numbers[1], i), numbers[5])


@cuda.jit(device=True)
def _choose(condition, a, b):
    return a if condition else b


_keys, _rows = row_arithmetic(divide, _choose, cuda.jit(device=True))


@lru_cache
def row_map(kind: str) -> Callable[..., Any]:
    """A device function map(i, numbers, hint). The hint is a sequence at or before that of row i, or -1."""
    if kind in ("span", "index"):
        return _span if kind == "span" else _index
    key, row, halves, has_real, unpads = (
        _keys[kind],
        _rows[kind],
        kind == "half",
        kind in ("valid", "unpad"),
        kind == "unpad",
    )

    @cuda.jit(device=True)
    def mapped(i, numbers, hint):
        data, wide, sequences, tokens = numbers[0], numbers[1], numbers[2], numbers[5]
        s = find_near(data, wide, sequences, key(i, tokens, numbers[6]), hint)
        if s < 0:
            return -1
        tail = s == sequences
        if halves and tail and numbers[7] == 0:
            return -1
        end = numbers[6] if unpads else tokens
        start, stop = entry(data, wide, s), end if tail else entry(data, wide, s + 1)
        first, last = start, stop
        if has_real:
            first, last = entry(numbers[3], numbers[4], s), tokens if tail else entry(numbers[3], numbers[4], s + 1)
        return _inside(row(i, start, stop, tail, first, last, tokens, numbers[6], numbers[7]), tokens)

    return mapped


@lru_cache
def row_key(kind: str) -> Callable[..., Any]:
    """A device function key(i, numbers): row i searches for this number in the lengths. It rises with i, except at a
    slice's end.
    """
    key = _keys.get(kind, _keys["valid"])

    @cuda.jit(device=True)
    def of_numbers(i, numbers):
        return key(i, numbers[5], numbers[6])

    return of_numbers


@lru_cache
def map_is_right(kind: str) -> Callable[..., Any]:
    """A device function right(numbers, thread, threads): whether this thread's share of the lengths obeys all rules."""
    if kind in ("span", "index"):
        return _always
    chunked, halves = kind in ("slice", "rank_order", "sequence_order"), kind in ("half", "in_half")
    has_real, unpads, from_zero = kind in ("valid", "unpad"), kind == "unpad", int(kind != "valid")

    @cuda.jit(device=True)
    def right(numbers, thread, threads):
        divisor = 2 * numbers[6] if chunked else (2 if halves else 1)
        tail_divisor = numbers[6] if chunked else 1
        end = numbers[6] if unpads else numbers[5]
        if not lengths_are_right(
            numbers[0], numbers[1], numbers[2], divisor, tail_divisor, end, from_zero, thread, threads
        ):
            return False
        if has_real and not real_lengths_are_right(
            numbers[3], numbers[4], numbers[0], numbers[1], numbers[2], thread, threads
        ):
            return False
        return not unpads or lengths_are_right(numbers[3], numbers[4], numbers[2], 1, 1, numbers[5], 1, thread, threads)

    return right


@cuda.jit(device=True)
def _always(numbers, thread, threads):
    return True
