"""The messages of a causal convolution: rows before fragments in the forward pass, their gradients in the backward."""

from __future__ import annotations

import torch

from cp_fast.linear.convolution.halo_tables import HaloTables, Sent
from cp_ref.common.groups.process_groups import during
from cp_ref.spec import Group, Parcel

__all__ = ["exchange_gradients", "exchange_rows"]


def exchange_rows(tables: HaloTables, group: Group, x: torch.Tensor) -> torch.Tensor:
    """The rows that arrive [arriving, channels], given the own rows x [n, channels]."""
    halo = x.new_empty(tables.arriving, x.shape[1])
    for sends, recvs in tables.forward:
        out = [Parcel(send.peer, send.tag, _taken(send, x, halo)) for send in sends]
        back = [Parcel(recv.peer, recv.tag, halo[recv.start : recv.stop]) for recv in recvs]
        with during("rows of a convolution, forward"):
            group.exchange(out, back).wait()
    return halo


def _taken(send: Sent, x: torch.Tensor, halo: torch.Tensor) -> torch.Tensor:
    """The rows of a message. A pair of groups forwards rows that arrived before."""
    if not len(send.forwarded):
        return x.index_select(0, send.own)
    rows = halo.index_select(0, send.forwarded)
    if send.order is None:
        return rows
    return torch.cat([x.index_select(0, send.own), rows]).index_select(0, send.order)


def exchange_gradients(tables: HaloTables, group: Group, edges: torch.Tensor) -> None:
    """Add up what the ranks have of the gradients of the rows in `HaloTables.edges_read_by`, in place."""
    for sends, recvs in tables.backward:
        arriving = [edges.new_empty(len(recv.numbers), edges.shape[1]) for recv in recvs]
        out = [Parcel(send.peer, send.tag, edges.index_select(0, send.numbers)) for send in sends]
        back = [Parcel(recv.peer, recv.tag, rows) for recv, rows in zip(recvs, arriving, strict=True)]
        with during("rows of a convolution, backward"):
            group.exchange(out, back).wait()
        for recv, rows in zip(recvs, arriving, strict=True):
            edges[recv.numbers] += rows
