# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportOptionalSubscript=false, reportAttributeAccessIssue=false
# (kernels are compiled by Numba: their types are not Python's)
"""The kernel that adds: pairs of tensors, added or converted.

Blocks work as in `move_kernels`: rows are looked up once, by one thread each. Numbers are read four at a time if
addresses allow (`width` 4), widened to `wide`, and rounded once, at the store.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numba import cuda, int64

from cp_fast.movers.numba_cuda.address.memory import divide, fault, load_values, store_values
from cp_fast.movers.numba_cuda.move_kernels import FIELDS, INDEX_RULE, LENGTHS_RULE, THREADS
from cp_fast.movers.numba_cuda.row_maps_on_gpu import plan_is_right, row_map

__all__ = ["SIZES", "pairs_kernel"]

SIZES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}


@lru_cache
def pairs_kernel(helper: str, kind: str, add: bool, dtype: str, step_dtype: str, wide: str, width: int) -> Any:
    """kernel(table, plan, count, rows): target[map(i)] = or, with `add`, += row i of the source, `rows` rows a block.

    The table is that of `move_kernels`, target first, `words` in elements.
    """
    load, load_step = load_values(dtype, wide, width), load_values(step_dtype, wide, width)
    store = store_values(dtype, wide, width)
    size, step_size = SIZES[dtype], SIZES[step_dtype]
    by_index = kind == "index"
    mapped, right = row_map(kind), plan_is_right(kind)
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
        if thread < here:
            row = mapped(first + thread, plan, -1)
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
