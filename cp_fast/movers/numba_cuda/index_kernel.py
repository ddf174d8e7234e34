# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportOptionalSubscript=false, reportAttributeAccessIssue=false
# (kernels are compiled by Numba: their types are not Python's)
"""The kernel that writes the table of a row map: one thread a row."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numba import cuda

from cp_fast.movers.numba_cuda.address.memory import fault, store_int
from cp_fast.movers.numba_cuda.move_kernels import LENGTHS_RULE
from cp_fast.movers.numba_cuda.row_maps_on_gpu import plan_is_right, row_map

__all__ = ["indices_kernel"]


@lru_cache
def indices_kernel(helper: str, kind: str, size: int) -> Any:
    """kernel(out, plan, count): the row of every row of the part, in integers of `size` bytes."""
    store, mapped, right = store_int(size), row_map(kind), plan_is_right(kind)
    fail = fault(f"cp_fast {helper}: {LENGTHS_RULE}")

    @cuda.jit
    def kernel(out, plan, count):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if not right(plan, i, cuda.gridDim.x * cuda.blockDim.x):
            fail()
        if i < count:
            store(out + size * i, mapped(i, plan, -1))

    return kernel
