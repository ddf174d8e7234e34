# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportOptionalSubscript=false, reportAttributeAccessIssue=false
# (kernels are compiled by Numba: their types are not Python's)
"""The kernels, compiled by Numba: what moves rows, adds them, merges by log-sum-exp, and writes a row map's table."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from numba import cuda, float32, float64, int64

from cp_fast.movers.numba_cuda.memory import SIMULATED, copies, divide, fault, load_values, store_int, store_values
from cp_fast.movers.numba_cuda.row_rules import entry, find, map_is_right, row_key, row_map

__all__ = [
    "FIELDS",
    "INDEX_RULE",
    "LENGTHS_RULE",
    "PIECES",
    "SIZES",
    "THREADS",
    "indices_kernel",
    "move_kernel",
    "pairs_kernel",
    "weigh_kernel",
]

# ---- gathers and scatters
#
# Every gather, scatter and transposition of bytes is this kernel with another row map. A block takes some rows. Its
# threads find the sequence of the first row together. From there each thread finds the sequence of one row, and stores
# it in shared memory. Then groups of `lanes` threads copy pieces of rows, in words of up to 16 bytes, four in flight at
# once.
#
# A move is 10 integers of a table. These are the source and target addresses, the row strides of both, the number of
# pieces in a row ("heads") and their strides on both sides, all in bytes. The last three: `words` in a piece, the
# binary logarithm of lanes, and 0. One launch takes several moves, one for each index y of the grid.


THREADS = 8 if SIMULATED else 256
FIELDS = 10
NEAR = 2 if SIMULATED else 8  # Up to this many sequences, one thread searches alone.
LENGTHS_RULE = "lengths must begin at 0, not decrease, divide, and end inside the tensor"
INDEX_RULE = "row indices must lie inside the tensor"


@lru_cache
def move_kernel(helper: str, kind: str, scatter: bool, size: int) -> Any:
    """kernel(table, numbers, count, rows): move `count` rows, `rows` a block.

    With `scatter` the map gives the row of the target, else of the source.
    """
    copy, copy4 = copies(size)
    mapped, key, right = row_map(kind), row_key(kind), map_is_right(kind)
    by_lengths, by_index = kind not in ("span", "index"), kind == "index"
    fail = fault(f"cp_fast {helper}: {INDEX_RULE if by_index else LENGTHS_RULE}")

    @cuda.jit
    def kernel(table, numbers, count, rows):
        found = cuda.shared.array(THREADS, int64)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        if cuda.blockIdx.y == 0 and not right(numbers, block * THREADS + thread, cuda.gridDim.x * THREADS):
            fail()
        first = block * rows
        here = min(rows, count - first)
        hint = -1
        if by_lengths:  # All threads search the first row's sequence together: two reads instead of many.
            hint, left, wanted = 0, numbers[2] + 1, key(first, numbers)
            while left > NEAR:
                step = divide(left + THREADS - 1, THREADS)
                probe = thread * step
                before = 1 if probe < left and entry(numbers[0], numbers[1], hint + probe) <= wanted else 0
                passed = cuda.syncthreads_count(before)
                ahead = (passed - 1) * step if passed > 0 else 0
                hint += ahead
                left = min(step, left - ahead)
        if thread < here:
            row = mapped(first + thread, numbers, hint)
            if by_index and row < 0:
                fail()
            found[thread] = row
        cuda.syncthreads()

        at = cuda.blockIdx.y * FIELDS
        source, target, source_row, target_row = table[at], table[at + 1], table[at + 2], table[at + 3]
        heads, source_head, target_head = table[at + 4], table[at + 5], table[at + 6]
        words, log_lanes = table[at + 7], table[at + 8]
        lanes = 1 << log_lanes
        lane = thread & (lanes - 1)
        groups = THREADS >> log_lanes
        pieces = here * heads
        piece = thread >> log_lanes
        if words <= lanes:  # Short pieces: one word of four pieces.
            if lane < words:
                offset = lane * size
                while piece < pieces:
                    if piece + 3 * groups < pieces:
                        r0, r1, r2, r3 = piece, piece + groups, piece + 2 * groups, piece + 3 * groups
                        s0, s1, s2, s3 = offset, offset, offset, offset
                        t0, t1, t2, t3 = offset, offset, offset, offset
                        if heads > 1:
                            q0, q1, q2, q3 = divide(r0, heads), divide(r1, heads), divide(r2, heads), divide(r3, heads)
                            h0, h1, h2, h3 = r0 - q0 * heads, r1 - q1 * heads, r2 - q2 * heads, r3 - q3 * heads
                            r0, r1, r2, r3 = q0, q1, q2, q3
                            s0, t0 = s0 + h0 * source_head, t0 + h0 * target_head
                            s1, t1 = s1 + h1 * source_head, t1 + h1 * target_head
                            s2, t2 = s2 + h2 * source_head, t2 + h2 * target_head
                            s3, t3 = s3 + h3 * source_head, t3 + h3 * target_head
                        m0, m1, m2, m3 = found[r0], found[r1], found[r2], found[r3]
                        f0, f1, f2, f3 = first + r0, first + r1, first + r2, first + r3
                        if scatter:
                            s0, t0 = source + f0 * source_row + s0, target + m0 * target_row + t0
                            s1, t1 = source + f1 * source_row + s1, target + m1 * target_row + t1
                            s2, t2 = source + f2 * source_row + s2, target + m2 * target_row + t2
                            s3, t3 = source + f3 * source_row + s3, target + m3 * target_row + t3
                        else:
                            s0, t0 = source + m0 * source_row + s0, target + f0 * target_row + t0
                            s1, t1 = source + m1 * source_row + s1, target + f1 * target_row + t1
                            s2, t2 = source + m2 * source_row + s2, target + f2 * target_row + t2
                            s3, t3 = source + m3 * source_row + s3, target + f3 * target_row + t3
                        if m0 >= 0 and m1 >= 0 and m2 >= 0 and m3 >= 0:
                            copy4(t0, s0, t1, s1, t2, s2, t3, s3)
                        else:
                            if m0 >= 0:
                                copy(t0, s0)
                            if m1 >= 0:
                                copy(t1, s1)
                            if m2 >= 0:
                                copy(t2, s2)
                            if m3 >= 0:
                                copy(t3, s3)
                        piece += 4 * groups
                    else:
                        row = divide(piece, heads)
                        head = piece - row * heads
                        other = found[row]
                        if other >= 0:
                            s = source + (first + row if scatter else other) * source_row + head * source_head
                            t = target + (other if scatter else first + row) * target_row + head * target_head
                            copy(t + offset, s + offset)
                        piece += groups
            return
        while piece < pieces:  # Long pieces: four words of one.
            row = piece if heads == 1 else divide(piece, heads)
            head = piece - row * heads
            other = found[row]
            if other >= 0:
                s = source + (first + row if scatter else other) * source_row + head * source_head + lane * size
                t = target + (other if scatter else first + row) * target_row + head * target_head + lane * size
                step = lanes * size
                word = lane
                while word + 3 * lanes < words:
                    copy4(t, s, t + step, s + step, t + 2 * step, s + 2 * step, t + 3 * step, s + 3 * step)
                    s += 4 * step
                    t += 4 * step
                    word += 4 * lanes
                while word < words:
                    copy(t, s)
                    s += step
                    t += step
                    word += lanes
            piece += groups

    return kernel


# ---- additions
#
# The kernel that adds: pairs of tensors, added or converted.
#
# Blocks work as in `move_kernel`: rows are looked up once, by one thread each. Numbers are read four at a time if
# addresses allow (`width` 4), widened to `wide`, and rounded once, at the store.


SIZES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}


@lru_cache
def pairs_kernel(helper: str, kind: str, add: bool, dtype: str, step_dtype: str, wide: str, width: int) -> Any:
    """kernel(table, numbers, count, rows): target[map(i)] = or, with `add`, += row i of the source; `rows` a block.

    The table is that of `move_kernel`, target first, `words` in elements.
    """
    load, load_step = load_values(dtype, wide, width), load_values(step_dtype, wide, width)
    store = store_values(dtype, wide, width)
    size, step_size = SIZES[dtype], SIZES[step_dtype]
    by_index = kind == "index"
    mapped, right = row_map(kind), map_is_right(kind)
    fail = fault(f"cp_fast {helper}: {INDEX_RULE if by_index else LENGTHS_RULE}")

    @cuda.jit
    def kernel(table, numbers, count, rows):
        found = cuda.shared.array(THREADS, int64)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        if cuda.blockIdx.y == 0 and not right(numbers, block * THREADS + thread, cuda.gridDim.x * THREADS):
            fail()
        first = block * rows
        here = min(rows, count - first)
        if thread < here:
            row = mapped(first + thread, numbers, -1)
            if by_index and row < 0:
                fail()
            found[thread] = row
        cuda.syncthreads()

        at = cuda.blockIdx.y * FIELDS
        target, source, target_row, source_row = table[at], table[at + 1], table[at + 2], table[at + 3]
        heads, target_head, source_head = table[at + 4], table[at + 5], table[at + 6]
        dim, log_lanes = table[at + 7], table[at + 8]
        lanes = 1 << log_lanes
        pieces = here * heads
        piece = thread >> log_lanes
        while piece < pieces:
            row = piece if heads == 1 else divide(piece, heads)
            head = piece - row * heads
            other = found[row]
            if other >= 0:
                t = target + other * target_row + head * target_head
                s = source + (first + row) * source_row + head * source_head
                element = (thread & (lanes - 1)) * width
                while element < dim:
                    a, b, c, d = load_step(s + element * step_size)
                    if add:
                        e, f, g, h = load(t + element * size)
                        a += e
                        b += f
                        c += g
                        d += h
                    store(t + element * size, a, b, c, d)
                    element += lanes * width
            piece += THREADS >> log_lanes

    return kernel


# ---- merges
#
# The kernel that weighs partial results by their LSE, and merges LSEs.
#
# A block takes pairs of a row and a head. Rows are looked up once, by one thread each. Then one thread a pair reads
# both LSEs and computes the weights. Then groups of threads process the numbers of each pair. Shared memory holds the
# intermediate results.


TYPES = {"f32": float32, "f64": float64}
PIECES = THREADS  # Pairs of a row and a head in a block.


@lru_cache
def weigh_kernel(
    helper: str, kind: str, final: bool, dtype: str, step_dtype: str, lse_dtype: str, lse_step_dtype: str, width: int
) -> Any:
    """kernel(numbers, count, out, step, lse, lse_step): `count` rows of a step into an accumulator, PIECES pairs of a
    row and a head a block. Step row i goes to row map(i).

    out, step: (address, row stride, head stride) in bytes; out also (heads, dim, log of lanes), dim 0 for none.
    lse, lse_step: (address, sequence stride, head stride, row stride) in bytes, and columns for a padded one, else 0.
    The kernel merges (see `Movers.merge_`); `final` as there.
    """
    wide = "f64" if "f64" in (dtype, step_dtype, lse_dtype, lse_step_dtype) else "f32"
    real = TYPES[wide]
    load, load_step = load_values(dtype, wide, width), load_values(step_dtype, wide, width)
    store = store_values(dtype, wide, width)
    load_lse, load_lse_step = load_values(lse_dtype, wide, 1), load_values(lse_step_dtype, wide, 1)
    store_lse = store_values(lse_dtype, wide, 1)
    size, step_size = SIZES[dtype], SIZES[step_dtype]
    by_lengths, by_index, by_half = kind not in ("span", "index"), kind == "index", kind == "half"
    mapped, key, right = row_map(kind), row_key(kind), map_is_right(kind)
    fail = fault(f"cp_fast {helper}: {INDEX_RULE if by_index else LENGTHS_RULE}")
    zero, one, empty = real(0.0), real(1.0), real(-math.inf)

    @cuda.jit
    def kernel(numbers, count, out, step, lse, lse_step):
        targets = cuda.shared.array(PIECES, int64)  # By row of the block.
        sequences = cuda.shared.array(PIECES, int64)
        starts = cuda.shared.array(PIECES, int64)
        kept = cuda.shared.array(PIECES, real)  # By piece.
        added = cuda.shared.array(PIECES, real)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        if not right(numbers, block * THREADS + thread, cuda.gridDim.x * THREADS):
            fail()
        heads = out[3]
        first = block * PIECES
        here = min(PIECES, count * heads - first)
        first_row = divide(first, heads)
        rows = divide(first + here - 1, heads) - first_row + 1
        if thread < rows:
            i = first_row + thread
            target, sequence, start = mapped(i, numbers, -1), 0, 0
            if by_index and target < 0:
                fail()
            if by_lengths and lse[4] > 0 and target >= 0:
                sequence = find(numbers[0], numbers[1], numbers[2], key(i, numbers))
                start = entry(numbers[0], numbers[1], sequence)
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


# ---- tables
#
# The kernel that writes the table of a row map: one thread a row.


@lru_cache
def indices_kernel(helper: str, kind: str, size: int) -> Any:
    """kernel(out, numbers, count): the row of every row of the part, in integers of `size` bytes."""
    store, mapped, right = store_int(size), row_map(kind), map_is_right(kind)
    fail = fault(f"cp_fast {helper}: {LENGTHS_RULE}")

    @cuda.jit
    def kernel(out, numbers, count):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if not right(numbers, i, cuda.gridDim.x * cuda.blockDim.x):
            fail()
        if i < count:
            store(out + size * i, mapped(i, numbers, -1))

    return kernel
