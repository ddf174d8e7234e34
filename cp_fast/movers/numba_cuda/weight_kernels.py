# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportOptionalSubscript=false, reportAttributeAccessIssue=false
# (kernels are compiled by Numba: their types are not Python's)
"""The kernel that weighs partial results by their LSE, and merges LSEs.

A block takes pairs of a row and a head. Rows are looked up once, by one thread each. Then one thread a pair reads both
LSEs and computes the weights. Then groups of threads process the numbers of each pair. Shared memory holds the
intermediate results.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from numba import cuda, float32, float64, int64

from cp_fast.movers.numba_cuda.address.memory import divide, fault, load_values, store_values
from cp_fast.movers.numba_cuda.merge_kernels import SIZES
from cp_fast.movers.numba_cuda.move_kernels import INDEX_RULE, LENGTHS_RULE, THREADS
from cp_fast.movers.numba_cuda.row_maps_on_gpu import entry, find, plan_is_right, row_key, row_map

__all__ = ["PIECES", "weigh_kernel"]

TYPES = {"f32": float32, "f64": float64}
PIECES = THREADS  # Pairs of a row and a head in a block.


@lru_cache
def weigh_kernel(
    helper: str, kind: str, final: bool, dtype: str, step_dtype: str, lse_dtype: str, lse_step_dtype: str, width: int
) -> Any:
    """kernel(plan, count, out, step, lse, lse_step): `count` rows of a step into an accumulator, PIECES pairs of a row
    and a head a block. Step row i goes to row map(i).

    out, step: (address, row stride, head stride) in bytes; out also (heads, dim, log of lanes), dim 0 for none.
    lse, lse_step: (address, sequence stride, head stride, row stride) in bytes, and columns for a padded one, else 0.
    The kernel merges (see `Kernels.merge_`); `final` as there.
    """
    wide = "f64" if "f64" in (dtype, step_dtype, lse_dtype, lse_step_dtype) else "f32"
    real = TYPES[wide]
    load, load_step = load_values(dtype, wide, width), load_values(step_dtype, wide, width)
    store = store_values(dtype, wide, width)
    load_lse, load_lse_step = load_values(lse_dtype, wide, 1), load_values(lse_step_dtype, wide, 1)
    store_lse = store_values(lse_dtype, wide, 1)
    size, step_size = SIZES[dtype], SIZES[step_dtype]
    by_lengths, by_index, by_half = kind not in ("span", "index"), kind == "index", kind == "half"
    mapped, key, right = row_map(kind), row_key(kind), plan_is_right(kind)
    fail = fault(f"cp_fast {helper}: {INDEX_RULE if by_index else LENGTHS_RULE}")
    zero, one, empty = real(0.0), real(1.0), real(-math.inf)

    @cuda.jit
    def kernel(plan, count, out, step, lse, lse_step):
        targets = cuda.shared.array(PIECES, int64)  # By row of the block.
        sequences = cuda.shared.array(PIECES, int64)
        starts = cuda.shared.array(PIECES, int64)
        kept = cuda.shared.array(PIECES, real)  # By piece.
        added = cuda.shared.array(PIECES, real)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        if not right(plan, block * THREADS + thread, cuda.gridDim.x * THREADS):
            fail()
        heads = out[3]
        first = block * PIECES
        here = min(PIECES, count * heads - first)
        first_row = divide(first, heads)
        rows = divide(first + here - 1, heads) - first_row + 1
        if thread < rows:
            i = first_row + thread
            target, sequence, start = mapped(i, plan, -1), 0, 0
            if by_index and target < 0:
                fail()
            if by_lengths and lse[4] > 0 and target >= 0:
                sequence = find(plan[0], plan[1], plan[2], key(i, plan))
                start = entry(plan[0], plan[1], sequence)
            targets[thread] = target
            sequences[thread] = sequence
            starts[thread] = start
        cuda.syncthreads()

        if thread < here:
            row = divide(first + thread, heads) - first_row
            head = first + thread - (first_row + row) * heads
            target, i = targets[row], first_row + row
            keep, add = one, zero
            if target >= 0:
                column, step_column = target, i
                if lse[4] > 0:
                    column = target - starts[row]
                    step_column = i - divide(starts[row], 2) if by_half else column
                inside = lse[4] == 0 or (column >= 0 and column < lse[4])
                inside = inside and (lse_step[4] == 0 or (step_column >= 0 and step_column < lse_step[4]))
                if inside:
                    at = lse[0] + sequences[row] * lse[1] + head * lse[2] + column * lse[3]
                    step_at = lse_step[0] + sequences[row] * lse_step[1] + head * lse_step[2]
                    step_at += step_column * lse_step[3]
                    old, _, _, _ = load_lse(at)
                    new, _, _, _ = load_lse_step(step_at)
                    if final:
                        if new != empty:
                            add = math.exp(new - old)
                    elif new != empty:
                        if old == empty:
                            keep, add = zero, one
                            store_lse(at, new, zero, zero, zero)
                        else:
                            larger = max(old, new)
                            ratio = math.exp(min(old, new) - larger)
                            share = one / (one + ratio)
                            if old > new:
                                keep, add = share, ratio * share
                            else:
                                keep, add = ratio * share, share
                            store_lse(at, larger + math.log1p(ratio), zero, zero, zero)
                    elif old == empty:
                        keep = zero
                else:
                    fail()
            kept[thread] = keep
            added[thread] = add
        dim = out[4]
        if dim == 0:
            return
        cuda.syncthreads()

        lanes = 1 << out[5]
        piece = thread >> out[5]
        while piece < here:
            row = divide(first + piece, heads) - first_row
            head = first + piece - (first_row + row) * heads
            target = targets[row]
            keep, add = kept[piece], added[piece]
            if target >= 0 and (keep != one or add != zero):
                t = out[0] + target * out[1] + head * out[2]
                s = step[0] + (first_row + row) * step[1] + head * step[2]
                element = (thread & (lanes - 1)) * width
                while element < dim:
                    a, b, c, d = zero, zero, zero, zero
                    if keep != zero:
                        a, b, c, d = load(t + element * size)
                        a *= keep
                        b *= keep
                        c *= keep
                        d *= keep
                    if add != zero:
                        e, f, g, h = load_step(s + element * step_size)
                        a += e * add
                        b += f * add
                        c += g * add
                        d += h * add
                    store(t + element * size, a, b, c, d)
                    element += lanes * width
            piece += THREADS >> out[5]

    return kernel
