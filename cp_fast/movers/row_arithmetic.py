# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# (functions of integers and of tensors have no types)
"""Which row of the whole each row of a part is: the arithmetic of every kind of `RowRule`, once for Numba and PyTorch.

A search in the lengths finds the sequence that holds a row's key; the rest is here, from that sequence's bounds. The
tail behind the last sequence is one more sequence, which ends with the buffer. Native kernels have the same in
csrc/common/row_arithmetic.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Arithmetic", "row_arithmetic"]

Function = Callable[..., Any]


class Arithmetic(NamedTuple):
    """Functions of a row's number i in the part, by kind.

    keys: (i, tokens, a) to the number that is looked for in the lengths. rows: (i, start, stop, tail, first, last,
    tokens, a, b) to the row in the whole, -1 for none. [start, stop) are the sequence's rows, and `tail` says whether
    it is the tail; [first, last) are its real rows, for kinds that have them; tokens, a and b are the rule's.
    """

    keys: dict[str, Function]
    rows: dict[str, Function]


def row_arithmetic(divide: Function, choose: Function, compiled: Callable[[Function], Any] = lambda f: f) -> Arithmetic:
    """The functions, of one row's integers or of int64 tensors of many rows.

    Args:
        divide: (a, b) to a // b; neither is negative while lengths are right.
        choose: (condition, a, b) to a where the condition holds, else b.
        compiled: what each function is compiled by.

    >>> rows = row_arithmetic(lambda a, b: a // b, lambda c, a, b: a if c else b).rows
    >>> [rows["slice"](i, 0, 8, False, 0, 0, 8, 2, 1) for i in range(4)]  # rank 1 of 2 has chunks 1 and 2 of 4
    [2, 3, 4, 5]
    """

    @compiled
    def key(i, tokens, a):
        return i

    @compiled
    def key_in_slice(i, tokens, a):
        return i * a

    @compiled
    def key_in_rank_order(i, tokens, a):
        share = max(divide(tokens, a), 1)
        return (i - divide(i, share) * share) * a

    @compiled
    def key_in_half(i, tokens, a):
        return 2 * i

    @compiled
    def row_of_slice(i, rank, start, stop, tail, cp_size):
        part = divide(stop - start, cp_size)
        chunk, offset = part >> 1, i - divide(start, cp_size)
        late = start + (2 * cp_size - 2 - rank) * chunk + offset  # offset counts the early chunk too
        return choose(tail, start + rank * part + offset, choose(offset < chunk, start + rank * chunk + offset, late))

    @compiled
    def in_slice(i, start, stop, tail, first, last, tokens, a, b):
        return row_of_slice(i, b, start, stop, tail, a)

    @compiled
    def in_rank_order(i, start, stop, tail, first, last, tokens, a, b):
        share = max(divide(tokens, a), 1)
        rank = divide(i, share)
        return row_of_slice(i - rank * share, rank, start, stop, tail, a)

    @compiled
    def in_sequence_order(i, start, stop, tail, first, last, tokens, a, b):
        part = divide(stop - start, a)
        size = choose(tail, part, part >> 1)  # The tail has a part for every rank, a sequence two chunks.
        size = size + (size == 0)  # Of lengths that are wrong.
        number = divide(i - start, size)
        rest, late = i - start - number * size, number >= a
        rank = choose(late, 2 * a - 1 - number, number)
        return rank * divide(tokens, a) + divide(start, a) + late * size + rest

    @compiled
    def of_half(i, start, stop, tail, first, last, tokens, a, b):
        return start + a * ((stop - start) >> 1) + i - (start >> 1)

    @compiled
    def in_half(i, start, stop, tail, first, last, tokens, a, b):
        late = i - start >= (stop - start) >> 1
        return choose(tail, -1, choose(late == (a == 1), i, -1))

    @compiled
    def valid(i, start, stop, tail, first, last, tokens, a, b):
        return choose(tail, -1, choose((i >= start) & (i - start < last - first), i, -1))

    @compiled
    def unpad(i, start, stop, tail, first, last, tokens, a, b):
        return choose(first + i - start < last, first + i - start, -1)

    names = "slice", "rank_order", "sequence_order", "half", "in_half", "valid", "unpad"
    keys = key_in_slice, key_in_rank_order, key, key_in_half, key, key, key
    rows = in_slice, in_rank_order, in_sequence_order, of_half, in_half, valid, unpad
    return Arithmetic(dict(zip(names, keys, strict=True)), dict(zip(names, rows, strict=True)))
