"""The kernels in Numba CUDA, for machines with a GPU and no compiler: compiled on first use, some seconds each kind.

    launches      the protocol: addresses, strides, grids, launches
    kernels       gathers and scatters, additions, merges, tables
    row_rules     the target of each row
    memory        memory by address: `memory_gpu`, or `memory_sim` in Numba's simulator (NUMBA_ENABLE_CUDASIM=1)

A call costs some tens of microseconds on the host, more than native code; the GPU's time is nearly the same. The first
call of every kind compiles, which a CUDA graph cannot capture: call it once before.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata

import torch

from cp_fast.movers.mover_protocol import Movers, RowRule
from cp_fast.movers.numba_cuda.memory_sim import SIMULATED

__all__ = ["load", "why_not"]


def why_not(device_type: str) -> str | None:
    """Why these kernels cannot be used on a device; None if they can. One kernel is tried: some releases raise only
    when kernels are loaded or compiled. The simulator has them on the CPU.
    """
    if device_type != ("cpu" if SIMULATED else "cuda"):
        return f"numba is for 'cuda', not {device_type!r}" + (": it simulates one, on 'cpu'" if SIMULATED else "")
    if importlib.util.find_spec("numba") is None or importlib.util.find_spec("numba_cuda") is None:
        return "the package numba-cuda is not installed"
    try:
        from numba import cuda

        if not SIMULATED and not cuda.is_available():
            return "Numba finds no GPU, or no CUDA libraries to compile with"
        own = RowRule("partition_indices", "slice", torch.tensor([0, 4], device=device_type), a=2)
        found = load(device_type).row_indices(own, 4).tolist()
    except Exception as error:  # Such as a release that does not support the installed NumPy.
        return f"numba-cuda is installed and does not work, {_cure()}: {type(error).__name__}: {error}"
    return None if found == [0, 3] else f"numba-cuda computes {found} where [0, 3] is right, {_cure()}"


def _cure() -> str:
    """The packages to install, and the versions that conflict."""
    names = {"numba", "numba-cuda", "numpy"}
    here = sorted({f"{d.name} {d.version}" for d in metadata.distributions() if d.name.lower() in names})
    return f"try pip install --upgrade numba numba-cuda, or an older NumPy ({', '.join(here)} here)"


def load(device: str) -> Movers:
    """The implementation."""
    from cp_fast.movers.numba_cuda.launches import NumbaMovers, quiet

    quiet()
    return NumbaMovers()
