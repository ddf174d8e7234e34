# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportOptionalSubscript=false, reportAttributeAccessIssue=false
# (kernels are compiled by Numba: their types are not Python's)
"""The kernels that make lengths, indices and LSEs: one thread a row."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numba import cuda

from cp_fast.movers.numba_cuda.maps import (
    entry,
    find,
    lengths_are_right,
    real_lengths_are_right,
    row_map,
)
from cp_fast.movers.numba_cuda.memory import divide, fault, load_int, store_int
from cp_fast.movers.numba_cuda.movers import LENGTHS_RULE

__all__ = ["held_kernel", "indices_kernel", "lse_half_kernel", "pad_kernel"]

REAL_RULE = "real lengths must begin at 0, not decrease, and fit into the slots"


@lru_cache
def indices_kernel(size: int) -> Any:
    """kernel(out, plan, count, divisor, tail_divisor): `partition_indices`."""
    store, mapped = store_int(size), row_map("partition")
    fail = fault(f"cp_fast partition_indices: {LENGTHS_RULE}")

    @cuda.jit
    def kernel(out, plan, count, divisor, tail_divisor):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        threads = cuda.gridDim.x * cuda.blockDim.x
        if not lengths_are_right(plan[0], plan[1], plan[2], divisor, tail_divisor, plan[5], 1, i, threads):
            fail()
        if i < count:
            store(out + size * i, mapped(i, plan, -1))

    return kernel


@lru_cache
def held_kernel(size: int) -> Any:
    """kernel(out, plan, cp_size, early, late): a 0, then the real tokens of every sequence in a rank's chunks.

    plan[3], plan[4]: the real lengths. early, late: the number of a chunk, or -1.
    """
    store = store_int(size)
    fail = fault(f"cp_fast rank_lengths: {LENGTHS_RULE}")
    fail_real = fault(f"cp_fast rank_lengths: {REAL_RULE}")

    @cuda.jit
    def kernel(out, plan, cp_size, early, late):
        s = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        threads = cuda.gridDim.x * cuda.blockDim.x
        if not lengths_are_right(plan[0], plan[1], plan[2], 2 * cp_size, 1, plan[5], 1, s, threads):
            fail()
        if not real_lengths_are_right(plan[3], plan[4], plan[0], plan[1], plan[2], s, threads):
            fail_real()
        if s == 0:
            store(out, 0)
        if s < plan[2]:
            chunk = divide(max(entry(plan[0], plan[1], s + 1) - entry(plan[0], plan[1], s), 0), 2 * cp_size)
            real = entry(plan[3], plan[4], s + 1) - entry(plan[3], plan[4], s)
            held = 0
            if early >= 0:
                held += min(max(real - early * chunk, 0), chunk)
            if late >= 0:
                held += min(max(real - late * chunk, 0), chunk)
            store(out + size * (s + 1), held)

    return kernel


@lru_cache
def pad_kernel(size: int) -> Any:
    """kernel(out, x, stride, tokens, plan, fill): `pad_sequences`; the stride in bytes, plan[5] padded tokens."""
    load, store = load_int(size), store_int(size)
    fail = fault(f"cp_fast pad_sequences: {LENGTHS_RULE}")
    fail_real = fault(f"cp_fast pad_sequences: {REAL_RULE}")

    @cuda.jit
    def kernel(out, x, stride, tokens, plan, fill):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        threads = cuda.gridDim.x * cuda.blockDim.x
        if not lengths_are_right(plan[0], plan[1], plan[2], 1, 1, plan[5], 1, i, threads):
            fail()
        if not lengths_are_right(plan[3], plan[4], plan[2], 1, 1, tokens, 1, i, threads):
            fail_real()
        if not real_lengths_are_right(plan[3], plan[4], plan[0], plan[1], plan[2], i, threads):
            fail_real()
        if i < plan[5]:
            s = find(plan[0], plan[1], plan[2], i)
            value = fill
            if s >= 0:
                row = entry(plan[3], plan[4], s) + i - entry(plan[0], plan[1], s)
                stop = tokens if s == plan[2] else min(entry(plan[3], plan[4], s + 1), tokens)
                if row >= 0 and row < stop:
                    value = load(x + row * stride)
            store(out + size * i, value)

    return kernel


@lru_cache
def lse_half_kernel(size: int, packed: bool) -> Any:
    """kernel(plan, count, heads, out, lse): `read_second_half_lse`. Packed: `count` columns; padded: count columns of
    plan[2] sequences. out, lse: (address, sequence stride, head stride, row stride) in bytes; lse also its columns.
    """
    load, store = load_int(size), store_int(size)
    fail = fault(f"cp_fast read_second_half_lse: {LENGTHS_RULE}")

    @cuda.jit
    def kernel(plan, count, heads, out, lse):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        threads = cuda.gridDim.x * cuda.blockDim.x
        if not lengths_are_right(plan[0], plan[1], plan[2], 2, 1, plan[5], 1, i, threads):
            fail()
        if i < (count if packed else count * plan[2]):
            source = -1
            if packed:
                s, column = 0, i
                found = find(plan[0], plan[1], plan[2], 2 * i)
                if found >= 0 and found < plan[2]:
                    start = entry(plan[0], plan[1], found)
                    half = divide(max(entry(plan[0], plan[1], found + 1) - start, 0), 2)
                    source = start + half + i - divide(start, 2)
            else:
                s = divide(i, count)
                column = i - s * count
                half = divide(max(entry(plan[0], plan[1], s + 1) - entry(plan[0], plan[1], s), 0), 2)
                if half > count or 2 * half > lse[4]:
                    fail()
                if column < half:
                    source = half + column
            if source >= lse[4]:
                source = -1
            for head in range(heads):
                value = 0
                if source >= 0:
                    value = load(lse[0] + s * lse[1] + head * lse[2] + source * lse[3])
                store(out[0] + s * out[1] + head * out[2] + column * out[3], value)

    return kernel
