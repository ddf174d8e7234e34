"""`deterministic=True`: bits of a packed sequence that do not change with the others in the batch (docs/support.md)."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

import cp_fast
from cp_ref import SimGroup

RESULTS = ("out", "dq", "dk", "dv")


def results(cp_size: int, comm: Any, first: list[torch.Tensor], others: list[int]) -> dict[str, torch.Tensor]:
    """Those of the first sequence, beside others of these lengths."""
    lengths = [len(first[0]), *others]
    generator = torch.Generator().manual_seed(sum(others))
    whole = [torch.cat([x, torch.randn(sum(others), *x.shape[1:], generator=generator)]) for x in first]
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    def one_rank(member: Any) -> dict[str, torch.Tensor]:
        cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
        how: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": cu}
        q, k, v, dout = (cp_fast.shard(x, **how) for x in whole)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = cp_fast.attention(*inputs, cp=cp, qkv_format="thd", cu_seqlens_q=cu, deterministic=True)
        out.backward(dout)
        local = [out.detach(), *(x.grad for x in inputs)]
        return {name: cp_fast.unshard(x, **how)[: lengths[0]] for name, x in zip(RESULTS, local, strict=True)}

    return SimGroup(cp_size).run(one_rank)[0]


@pytest.mark.parametrize(
    ("cp_size", "comm", "lengths_divide", "same"),
    [
        (2, "p2p", False, RESULTS),
        (3, "p2p", True, RESULTS),
        (3, "p2p", False, RESULTS),
        (4, "p2p", False, RESULTS),
        (8, "p2p", False, RESULTS),
        (3, "all_gather", False, RESULTS),
        (4, "a2a+p2p", False, RESULTS),
    ],
)
def test_bits_beside_others(cp_size: int, comm: str, lengths_divide: bool, same: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(4 * cp_size, 2, 8, generator=generator) for _ in range(4)]
    alone = results(cp_size, comm, first, [])
    for others in ([8, 2, 6], [4, 4, 2, 6]):
        less = 0 if lengths_divide else 1
        found = results(cp_size, comm, first, [n * cp_size - less for n in others])
        assert [name for name in same if not torch.equal(found[name], alone[name])] == []
