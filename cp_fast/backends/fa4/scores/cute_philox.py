"""The random words of dropout in CuTe: `cp_ref.common.scores.philox` on 32-bit registers.

Counters that a tile's rows or columns share need no thought here: the compiler computes equal products once.
"""

from __future__ import annotations

from typing import Any

from cp_fast.backends.fa4.scores.library_modules import library

__all__ = ["philox4x32"]

_ROUNDS = 7
_FACTORS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """The four words of a counter under a key: Uint32 scalars, as their inputs."""
    uint32 = library("cutlass").Uint32
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for number in range(_ROUNDS):
        high0, low0 = _product(c0, _FACTORS[0])
        high1, low1 = _product(c2, _FACTORS[1])
        now0, now1 = (k + uint32(weyl * number & 0xFFFFFFFF) for k, weyl in zip((k0, k1), _WEYL, strict=True))
        c0, c1, c2, c3 = high1 ^ c1 ^ now0, low1, high0 ^ c3 ^ now1, low0
    return c0, c1, c2, c3


def _product(a: Any, factor: int) -> tuple[Any, Any]:
    """The high and the low 32 bits."""
    uint32, uint64 = library("cutlass").Uint32, library("cutlass").Uint64
    product = uint64(a) * uint64(factor)
    return uint32(product >> uint64(32)), uint32(product)
