"""The interface of what computes a convolution on one rank, and the choice of it: the one place where it is made.

legend   n = own rows, a = rows that arrived, s = n + a slots, r = any rows
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Protocol

import torch

from cp_fast.linear.convolution import torch_convolution
from cp_fast.linear.convolution.torch_convolution import ConvolutionInputs
from cp_fast.log import log_once

__all__ = ["ConvolutionKernels", "choose_convolution"]


class ConvolutionKernels(Protocol):
    """Sums are in float32, or in float64 for float64. Each has a fixed order."""

    def forward(self, inputs: ConvolutionInputs) -> torch.Tensor:
        """The result [n, channels], in x's dtype."""
        ...

    def backward(
        self, inputs: ConvolutionInputs, dout: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Given dout [n, channels], the gradients of x from the own rows, of the weight and of the bias, in the dtypes
        of these.
        """
        ...

    def edges_backward(self, inputs: ConvolutionInputs, dout: torch.Tensor, read_by: torch.Tensor) -> torch.Tensor:
        """The gradients of some rows [r, channels] from the own rows, wide.

        read_by: see `HaloTables.edges_read_by`.
        """
        ...


_MOST = 16  # kernel_size: beyond it registers run out, and compiling takes long


def choose_convolution(x: torch.Tensor, kernel_size: int, backend: str) -> ConvolutionKernels:
    """Triton on NVIDIA GPUs from Ampere on. Float64, kernel sizes above 16, other devices, and
    `ContextParallel.backend` "torch" or "cpu" take plain PyTorch.
    """
    given = x.device.type != "cuda" or x.dtype == torch.float64 or kernel_size > _MOST or backend in ("torch", "cpu")
    if given or not _on_triton():
        return torch_convolution
    return importlib.import_module("cp_fast.linear.convolution.triton_convolution")  # pyright: ignore[reportReturnType]


@cache
def _on_triton() -> bool:
    """Whether Triton works on this GPU."""
    if torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 0):
        return False
    if importlib.util.find_spec("triton") is not None:
        return True
    log_once("causal_conv1d runs on torch; what this GPU prefers is not installed (Triton: pip install triton)")
    return False
