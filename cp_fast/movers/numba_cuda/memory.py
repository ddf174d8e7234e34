"""Memory by address: of the GPU, or of this process where Numba simulates one (NUMBA_ENABLE_CUDASIM=1)."""

from __future__ import annotations

from cp_fast.movers.numba_cuda.memory_sim import SIMULATED

__all__ = [
    "SIMULATED",
    "copies",
    "divide",
    "fault",
    "load_int",
    "load_values",
    "store_int",
    "store_values",
]

if SIMULATED:
    from cp_fast.movers.numba_cuda.memory_sim import (
        copies,
        divide,
        fault,
        load_int,
        load_values,
        store_int,
        store_values,
    )
else:
    from cp_fast.movers.numba_cuda.memory_gpu import (
        copies,
        divide,
        fault,
        load_int,
        load_values,
        store_int,
        store_values,
    )
