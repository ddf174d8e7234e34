"""The interface of what computes a convolution on one rank, and the choice of it: the one place where it is made.

legend   n = own rows, a = rows that arrived, s = n + a slots, r = any rows
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import NamedTuple, Protocol

import torch

from cp_fast.linear.convolution import torch_convolution
from cp_fast.linear.convolution.halo_tables import ReadTable
from cp_fast.tools.log import log_once

__all__ = ["ConvolutionInputs", "ConvolutionKernels", "choose_convolution"]


class ConvolutionInputs(NamedTuple):
    """The tensors of both passes. Rows are contiguous."""

    x: torch.Tensor  # [n, channels]
    halo: torch.Tensor  # [a, channels]
    reads: ReadTable  # of the own rows: slots, s for a row of zeros
    weight: torch.Tensor  # [channels, kernel_size]
    bias: torch.Tensor | None  # [channels]
    silu: bool


class ConvolutionKernels(Protocol):
    """Sums are in float32, or in float64 for float64. Each has a fixed order."""

    def forward(self, inputs: ConvolutionInputs) -> torch.Tensor:
        """The result [n, channels], in x's dtype."""
        ...

    def sums_backward(
        self, inputs: ConvolutionInputs, dout: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Given dout [n, channels], the gradients of the sums before the activation [n, channels], of the weight and
        of the bias.
        """
        ...

    def rows_backward(
        self, read_by: ReadTable, dsums: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The gradients of rows [r, channels], in `dtype`.

        read_by: the rows of dsums that read each row; n for no row.
        """
        ...


def choose_convolution(x: torch.Tensor, backend: str) -> ConvolutionKernels:
    """Triton on NVIDIA GPUs from Ampere on. Float64, other devices, and `ContextParallel.backend` "torch" or "cpu" take
    plain PyTorch.
    """
    if x.device.type != "cuda" or x.dtype == torch.float64 or backend in ("torch", "cpu") or not _on_triton():
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
