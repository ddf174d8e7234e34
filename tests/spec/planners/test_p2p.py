"""The p2p schedule costs what it should."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.planners.ring_members import RingMembers
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.verify.proof import verify
from tests.marks import examples
from tests.spec.problems import problems


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


# What `RingMembers` finds, by its definition: loops over attention slices, rows and keys.

Pair = tuple[int, int, int]  # attention slice, query row, key row


def visible_pairs(problem: Problem) -> Iterator[Pair]:
    for area, (q_start, q_stop, k_start, k_stop, lo, hi) in enumerate(problem.workload.areas.rows()):
        for q in range(q_start, q_stop):
            for k in range(max(k_start, q + lo), min(k_stop, q + hi + 1)):
                yield area, q, k


def owners(problem: Problem, side: str) -> dict[int, int]:
    """The ring member of each row."""
    fragments = problem.workload.ownership.side(side).rows()
    return {row: rank // problem.a2a_size for rank, start, stop, _ in fragments for row in range(start, stop)}


@settings(max_examples=examples(60), deadline=None)
@given(problems(cp_sizes=(2, 3, 4), most=2))
def test_ring_members_see_what_loops_see(problem: Problem) -> None:
    members = RingMembers(problem.workload)
    of_q, of_k, pairs = owners(problem, "q"), owners(problem, "kv"), list(visible_pairs(problem))
    everybody = np.arange(members.count)
    for member in everybody.tolist():
        for other, some in enumerate(members.sees(member, everybody)):
            wanted = {pair for pair in pairs if of_q[pair[1]] == member and of_k[pair[2]] == other}
            assert wanted == {pair for pair in pairs if in_rectangles(pair, list(some.rows()))}
        for other, some in enumerate(members.seen(member, everybody)):
            wanted = {pair for pair in pairs if of_k[pair[2]] == member and of_q[pair[1]] == other}
            assert wanted == {pair for pair in pairs if in_rectangles(pair, list(some.rows()))}


def in_rectangles(pair: Pair, rectangles: list[tuple[int, ...]]) -> bool:
    area, q, k = pair
    return any(a == area and q0 <= q < q1 and k0 <= k < k1 for _, a, q0, q1, k0, k1 in rectangles)


@settings(max_examples=examples(60), deadline=None)
@given(problems(cp_sizes=(2, 3, 4), most=2))
def test_rows_that_travel_are_those_from_the_first_to_the_last_that_is_seen(problem: Problem) -> None:
    members = RingMembers(problem.workload)
    of_q, of_k, areas = owners(problem, "q"), owners(problem, "kv"), list(problem.workload.areas.rows())
    for owner in range(members.count):
        visitors = [(owner + 1 + n) % members.count for n in range(members.count - 1)]
        bounds = members.key_bounds(np.array(visitors, dtype=np.int64))
        for count in range(1, len(visitors) + 1):
            wanted: set[int] = set()
            for q_start, q_stop, k_start, k_stop, lo, hi in areas:
                rows = [q for q in range(q_start, q_stop) if of_q[q] in visitors[:count]]
                first, stop = min(rows, default=0) + lo, max(rows, default=0) + hi + 1
                span = range(max(k_start, first), min(k_stop, stop)) if rows else range(0)
                wanted |= {k for k in span if of_k[k] == owner}
            found = zip(*members.rows_seen(owner, bounds, count), strict=True)
            assert wanted == {k for start, stop in found for k in range(start, stop)}
