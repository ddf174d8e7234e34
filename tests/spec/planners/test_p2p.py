"""The p2p schedule costs what it should."""

from dataclasses import replace

import pytest

from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.verify.proof import verify


def long_causal(cp_size: int, **changes: object) -> Problem:
    length = 64 * 2 * cp_size
    sequence = Sequence(length, length, length, length)
    return replace(Problem(cp_size, (sequence,), qkv_format="thd", attn_mask_type="causal"), **changes)


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_dual_chunk_balances_causal_work_and_contiguous_does_not(cp_size: int) -> None:
    dual, contiguous = long_causal(cp_size), long_causal(cp_size, layout="contiguous")
    assert verify(dual, make_schedule(dual)).balance == 1.0
    assert verify(contiguous, make_schedule(contiguous)).balance < 0.75


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("window", [0, 5, 64, 100])
def test_a_windowed_ring_sends_no_more_than_what_is_seen(cp_size: int, window: int) -> None:
    """Each rank receives just the rows that its queries see and that it does not own."""
    problem = long_causal(cp_size, window_size=(window, 0))
    schedule = make_schedule(problem)
    verify(problem, schedule)
    for rank, rank_schedule in enumerate(schedule.forward):
        received = sum(m.pieces.size for step in rank_schedule for m in step.recvs)
        owned = [range(rank * 64, rank * 64 + 64), range((2 * cp_size - 1 - rank) * 64, (2 * cp_size - rank) * 64)]
        seen = {k for chunk in owned for q in chunk for k in range(max(0, q - window), q + 1)}
        assert received == len(seen - {k for chunk in owned for k in chunk})


def test_documents_that_fit_on_one_rank_cost_no_message() -> None:
    """contiguous: two documents on two ranks, each at home."""
    problem = Problem(
        2, (Sequence(8, 8, 8, 8),) * 2, qkv_format="thd", layout="contiguous", attn_mask_type="padding_causal"
    )
    assert verify(problem, make_schedule(problem)).sent_bytes == 0
