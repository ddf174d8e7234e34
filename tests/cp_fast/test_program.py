"""What a schedule compiles to: few launches, slices where rows are contiguous, buffers that do not grow."""

from __future__ import annotations

import pytest
import torch
from cp_fast.planning.compile import compile_program

from cp_ref.spec import Problem, Sequence

CPU = torch.device("cpu")


def same(*lengths: int) -> tuple[Sequence, ...]:
    return tuple(Sequence(n, n, n, n) for n in lengths)


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(64,), (64, 16, 160)])
def test_a_causal_ring_is_one_launch_a_step(cp_size: int, lengths: tuple[int, ...]) -> None:
    """Both chunks, all documents: the own step is a batch of causal squares, the others are full rectangles."""
    for rank in range(cp_size):
        program = compile_program(Problem(cp_size, same(*lengths), qkv_format="thd"), rank, CPU)
        assert [len(step.launches) for step in program.forward] == [1] * cp_size
        first, *others = (step.launches[0].segments for step in program.forward)
        assert (first.left, first.right) == (None, 0)
        assert all((s.left, s.right) == (None, None) for s in others)
        assert len(first.cu_q) == len(lengths) + 1


def test_one_document_is_never_gathered() -> None:
    for rank in range(4):
        program = compile_program(Problem(4, same(64), qkv_format="thd"), rank, CPU)
        for step in program.forward:
            for launch in step.launches:
                assert isinstance(launch.q_rows, slice)
                assert isinstance(launch.kv_rows, slice)


@pytest.mark.parametrize("cp_size", [2, 4, 16])
def test_blocks_do_not_grow_with_the_ring(cp_size: int) -> None:
    length = 32 * cp_size
    program = compile_program(Problem(cp_size, same(length), qkv_format="thd", attn_mask_type="no_mask"), 0, CPU)
    assert max(step.block_size for step in program.forward) == 32


def test_a2a_is_one_launch_of_whole_sequences() -> None:
    problem = Problem(4, same(64, 32), "a2a", 4, qkv_format="thd", heads_q=8, heads_kv=4)
    program = compile_program(problem, 2, CPU)
    (step,) = program.forward
    (launch,) = step.launches
    assert launch.segments.cu_q == (0, 64, 96)
    assert launch.q_rows == slice(0, 96)


def test_documents_at_home_send_nothing() -> None:
    problem = Problem(2, same(16, 16), qkv_format="thd", layout="contiguous")
    program = compile_program(problem, 0, CPU)
    assert not any(step.give_kv or step.take_kv for step in program.forward)
