"""A convolution on one rank in plain PyTorch: see `ConvolutionKernels`.

Rows are gathered by tables, in both directions, so that every sum has a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cp_fast.linear.convolution.convolution_kernels import ConvolutionInputs
    from cp_fast.linear.convolution.halo_tables import ReadTable

__all__ = ["forward", "rows_backward", "sums_backward"]


def forward(inputs: ConvolutionInputs) -> torch.Tensor:
    """See `ConvolutionKernels`."""
    sums = _sums(inputs, _held(inputs))
    return (torch.nn.functional.silu(sums) if inputs.silu else sums).to(inputs.x.dtype)


def sums_backward(
    inputs: ConvolutionInputs, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `ConvolutionKernels`."""
    held, dsums = _held(inputs), dout.to(_wide(dout))
    if inputs.silu:
        sums = _sums(inputs, held)
        gate = torch.sigmoid(sums)
        dsums = dsums * gate * (1 + sums * (1 - gate))
    dweight = torch.empty_like(inputs.weight)
    for column, slots in enumerate(inputs.reads.slots.unbind(1)):
        dweight[:, column] = (dsums * held.index_select(0, slots)).sum(0)
    return dsums, dweight, None if inputs.bias is None else dsums.sum(0).to(inputs.bias.dtype)


def rows_backward(read_by: ReadTable, dsums: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `ConvolutionKernels`."""
    padded = torch.cat([dsums, dsums.new_zeros(1, dsums.shape[1])])
    return _weighted(padded, read_by.slots, weight.to(dsums.dtype), None).to(dtype)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _held(inputs: ConvolutionInputs) -> torch.Tensor:
    """x by slot, and a row of zeros [s + 1, channels]."""
    return torch.cat([inputs.x, inputs.halo, inputs.x.new_zeros(1, inputs.x.shape[1])])


def _sums(inputs: ConvolutionInputs, held: torch.Tensor) -> torch.Tensor:
    """The sums before the activation [n, channels]."""
    wide = _wide(held)
    bias = None if inputs.bias is None else inputs.bias.to(wide)
    return _weighted(held, inputs.reads.slots, inputs.weight.to(wide), bias)


def _weighted(
    rows: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, first: torch.Tensor | None
) -> torch.Tensor:
    """The sum over columns of the rows that the table [r, kernel_size] names, times weights, and `first` [channels]."""
    sums = first
    for column, numbers in enumerate(table.unbind(1)):
        part = rows.index_select(0, numbers) * weight[:, column]
        sums = part if sums is None else sums + part
    assert sums is not None
    return sums
