"""Which pairs dropout keeps, by the documented hash, in numpy and from its documentation alone (docs/how_to/scores.md).

Philox-4x32 with 7 rounds (Salmon et al. 2011). `cp_ref.contract.scores` has another implementation, in PyTorch: the
probes hold every result against this one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["kept_pairs", "philox"]

Words = NDArray[np.uint64]
Places = NDArray[np.integer[Any]]
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter: tuple[Words, Words, Words, Words], key: int, rounds: int = 7) -> tuple[Words, Words, Words, Words]:
    """Four words of 32 bits for each counter, under a key of 64 bits.

    >>> zero = np.zeros((), dtype=np.uint64)
    >>> [f"{int(word):08x}" for word in philox((zero, zero, zero, zero), 0)]
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    x0, x1, x2, x3 = counter
    for n in range(rounds):
        low = np.uint64(((key & 0xFFFFFFFF) + n * 0x9E3779B9) & 0xFFFFFFFF)
        high = np.uint64(((key >> 32 & 0xFFFFFFFF) + n * 0xBB67AE85) & 0xFFFFFFFF)
        first, second = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1, x2, x3 = (second >> _32) ^ x1 ^ low, second & _MASK, (first >> _32) ^ x3 ^ high, first & _MASK
    return x0, x1, x2, x3


def kept_pairs(
    document: int, head: int, q_idx: Places, kv_idx: Places, seed: int, dropout_p: float
) -> NDArray[np.bool_]:
    """Whether each pair is kept: bool [n, m].

    Args:
        q_idx: [n] positions of queries inside the document; kv_idx: [m] those of keys. Integers.
        seed: of 64 bits, signed or not.
    """
    i, j = np.asarray(q_idx, np.uint64)[:, None], np.asarray(kv_idx, np.uint64)[None]
    block, inside, half = np.uint64(16), np.uint64(8), np.uint64(2)
    counter = (j // block * inside + j % inside, i // block * inside + i % inside)
    shape = np.broadcast_shapes(i.shape, j.shape)
    fixed = (np.full(shape, head, np.uint64), np.full(shape, document, np.uint64))
    words = np.stack(philox((*(np.broadcast_to(x, shape) for x in counter), *fixed), seed))  # pyright: ignore[reportArgumentType]
    word = half * (i // inside % half) + j // inside % half
    chosen = np.take_along_axis(words, np.broadcast_to(word, shape)[None].astype(np.int64), axis=0)[0]
    return chosen >= round(dropout_p * 2**32)
