"""A convolution on one rank in plain PyTorch: see `ConvolutionKernels`.

Rows are gathered and added by tables, column by column of the weight, so that every sum has a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_fast.layers.halo_tables import Reads

__all__ = ["ConvolutionInputs", "backward", "edges_backward", "forward"]


class ConvolutionInputs(NamedTuple):
    """The tensors of both passes. Rows are contiguous."""

    x: torch.Tensor  # [n, channels]
    halo: torch.Tensor  # [a, channels]
    reads: Reads  # of the own rows: slots, s for a row of zeros
    weight: torch.Tensor  # [channels, kernel_size]
    bias: torch.Tensor | None  # [channels]
    silu: bool


def forward(inputs: ConvolutionInputs) -> torch.Tensor:
    """See `ConvolutionKernels`."""
    sums = _sums(inputs, _held(inputs), inputs.reads.slots)
    return (torch.nn.functional.silu(sums) if inputs.silu else sums).to(inputs.x.dtype)


def backward(inputs: ConvolutionInputs, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `ConvolutionKernels`."""
    x, _, reads, weight, bias, _ = inputs
    held = _held(inputs)
    dsums = _sums_backward(inputs, held, reads.slots, dout)
    dheld, dweight = dsums.new_zeros(held.shape), torch.empty_like(weight)
    for column, slots in enumerate(reads.slots.unbind(1)):  # no two rows read one slot, except the row of zeros
        dheld.index_copy_(0, slots.long(), dheld.index_select(0, slots) + dsums * weight[:, column].to(dsums.dtype))
        dweight[:, column] = (dsums * held.index_select(0, slots)).sum(0)
    return dheld[: len(x)].to(x.dtype), dweight, None if bias is None else dsums.sum(0).to(bias.dtype)


def edges_backward(inputs: ConvolutionInputs, dout: torch.Tensor, read_by: torch.Tensor) -> torch.Tensor:
    """See `ConvolutionKernels`."""
    held, n = _held(inputs), len(dout)
    found = held.new_zeros(len(read_by), held.shape[1], dtype=_wide(held))
    for column, readers in enumerate(read_by.unbind(1) if n else ()):
        own = readers.clamp(max=n - 1)
        dsums = _sums_backward(inputs, held, inputs.reads.slots.index_select(0, own), dout.index_select(0, own))
        found += torch.where((readers < n)[:, None], dsums * inputs.weight[:, column].to(found.dtype), 0)
    return found


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _held(inputs: ConvolutionInputs) -> torch.Tensor:
    """x by slot, and a row of zeros [s + 1, channels]."""
    return torch.cat([inputs.x, inputs.halo, inputs.x.new_zeros(1, inputs.x.shape[1])])


def _sums(inputs: ConvolutionInputs, held: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
    """The sums before the activation [r, channels] of rows that read slots [r, kernel_size]."""
    wide = _wide(held)
    sums = held.new_zeros(len(reads), held.shape[1], dtype=wide)
    if inputs.bias is not None:
        sums += inputs.bias.to(wide)
    for slots, column in zip(reads.unbind(1), inputs.weight.to(wide).unbind(1), strict=True):
        sums += held.index_select(0, slots) * column
    return sums


def _sums_backward(
    inputs: ConvolutionInputs, held: torch.Tensor, reads: torch.Tensor, dout: torch.Tensor
) -> torch.Tensor:
    """The gradients of these sums, given those of the results [r, channels]."""
    dsums = dout.to(_wide(dout))
    if not inputs.silu:
        return dsums
    sums = _sums(inputs, held, reads)
    gate = torch.sigmoid(sums)
    return dsums * gate * (1 + sums * (1 - gate))
