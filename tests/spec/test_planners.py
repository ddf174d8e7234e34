"""Every schedule of every problem verifies; four hundred of them here, more with CP_PLANS in the environment."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from conformance.problems.strategies import areas as drawn_areas
from cp_ref import ContextParallel, SimGroup, attention, dense_attention, shard, unshard
from cp_ref.cli import app
from cp_ref.cli.plan import Request
from cp_ref.problems.call_checks import check_apart, overlap
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.areas import UNBOUNDED, Areas, WindowRow, areas_of_windows
from cp_ref.schedules.balanced import balanced, pairs_before
from cp_ref.schedules.ownership import Fragments, contiguous
from cp_ref.schedules.planners.make_schedule import SCHEDULES, Planner, make_rank_schedule, make_schedule
from cp_ref.schedules.planners.visibility import ROW_PAIRS, Visibility
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.problem import Sequence as Lengths
from cp_ref.schedules.schedule import KINDS, Message, RankSchedule, Schedule
from cp_ref.schedules.table import Column
from cp_ref.schedules.verify.costs import report
from cp_ref.schedules.verify.proof import InvalidSchedule, verify
from cp_ref.schedules.words import CPCommType, ScheduleName
from tests.marks import examples
from tests.spec.problems import problems
from tests.spec.random_schedules import plan_bidirectional_rank

__all__ = [
    "chunked_problems",
]


@pytest.mark.thorough
@settings(max_examples=examples(int(os.environ.get("CP_PLANS", "400"))))
@given(problems())
def test_every_schedule_verifies_and_reads_back(problem: Problem) -> None:
    schedule = make_schedule(problem)
    report = verify(problem, schedule)
    assert sum(r.pairs for r in report.ranks) == problem.pairs * problem.heads_q
    assert Schedule.parse(str(schedule)) == schedule
    assert Problem.parse(str(problem)) == problem


@given(problems())
def test_one_ranks_plan_is_its_part_of_the_whole(problem: Problem) -> None:
    schedule = make_schedule(problem)
    for rank in range(problem.cp_size):
        assert make_rank_schedule(problem, rank) == (schedule.forward[rank], schedule.backward[rank])


@st.composite
def chunked_problems(draw: st.DrawFn) -> tuple[Problem, tuple[int, ...]]:
    """Problems in which heads are exchanged, and any cut of the kv heads of a rank."""
    problem = draw(problems((2, 3, 4), ("a2a", "a2a+p2p")).filter(lambda p: p.a2a_size > 1))
    group = draw(st.integers(1, 2))
    head_chunks = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    heads_kv = sum(head_chunks) * problem.a2a_size
    return replace(problem, heads_kv=heads_kv, heads_q=group * heads_kv), head_chunks


FOUR = Problem(2, (Sequence(16, 16, 16, 16),), "a2a", 2, heads_q=16, heads_kv=8)  # kv heads a rank


@settings(max_examples=examples(200))
@given(chunked_problems())
def test_any_head_chunks_verify_and_read_back(drawn: tuple[Problem, tuple[int, ...]]) -> None:
    problem, head_chunks = drawn
    schedule = make_schedule(problem, head_chunks=head_chunks)
    assert Schedule.parse(str(schedule)) == schedule
    for rank in range(problem.cp_size):
        assert make_rank_schedule(problem, rank, head_chunks) == (schedule.forward[rank], schedule.backward[rank])
    groups = problem.cp_size // problem.a2a_size
    steps = groups * len(head_chunks) + 2
    assert {len(rank_schedule) for rank_schedule in schedule.forward} == {steps}
    assert {len(rank_schedule) for rank_schedule in schedule.backward} == {steps + (groups > 1)}
    assert verify(problem, schedule).sent_bytes == report(problem, make_schedule(problem)).sent_bytes


def exposed(rank_schedule: RankSchedule) -> int:
    """Rows times heads that a rank sends in steps without a tile."""

    def size(m: Message) -> int:
        p = m.pieces
        return int(((p.stop - p.start) * (p.head_stop - p.head_start)).sum())

    return sum(size(m) for step in rank_schedule if not len(step.tiles) for m in step.sends)


@pytest.mark.parametrize("groups", [1, 2])
def test_only_the_first_and_the_last_chunk_are_exposed(groups: int) -> None:
    comm = "a2a" if groups == 1 else "a2a+p2p"
    problem = Problem(2 * groups, (Sequence(16, 16, 16, 16),), comm, 2, heads_q=16, heads_kv=8)
    at_once, cut = (make_schedule(problem, head_chunks=chunks) for chunks in ((), (1, 2, 1)))
    assert at_once == make_schedule(problem, head_chunks=(4,))
    for one, other in ((at_once.forward, cut.forward), (at_once.backward, cut.backward)):
        assert [4 * exposed(rank_schedule) for rank_schedule in other] == [
            exposed(rank_schedule) for rank_schedule in one
        ]


SHARED = Problem(4, (Sequence(16, 16, 16, 16),), "a2a", 4, heads_q=16, heads_kv=2)  # two ranks have the same kv head


@pytest.mark.parametrize(
    ("problem", "head_chunks", "needs"),
    [
        (FOUR, (1, 2), "integers from 1 with sum 4"),
        (FOUR, (4, 0), "integers from 1 with sum 4"),
        (FOUR, (2.0, 2), "integers from 1 with sum 4"),
        (SHARED, (1,), "no rank has kv heads of its own to exchange"),
        (Problem(2, (Sequence(4, 4, 4, 4),)), (1,), "no rank has kv heads of its own to exchange"),
    ],
)
def test_other_sizes_are_refused(problem: Problem, head_chunks: Any, needs: str) -> None:
    for plan in (make_schedule, lambda problem, head_chunks: make_rank_schedule(problem, 0, head_chunks)):
        with pytest.raises(ValueError, match=needs):
            plan(problem, head_chunks=head_chunks)


def test_by_default_all_heads_are_exchanged_at_once() -> None:
    assert [len(rank_schedule) for rank_schedule in make_schedule(FOUR).forward] == [3] * 2
    assert [len(rank_schedule) for rank_schedule in make_schedule(SHARED).forward] == [3] * 4


def solve(lengths: list[int], cp_size: int, padding: int = 0, window: int = 2**40) -> tuple[Fragments, Column, Column]:
    """(ownership, what the rows before each row see, where documents begin) under a causal mask."""
    starts = np.append(0, np.cumsum(np.array(lengths, dtype=np.int64) + padding))
    tokens = np.array(lengths, dtype=np.int64)
    rows = [(a, a + n, a, a + n, -window, 0) for a, n in zip(starts[:-1].tolist(), lengths, strict=True)]
    areas = Areas.of_rows(rows)
    return balanced(starts, tokens, areas, cp_size), pairs_before(areas, int(starts[-1])), starts


def work(own: Fragments, before: Column, cp_size: int) -> Column:
    """The pairs that each rank's rows see."""
    seen = np.zeros(cp_size, dtype=np.int64)
    np.add.at(seen, own.rank, before[own.stop] - before[own.start])
    return seen


