"""What a rank of a ring holds at most, by the memory that its operators allocate.

The kernel library is a stand-in that allocates what FlashAttention 4 does; its stream order is the host's. Not seen are
what CUDA's allocator rounds and cannot use again, and the lanes of peers' memory, which are not PyTorch's.
"""

from __future__ import annotations

import pytest
import torch

from tests.cp_fast.one_rank import Allocated, call_of

TOKENS, HEADS, DIM = 64, (32, 8), 128
AS_16384 = 16_384 / TOKENS / 2**30  # GiB at 16,384 rows a rank


def peak(comm: str, size: int, rank: int) -> float:
    """GiB above the inputs, results included, at 16,384 rows a rank."""
    call = call_of(comm, size, rank, TOKENS, HEADS, DIM)
    with Allocated() as allocated:
        call()
    return allocated.peak * AS_16384


def test_a_ring_holds_the_same_whatever_its_size() -> None:
    """The first rank and the one that holds most, as dense causal sequences are cut. It is the same from six ranks on:
    in a smaller ring fewer blocks are under way while dq is already a sum.
    """
    first = {size: peak("p2p", size, 0) for size in (2, 3, 4, 6, 8)}
    most = {size: peak("p2p", size, min(size - 1, 5)) for size in first}
    assert first[6] == first[8] == pytest.approx(0.909, abs=0.001)
    assert most[6] == most[8] == pytest.approx(1.033, abs=0.001)
    assert [first[size] for size in (2, 3, 4)] == pytest.approx([0.659, 0.815, 0.878], abs=0.001)
    assert [most[size] for size in (2, 3, 4)] == pytest.approx([0.752, 0.908, 0.971], abs=0.001)


def test_nothing_is_held_that_nobody_needs() -> None:
    """The first rank of a ring of six, by what has to be there, in MiB: out; dq in float32; two blocks of keys; dK and
    dV, its own and those on their way in float32; what a launch of half the queries adds up in; and lse, twice a bit.
    """
    out, dq, keys, own, way, launch = 128, 256, 2 * 64, 64, 128, 128 + 128
    assert 1024 * peak("p2p", 6, 0) <= out + dq + keys + own + way + launch + 4


def test_memory_that_goes_is_counted_off() -> None:
    with Allocated() as allocated:
        x = torch.empty(1000)
        y = x[10:]
        del x
        assert (allocated.now, allocated.peak) == (4000, 4000)
        del y
        torch.empty(500)
    assert (allocated.now, allocated.peak) == (0, 4000)
