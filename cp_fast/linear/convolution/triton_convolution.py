# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
"""A convolution on one rank in Triton: see `ConvolutionKernels`. Nothing is gathered before the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # pyright: ignore[reportMissingImports]

from cp_fast.linear.convolution.triton_kernels import backward_kernel, edges_kernel, forward_kernel

if TYPE_CHECKING:
    from cp_fast.linear.convolution.convolution_kernels import ConvolutionInputs

__all__ = ["backward", "edges_backward", "forward"]

FORWARD = 64, 512, 8, 4  # rows and channels of a program, rows that it loads at once, and warps
BACKWARD = 256, 512, 8, 4


def forward(inputs: ConvolutionInputs) -> torch.Tensor:
    """See `ConvolutionKernels`."""
    x, halo, reads, weight, bias, silu = inputs
    (n, channels), (block_rows, block_channels, at_once, warps) = x.shape, FORWARD
    out = torch.empty_like(x)
    if n:
        with torch.cuda.device_of(x):
            forward_kernel[(triton.cdiv(n, block_rows) * triton.cdiv(channels, block_channels),)](
                x, halo, weight, bias, reads.slots, reads.stops, out, n, len(halo), *weight.stride(),
                channels, weight.shape[1], block_rows, block_channels, at_once, bias is not None, silu, num_warps=warps,
            )  # fmt: skip
    return out


def backward(inputs: ConvolutionInputs, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `ConvolutionKernels`."""
    x, halo, reads, weight, bias, silu = inputs
    (n, channels), (block_rows, block_channels, at_once, warps) = x.shape, BACKWARD
    kernel_size, parts = weight.shape[1], triton.cdiv(n, block_rows)
    dx = torch.empty_like(x)
    dweight = x.new_empty(parts, kernel_size, channels, dtype=torch.float32)
    dbias = None if bias is None else x.new_empty(parts, channels, dtype=torch.float32)
    if n:
        with torch.cuda.device_of(x):
            backward_kernel[(parts * triton.cdiv(channels, block_channels),)](
                x, halo, weight, bias, reads.slots, reads.stops, reads.after, dout, dx, dweight, dbias, n, len(halo),
                *weight.stride(), channels, kernel_size, block_rows, block_channels, at_once, bias is not None, silu,
                num_warps=warps,
            )  # fmt: skip
    of_weight = dweight.sum(0).t().to(weight.dtype, memory_format=torch.contiguous_format)
    return dx, of_weight, None if dbias is None or bias is None else dbias.sum(0).to(bias.dtype)


def edges_backward(inputs: ConvolutionInputs, dout: torch.Tensor, read_by: torch.Tensor) -> torch.Tensor:
    """See `ConvolutionKernels`."""
    x, halo, reads, weight, bias, silu = inputs
    channels, block_channels = x.shape[1], 256
    found = x.new_empty(len(read_by), channels, dtype=torch.float32)
    if len(found):
        with torch.cuda.device_of(x):
            edges_kernel[(len(found) * triton.cdiv(channels, block_channels),)](
                x, halo, weight, bias, reads.slots, read_by, dout, found, len(x), len(halo), *weight.stride(),
                channels, weight.shape[1], block_channels, bias is not None, silu, num_warps=4,
            )  # fmt: skip
    return found
