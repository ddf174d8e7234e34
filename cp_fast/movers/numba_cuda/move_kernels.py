# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportOptionalSubscript=false, reportAttributeAccessIssue=false
# (kernels are compiled by Numba: their types are not Python's)
"""The kernel that moves rows: every gather, scatter and transposition of bytes is this kernel with another row map.

A block takes some rows. Its threads find the sequence of the first row together. From there each thread finds the
sequence of one row, and stores it in shared memory. Then groups of `lanes` threads copy pieces of rows, in words of
up to 16 bytes, four in flight at once.

A move is 10 integers of a table. These are the source and target addresses, the row strides of both, the number of
pieces in a row ("heads") and their strides on both sides, all in bytes. The last three: `words` in a piece, the binary
logarithm of lanes, and 0. One launch takes several moves, one for each index y of the grid.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numba import cuda, int64

from cp_fast.movers.numba_cuda.address.memory import SIMULATED, copies, divide, fault
from cp_fast.movers.numba_cuda.row_maps_on_gpu import entry, plan_is_right, row_key, row_map

__all__ = ["FIELDS", "INDEX_RULE", "LENGTHS_RULE", "THREADS", "move_kernel"]

THREADS = 8 if SIMULATED else 256
FIELDS = 10
NEAR = 2 if SIMULATED else 8  # Up to this many sequences, one thread searches alone.
LENGTHS_RULE = "lengths must begin at 0, not decrease, divide, and end inside the tensor"
INDEX_RULE = "row indices must lie inside the tensor"


@lru_cache
def move_kernel(helper: str, kind: str, scatter: bool, size: int) -> Any:
    """kernel(table, plan, count, rows): move `count` rows, `rows` a block.

    With `scatter` the map gives the row of the target, else of the source.
    """
    copy, copy4 = copies(size)
    mapped, key, right = row_map(kind), row_key(kind), plan_is_right(kind)
    by_lengths, by_index = kind not in ("span", "index"), kind == "index"
    fail = fault(f"cp_fast {helper}: {INDEX_RULE if by_index else LENGTHS_RULE}")

    @cuda.jit
    def kernel(table, plan, count, rows):
        found = cuda.shared.array(THREADS, int64)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        if cuda.blockIdx.y == 0 and not right(plan, block * THREADS + thread, cuda.gridDim.x * THREADS):
            fail()
        first = block * rows
        here = min(rows, count - first)
        hint = -1
        if by_lengths:  # All threads search the first row's sequence together: two reads instead of many.
            hint, left, wanted = 0, plan[2] + 1, key(first, plan)
            while left > NEAR:
                step = divide(left + THREADS - 1, THREADS)
                probe = thread * step
                before = 1 if probe < left and entry(plan[0], plan[1], hint + probe) <= wanted else 0
                passed = cuda.syncthreads_count(before)
                ahead = (passed - 1) * step if passed > 0 else 0
                hint += ahead
                left = min(step, left - ahead)
        if thread < here:
            row = mapped(first + thread, plan, hint)
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
