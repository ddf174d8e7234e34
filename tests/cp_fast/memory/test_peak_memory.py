"""What a rank of a ring holds at most, by the memory that its operators allocate.

The kernel library is a stand-in that allocates what FlashAttention 4 does; its stream order is the host's. Not seen are
what CUDA's allocator rounds and cannot use again, and the staging buffers of peer memory, which are not PyTorch's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_fast.tools.cost import predict, read_machine
from cp_ref.schedules.problem import Problem, Sequence
from tests.cp_fast.memory.one_rank import Allocated, call_of

TOKENS, HEADS, DIM = 64, (32, 8), 128
AS_16384 = 16_384 / TOKENS / 2**20  # MiB at 16,384 rows a rank
OUT, LSE = 128, 2  # MiB


def peak(comm: Any, size: int, rank: int) -> float:
    """MiB above the inputs, results included, at 16,384 rows a rank."""
    call = call_of(comm, size, rank, TOKENS, HEADS, DIM)
    with Allocated() as allocated:
        call()
    return allocated.peak * AS_16384


@pytest.mark.parametrize(
    ("size", "most"), [(2, 608), (3, 768), (4, 832), (5, 864), (6, 864), (8, 864), (12, 864), (16, 864)]
)
def test_a_ring_holds_less_than_0_9_gib_above_inputs_and_outputs(size: int, most: int) -> None:
    """Whatever its size: of every rank, as dense causal sequences are cut; of large rings of the first ones, which
    differ, and the last. In a small ring fewer blocks are under way while dq is already a sum.
    """
    ranks = range(size) if size <= 6 else (0, 5, size - 1)
    assert max(peak("p2p", size, rank) - OUT - LSE for rank in ranks) == most <= 0.9 * 1024


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_cost_model_predicts_what_the_fullest_rank_holds(size: int) -> None:
    """Or a little more."""
    whole = Sequence(*[size * 16_384] * 4)
    problem = Problem(size, (whole,), heads_q=HEADS[0], heads_kv=HEADS[1], d_qk=DIM, d_v=DIM, dtype="bfloat16")
    predicted = predict(problem, read_machine("h200-nvlink")).peak_bytes / 2**20
    held = max(peak("p2p", size, rank) for rank in range(size))
    assert held <= predicted <= 1.07 * held


def test_nothing_is_held_that_nobody_needs() -> None:
    """The fullest rank of a ring of six, by what has to be there, in MiB. While all queries meet half the keys: dq in
    float32; the block of keys that comes next, and till it was read this one; dK and dV of its own, of this half on
    their way in float32, and the launch's; and what the launch adds up in, with all that it yields at its end.
    """
    dq, keys, own, way, launch, yielded = 256, 64, 64, 64, 256, 128 + 32
    assert peak("p2p", 6, 5) - OUT - LSE == dq + keys + own + way + launch + yielded


def test_memory_that_goes_is_counted_off() -> None:
    with Allocated() as allocated:
        x = torch.empty(1000)
        y = x[10:]
        del x
        assert (allocated.now, allocated.peak) == (4000, 4000)
        del y
        torch.empty(500)
    assert (allocated.now, allocated.peak) == (0, 4000)