def check(lengths: list[int], cp_size: int, **more: int) -> float:
    """Every row once, in each rank's buffer one behind the other; rows equal; no worse than equal parts of the buffer.

    Returns the largest rank's pairs over the mean.
    """
    own, before, starts = solve(lengths, cp_size, **more)
    rows = int(starts[-1])
    held = np.concatenate([np.arange(a, b) for _, a, b, _ in own.rows()] or [np.zeros(0, dtype=np.int64)])
    assert np.array_equal(np.sort(held), np.arange(rows))
    count = [int((part.stop - part.start).sum()) for part in map(own.of, range(cp_size))]
    assert max(count) == -(-rows // cp_size)
    for part in map(own.of, range(cp_size)):
        assert np.array_equal(part.row, np.cumsum(part.stop - part.start) - (part.stop - part.start))
        assert (part.start[1:] > part.stop[:-1]).all()  # in the order of the buffer, and what touches is one
    seen = work(own, before, cp_size)
    assert seen.max() <= work(contiguous(starts[[0, -1]], cp_size), before, cp_size).max(initial=0)
    return float(seen.max() * cp_size / max(seen.sum(), 1))


@settings(max_examples=examples(200))
@given(
    st.lists(st.integers(0, 60), max_size=30),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from([2**40, 0, 5]),
)
def test_any_documents(lengths: list[int], cp_size: int, padding: int, window: int) -> None:
    check(lengths, cp_size, padding=padding, window=window)


@given(drawn_areas((Lengths(12, 12, 12, 12), Lengths(9, 9, 10, 10))))
def test_pairs_of_rows(rows: tuple[WindowRow, ...]) -> None:
    areas = areas_of_windows(rows)
    seen = [
        max(0, min(k1, i + hi + 1) - max(k0, i + lo)) if q0 <= i < q1 else 0
        for i in range(22)
        for q0, q1, k0, k1, lo, hi in areas.rows()
    ]
    by_row = np.array(seen, dtype=np.int64).reshape(22, len(areas)).sum(axis=1)
    assert pairs_before(areas, 22).tolist() == [0, *np.cumsum(by_row).tolist()]


@pytest.mark.parametrize("cp_size", [1, 4, 7])
@pytest.mark.parametrize(
    "lengths",
    [[4096], [1] * 300, [4000, *[1] * 20], [1, 2] * 5000, [0, 512, 0, 0, 700, 0], [2, 1], [], [0]],
    ids=["one", "of length 1", "nearly all", "10,000", "empty ones", "fewer than ranks", "none", "nothing"],
)
def test_special_cases(lengths: list[int], cp_size: int) -> None:
    ratio = check(lengths, cp_size)
    assert ratio < 1.03 or sum(lengths) < cp_size * 100


@pytest.mark.parametrize(("median", "sigma"), [(900, 1.1), (1000, 1.5), (10_000, 1.2)])
def test_real_batches_are_balanced(median: int, sigma: float) -> None:
    generator = np.random.default_rng(0)
    for cp_size in (4, 8, 16):
        lengths, room = [], cp_size * 16_384
        while room:
            drawn = int(min(max(1, generator.lognormal(np.log(median), sigma)), 131_072, room))
            lengths.append(drawn)
            room -= drawn
        assert check(lengths, cp_size) <= 1.02


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
        received = sum(m.pieces.total for step in rank_schedule for m in step.recvs)
        owned = [range(rank * 64, rank * 64 + 64), range((2 * cp_size - 1 - rank) * 64, (2 * cp_size - rank) * 64)]
        seen = {k for chunk in owned for q in chunk for k in range(max(0, q - window), q + 1)}
        assert received == len(seen - {k for chunk in owned for k in chunk})


def test_documents_that_fit_on_one_rank_cost_no_message() -> None:
    """contiguous: two documents on two ranks, each at home."""
    problem = Problem(
        2, (Sequence(8, 8, 8, 8),) * 2, qkv_format="thd", layout="contiguous", attn_mask_type="padding_causal"
    )
    assert verify(problem, make_schedule(problem)).sent_bytes == 0


def test_documents_that_stay_at_home_exchange_no_heads() -> None:
    """Each rank has a part of a long document, and short ones."""
    packed: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "heads_q": 8, "heads_kv": 4}
    for comm, ranks, size in (("a2a", 2, 2), ("a2a", 4, 4), ("a2a+p2p", 4, 2)):
        long, short = Sequence(40, 40, 40, 40), Sequence(8, 8, 8, 8)
        parts = tuple((rank, 0, rank * 40 // ranks, (rank + 1) * 40 // ranks) for rank in range(ranks))
        pairs = tuple((n % ranks, n + 1, 0, 8) for n in range(2 * ranks))
        alone = tuple(sorted((rank, n - 1, a, b) for rank, n, a, b in pairs))
        problem = Problem(ranks, (short,) * 2 * ranks, comm, size, alone, **packed)
        assert verify(problem, make_schedule(problem)).sent_bytes == 0
        documents = long, *(short,) * (2 * ranks + 1)
        mixed = tuple(sorted([*parts, *pairs, (0, 2 * ranks + 1, 0, 8)]))
        problem = Problem(ranks, documents, comm, size, mixed, **packed)
        schedule = make_schedule(problem)
        assert [set(rank[0].tiles.area.tolist()) for rank in schedule.forward] == [
            {n + 1 for n in range(2 * ranks + 1) if n % ranks == rank} for rank in range(ranks)
        ]
        exchanged = {m.pieces.total for rank in schedule.forward for m in rank[0].sends if m.kind == "q"}
        assert exchanged == {40 // ranks}
        chunked = make_schedule(problem, head_chunks=(1, 1)) if size == 2 else schedule
        assert verify(problem, chunked).sent_bytes == verify(problem, schedule).sent_bytes > 0
        assert [rank[0].tiles for rank in chunked.forward] == [rank[0].tiles for rank in schedule.forward]


def test_a_document_that_would_be_all_the_work_of_one_rank_is_exchanged() -> None:
    lengths = tuple(Sequence(n, n, n, n) for n in (40_000, 8))
    packed: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "heads_q": 8, "heads_kv": 4}
    problem = Problem(2, lengths, "a2a", 2, ((0, 0, 0, 40_000), (1, 1, 0, 8)), **packed)
    assert not len(Visibility(problem.workload).at_home.areas)


@settings(max_examples=examples(200))
@given(problems())
def test_slices_at_home_share_no_row_with_others_and_save_time(problem: Problem) -> None:
    visibility = Visibility(problem.workload)
    areas, owned = problem.workload.areas, problem.workload.ownership
    numbers = [visibility.at_home.some, visibility.exchanged.some]
    home, others = (set(range(len(areas))) if some is None else set(some.tolist()) for some in numbers)
    assert home | others == set(range(len(areas)))
    assert not home & others
    rows = {side: {n: rank for rank, a, b, _ in owned.side(side).rows() for n in range(a, b)} for side in ("q", "kv")}
    touched: dict[str, dict[bool, set[int]]] = {side: {True: set(), False: set()} for side in rows}
    work = [0] * problem.cp_size
    for area, q, k in visible_pairs(problem):
        touched["q"][area in home].add(q)
        touched["kv"][area in home].add(k)
        if area in home:
            assert rows["q"][q] == rows["kv"][k]
            work[rows["q"][q]] += 1
    assert not any(some[True] & some[False] for some in touched.values())
    left = [sum(row not in touched["q"][True] for row, of in rows["q"].items() if of == n) for n in range(len(work))]
    time = max(work) + (problem.pairs - sum(work)) / problem.cp_size + ROW_PAIRS * max(left)
    unshared = problem.pairs / problem.cp_size + ROW_PAIRS * max(Counter(rows["q"].values()).values(), default=0)
    assert problem.areas is not None or time <= unshared


# What `Visibility` finds, by its definition: loops over areas, rows and keys.

Pair = tuple[int, int, int]  # area, query row, key row


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
    visibility = Visibility(problem.workload)
    of_q, of_k, pairs = owners(problem, "q"), owners(problem, "kv"), list(visible_pairs(problem))
    everybody = np.arange(visibility.member_count)
    for member in everybody.tolist():
        for other, some in enumerate(visibility.sees(member, everybody)):
            wanted = {pair for pair in pairs if of_q[pair[1]] == member and of_k[pair[2]] == other}
            assert wanted == {pair for pair in pairs if in_rectangles(pair, list(some.rows()))}
        for other, some in enumerate(visibility.seen(member, everybody)):
            wanted = {pair for pair in pairs if of_k[pair[2]] == member and of_q[pair[1]] == other}
            assert wanted == {pair for pair in pairs if in_rectangles(pair, list(some.rows()))}


@settings(max_examples=examples(60), deadline=None)
@given(problems(cp_sizes=(2, 3, 4), most=2), st.integers(1, 5))
def test_ring_members_gather_what_their_queries_see(problem: Problem, block: int) -> None:
    """Keys begin with a block of their area. What one gathers from another, the other is asked for."""
    visibility, areas = Visibility(problem.workload, key_block=block), problem.workload.areas
    of_q, of_k, pairs = owners(problem, "q"), owners(problem, "kv"), list(visible_pairs(problem))
    everybody, asked = range(visibility.member_count), set[tuple[int, int, int]]()
    for member in everybody:
        tiles = visibility.whole_tiles(member, (0, 1))
        assert not ((tiles.k_start - areas.k_start[tiles.area]) % block).any()
        seen = [pair for pair in pairs if of_q[pair[1]] == member]
        assert all(in_rectangles(pair, [(0, *row[:5]) for row in tiles.rows()]) for pair in seen)
        theirs, _ = visibility.gathers(member)
        asked |= {(member, peer, key) for peer, _, _, _, k0, k1 in theirs.rows() for key in range(k0, k1)}
        assert {(member, of_k[key], key) for _, _, key in seen if of_k[key] != member} <= asked
    for member in everybody:
        ours = visibility.gathers(member)[1].rows()
        wanted = {(reader, key) for reader, owner, key in asked if owner == member}
        assert {(peer, key) for peer, _, _, _, k0, k1 in ours for key in range(k0, k1)} == wanted


@settings(max_examples=examples(60), deadline=None)
@given(problems(cp_sizes=(2, 3, 4), comms=("all_gather",)))
def test_what_windows_hold_of_a_rank_alone_is_attended_at_once(problem: Problem) -> None:
    """Under a window on the left, the last query that waits for keys sees one of others."""
    schedule, areas, of_k = make_schedule(problem), problem.workload.areas, owners(problem, "kv")
    for rank, steps in enumerate(schedule.forward):
        first, second = (list(step.tiles.rows()) for step in steps)
        assert all(of_k[key] == rank for _, _, _, k0, k1, *_ in first for key in range(k0, k1))
        for area, q0, q1, k0, k1, *_ in second:
            lo, start = int(areas.lo[area]), int(areas.k_start[area])
            if lo > -UNBOUNDED and of_k[k1 - 1] == rank:
                assert any(of_k[key] != rank for key in range(max(start, q1 - 1 + lo), k1)), (rank, q0, q1, k0, k1)


def in_rectangles(pair: Pair, rectangles: list[tuple[int, ...]]) -> bool:
    area, q, k = pair
    return any(a == area and q0 <= q < q1 and k0 <= k < k1 for _, a, q0, q1, k0, k1 in rectangles)


def rings(owner: int, size: int) -> list[range]:
    """The ring members that a block passes and has passed, from every place of the ring."""
    ahead = [range(owner + n, owner + size) for n in range(1, size)]
    return ahead + [range(owner + n, owner, -1) for n in range(1, size)]


@settings(max_examples=examples(60), deadline=None)
@given(problems(cp_sizes=(2, 3, 4), most=2))
def test_rows_that_travel_are_those_from_the_first_to_the_last_that_is_seen(problem: Problem) -> None:
    visibility = Visibility(problem.workload)
    of_q, of_k, areas = owners(problem, "q"), owners(problem, "kv"), list(problem.workload.areas.rows())
    for owner in range(visibility.member_count):
        for some in rings(owner, visibility.member_count):
            readers, wanted = {n % visibility.member_count for n in some}, set[int]()
            for q_start, q_stop, k_start, k_stop, lo, hi in areas:
                rows = [q for q in range(q_start, q_stop) if of_q[q] in readers]
                first, stop = min(rows, default=0) + lo, max(rows, default=0) + hi + 1
                span = range(max(k_start, first), min(k_stop, stop)) if rows else range(0)
                wanted |= {k for k in span if of_k[k] == owner}
            found = zip(*visibility.rows_seen_by(owner, some), strict=True)
            assert wanted == {k for start, stop in found for k in range(start, stop)}


STORAGE = torch.zeros(600, dtype=torch.int16)


def bytes_of(x: torch.Tensor) -> set[int]:
    at = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = (at[:, None] + stride * torch.arange(size)).flatten()
    item = x.element_size()
    return {x.data_ptr() + item * n + k for n in at.tolist() for k in range(item)}


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Any axes, also some of size 0 and stride 0 and such as lie inside each other; of 1, 2 or 4 bytes."""
    x = STORAGE.view(draw(st.sampled_from([torch.int8, torch.int16, torch.float32])))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24, 30])) for _ in shape]
    return x.as_strided(shape, strides, draw(st.integers(0, 20)))


@given(views(), views())
def test_any_two_views(a: torch.Tensor, b: torch.Tensor) -> None:
    assert overlap(a, b) == overlap(b, a) == bool(bytes_of(a) & bytes_of(b))


def test_large_tensors_take_no_time() -> None:
    kv = torch.empty(2**12, 2, 2**10, 2**8, dtype=torch.bfloat16, device="cpu")[:, :, ::2]
    assert not overlap(kv[:, 0], kv[:, 1])
    assert overlap(kv[: 2**11 + 1, 0], kv[2**11 :, 0])


def test_it_is_named() -> None:
    x = torch.zeros(8, 4)
    check_apart("out", x[:4], inp=x[4:], lse=x.to("meta"))
    with pytest.raises(ValueError, match="out and lse overlap in memory; out is changed in place"):
        check_apart("out", x[:4], inp=x[4:], lse=x[3:])


FIFTH = "bidirectional"


@pytest.fixture
def fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, FIFTH, Planner(plan_bidirectional_rank, "Keys travel both ways round the ring."))


def test_signatures_have_the_same_names() -> None:
    assert tuple(SCHEDULES) == get_args(ScheduleName)
    assert (*SCHEDULES, "auto") == get_args(CPCommType)
    assert all(set(planner.saved) < set(KINDS) for planner in SCHEDULES.values())


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(comms=("p2p",)))
def test_a_fifth_schedule_verifies(problem: Problem, fifth: None) -> None:
    problem = replace(problem, cp_comm_type=FIFTH)
    schedule = make_schedule(problem)
    verify(problem, schedule)
    assert schedule.name == FIFTH
    assert Schedule.parse(str(schedule)) == schedule


def test_a_fifth_schedule_has_half_the_steps_of_a_ring(fifth: None) -> None:
    ring = Problem(8, (Sequence(64, 64, 64, 64),))
    for name, forward, backward in (("p2p", 8, 9), (FIFTH, 5, 6)):
        schedule = make_schedule(replace(ring, cp_comm_type=name))
        assert {len(steps) for steps in schedule.forward} == {forward}
        assert {len(steps) for steps in schedule.backward} == {backward}


def test_verify_refuses_a_fifth_schedule_that_is_wrong(fifth: None) -> None:
    problem = Problem(4, (Sequence(32, 32, 32, 32),), FIFTH)
    right = make_schedule(problem)
    forward = tuple((*steps[:-1], steps[-1]._replace(tiles=steps[0].tiles)) for steps in right.forward)
    with pytest.raises(InvalidSchedule):
        verify(problem, replace(right, forward=forward))


def test_attention_takes_a_fifth_schedule(fifth: None) -> None:
    q, k, v, dout = (torch.randn(1, 24, 2, 4, dtype=torch.float64, generator=torch.manual_seed(n)) for n in range(4))

    def rank(member: SimMember) -> list[torch.Tensor]:
        name: Any = FIFTH
        cp = ContextParallel(member, name)
        x = [shard(t, cp=cp).requires_grad_() for t in (q, k, v)]
        out = attention(*x, cp=cp)
        out.backward(shard(dout, cp=cp))
        return [unshard(t, cp=cp) for t in (out, *(t.grad for t in x if t.grad is not None))]

    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    out, _, _ = dense_attention(*whole)
    out.backward(dout)
    for found, wanted in zip(SimGroup(3).run(rank)[1], (out, *(t.grad for t in whole)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_explain_explains_a_fifth_schedule(fifth: None) -> None:
    runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})
    done = runner.invoke(app, ["explain", "--cp-comm-type", FIFTH])
    assert done.exit_code == 0, done.output
    assert re.search("The schedule: bidirectional.*both ways round the ring", done.output, re.DOTALL)


def test_the_option_names_all_schedules() -> None:
    (option,) = signature(Request, eval_str=True).parameters["cp_comm_type"].annotation.__metadata__
    assert option.help == f"The schedule: {', '.join(SCHEDULES)} or auto."


def test_a_name_that_is_no_schedule_is_refused_with_those_that_are(fifth: None) -> None:
    wrong: Any = "ring"
    with pytest.raises(ValueError, match=r"cp_comm_type is 'ring'.*a2a\+p2p.*bidirectional"):
        SimGroup(2).run(lambda member: ContextParallel(member, wrong))
