"""Launching on PyTorch's current stream."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from numba import cuda

from cp_fast.movers.numba_cuda.address.memory import SIMULATED
from cp_fast.movers.numba_cuda.move_kernels import THREADS

__all__ = ["launch", "quiet"]


def launch(kernel: Any, device: torch.device, blocks: int, *arguments: Any, layers: int = 1) -> None:
    """A grid [blocks, layers] of `THREADS` threads each. Nothing waits."""
    if SIMULATED:
        kernel[(blocks, layers), THREADS](*arguments)
        return
    with _on(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        kernel[(blocks, layers), THREADS, _stream(stream) if stream else 0](*arguments)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device current in Numba, which keeps a separate current device."""
    return nullcontext() if torch.cuda.device_count() == 1 else cuda.gpus[device.index]


@lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    return cuda.external_stream(handle)


def quiet() -> None:
    """Silence warnings about small launches, which are intended."""
    from numba.core.errors import NumbaPerformanceWarning

    warnings.filterwarnings("ignore", message="Grid size", category=NumbaPerformanceWarning)
