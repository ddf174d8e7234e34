"""Both passes of a causal convolution on one rank, in plain PyTorch.

Rows are gathered by tables, in both directions, so that every sum has a fixed order.
"""

from __future__ import annotations

import torch

from cp_fast.linear.convolution.halo_tables import HaloTables
from cp_ref.common.groups.process_groups import during
from cp_ref.spec import Group, Parcel

__all__ = ["convolve", "gradients", "with_halo"]


def with_halo(tables: HaloTables, group: Group, x: torch.Tensor) -> torch.Tensor:
    """x by slot [slots, channels]: own rows [n, channels], those of other ranks, and a row of zeros."""
    held = x.new_empty(tables.slots, x.shape[1])
    held[: len(x)] = x
    held[-1] = 0
    for sends, recvs in tables.forward:
        arriving = [held.new_empty(len(recv.slots), x.shape[1]) for recv in recvs]
        out = [Parcel(send.peer, send.tag, held[send.slots]) for send in sends]
        back = [Parcel(recv.peer, recv.tag, rows) for recv, rows in zip(recvs, arriving, strict=True)]
        with during("rows of a convolution, forward"):
            group.exchange(out, back).wait()
        for recv, rows in zip(recvs, arriving, strict=True):
            held[recv.slots] = rows
    return held


def convolve(tables: HaloTables, held: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The sums [n, channels] before the activation, in the weight's dtype.

    held: see `with_halo`; weight: [channels, kernel_size]; bias: [channels].
    """
    sums = None if bias is None else bias
    for column in range(weight.shape[1]):
        part = held[tables.reads[:, column]].to(weight.dtype) * weight[:, column]
        sums = part if sums is None else sums + part
    assert sums is not None
    return sums


def gradients(
    tables: HaloTables, group: Group, held: torch.Tensor, weight: torch.Tensor, dsums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x [n, channels], and this rank's share of that of the weight, in the weight's dtype.

    dsums: the gradient of the sums [n, channels], in the weight's dtype.
    """
    dweight = torch.empty_like(weight)
    for column in range(weight.shape[1]):
        dweight[:, column] = (dsums * held[tables.reads[:, column]].to(weight.dtype)).sum(0)
    padded = torch.cat([dsums, dsums.new_zeros(1, dsums.shape[1])])
    dheld = padded.new_zeros(tables.slots, padded.shape[1])
    for column in range(weight.shape[1]):
        dheld += padded[tables.read_by[:, column]] * weight[:, column]
    for sends, recvs in tables.backward:
        arriving = [dheld.new_empty(len(recv.slots), dheld.shape[1]) for recv in recvs]
        out = [Parcel(send.peer, send.tag, dheld[send.slots]) for send in sends]
        back = [Parcel(recv.peer, recv.tag, rows) for recv, rows in zip(recvs, arriving, strict=True)]
        with during("rows of a convolution, backward"):
            group.exchange(out, back).wait()
        for recv, rows in zip(recvs, arriving, strict=True):
            dheld[recv.slots] += rows
    return dheld[: len(dsums)], dweight
