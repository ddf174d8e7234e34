"""Which kernels run on this machine's GPU; for the others, why not."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from cp_fast.log import log_once

__all__ = ["NotInstalled", "ampere_why_not", "hopper_why_not", "on_triton", "triton_why_not"]


class NotInstalled(str):
    """Why a kernel library does not work here, if installing a package would fix it: the library supports this GPU."""

    __slots__ = ()


@cache
def ampere_why_not() -> str | None:
    """The reason why kernels for NVIDIA GPUs from Ampere on do not run on this one, found once."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if torch.version.hip is not None:
        return "this is a ROCm build of PyTorch"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"it needs compute capability 8.0 or later, and this GPU has {major}.{minor}"


def hopper_why_not() -> str | None:
    """The reason why a library that was checked on Hopper alone does not run on this GPU."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"it is checked on Hopper (compute capability 9.0) only, and this GPU has {major}.{minor}"
    return None


def triton_why_not() -> str | None:
    """The reason why Triton does not work on this GPU."""
    if (reason := ampere_why_not()) is not None:
        return reason
    missing = importlib.util.find_spec("triton") is None
    return NotInstalled("Triton is not installed: pip install triton") if missing else None


@cache
def on_triton(layer: str) -> bool:
    """Whether Triton works on this GPU. If it is missing alone, a line says that `layer` runs without it."""
    reason = triton_why_not()
    if isinstance(reason, NotInstalled):
        log_once(f"{layer} runs on torch; what this GPU prefers is not installed (Triton: pip install triton)")
    return reason is None
