"""Batches whose segments lie anywhere, and the same segments packed side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from cp_fast.kernels.attention.backend_protocol import Backend, LaunchOptions, Partial
from cp_fast.kernels.attention.varlen_batch import SegmentStarts, VarlenBatch

__all__ = ["both_ways", "placed"]


def placed(packed: VarlenBatch, order: Sequence[int], first_kv: Sequence[int]) -> VarlenBatch:
    """The segments of a packed batch in another order. Their queries stay where they are, and their keys begin at these
    rows.
    """
    device, first_q = packed.device_cu_q.device, [packed.cu_q[n] for n in order]
    rows, columns = ([cu[n + 1] - cu[n] for n in order] for cu in (packed.cu_q, packed.cu_kv))
    q, kv = (torch.tensor([*first, 0], dtype=torch.int32, device=device) for first in (first_q, first_kv))
    of_q, of_kv = (torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, columns))
    batch = VarlenBatch.pack(rows, columns, packed.left, packed.right, device)
    return replace(batch, starts=SegmentStarts(tuple(first_q), tuple(first_kv), q, of_q, kv, of_kv))


def both_ways(
    backend: Backend,
    lengths_q: Sequence[int],
    lengths_kv: Sequence[int],
    window: tuple[int | None, int | None],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: LaunchOptions,
) -> tuple[Partial, Partial]:
    """Segments in the opposite order whose keys all begin at row 0; and each with its copy of the keys."""
    q, k, v = tensors
    packed = VarlenBatch.pack(lengths_q, lengths_kv, *window, q.device)
    index = torch.cat([torch.arange(b - a) for a, b in pairwise(accumulate(lengths_kv, initial=0))]).to(q.device)
    order = range(len(lengths_q))[::-1]
    here = backend.forward(q, k, v, placed(packed, order, [0] * len(lengths_q)), options)
    return here, backend.forward(q, k[index], v[index], packed, options)
