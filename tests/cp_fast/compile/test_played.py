"""Whole programs: every visible pair is computed once, and ends at the owners of its query and its key. Every
launch knows the positions of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cp_fast.compile.chosen_schedule import Choices, chosen_rank_schedule
from cp_fast.compile.in_place import Shape, fit
from cp_fast.compile.lower import Draft, lower
from cp_fast.compile.own_keys import choose_own_first
from cp_fast.compile.packing import Packing, fold_batch
from cp_fast.compile.pipeline import linked, lowered, optimized, upload
from cp_fast.compile.program import Launch, Programs
from cp_fast.movers.mover_protocol import Rows
from cp_fast.passes import PASSES, is_on, skipped, switched_off
from cp_fast.runtime.row_positions import RowPositions
from cp_fast.tiles.segments import WindowRule
from cp_ref.problems.read_problem import check_one_document
from cp_ref.problems.room import Room
from cp_ref.schedules.planners.make_schedule import make_rank_schedule, saved_kinds
from cp_ref.schedules.problem import Problem, Sequence, Workload, slice_rows
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.proof import verify_tables
from tests.cp_fast.compile.brute_force import rows_of
from tests.cp_fast.compile.played import play
from tests.marks import examples
from tests.spec.problems import SCHEDULES, problems, problems_of_areas, small_problems
from tests.spec.random_schedules import random_schedules, random_workloads

CPU = torch.device("cpu")
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


NAMES = [one.name for one in PASSES]
OFF = st.one_of(st.sets(st.sampled_from(NAMES)), st.just(set(NAMES)))


def uploaded(draft: Draft, *, writes_rows: bool = False) -> Programs[Rows]:
    return upload(optimized(draft, writes_rows=writes_rows), CPU)


def check(problem: Problem, *, fits: bool = True) -> None:
    """A problem's own schedule; and, updated in place, the same in its own shape."""
    packing = Packing(problem, may_fold=is_on("fold_batch"))
    work, sink = packing.packed_problem.workload, problem.softmax_type != "vanilla"

    def drafted(first: tuple[str, ...], **how: Any) -> list[Draft]:
        ranks = range(problem.cp_size)
        steps = [chosen_rank_schedule(problem, rank, Choices(first)) for rank in ranks]
        return [lowered(packing, rank, steps[rank], saved_kinds(problem), **how) for rank in ranks]

    uploads = [uploaded(draft) for draft in drafted(())]
    sharing = [uploaded(draft, writes_rows=True) for draft in drafted((), shared_keys_tile=1)]
    drafts = drafted(choose_own_first(problem, in_place=True))
    for some in (uploads, sharing, [uploaded(draft) for draft in drafts]):
        play(work, some, sizes_of(packing.packed_problem), sink=sink)
    for programs in (*uploads, *sharing) if has_positions(problem) else ():
        check_positions(programs, packing.packed_problem)
    if problem.qkv_format == "thd" and fits:
        unit = 2 * problem.cp_size
        most_q, most_kv = (-(-total // unit) * unit + unit for total in (problem.starts_q[-1], problem.starts_kv[-1]))
        room = Room(len(problem.sequences) + 1, most_q, most_kv, problem.cp_size)
        fitted: list[Programs[Rows]] = []
        for rank, draft in enumerate(drafts):
            shape = Shape(optimized(draft, in_place=True).programs, draft.tables, problem, rank, room)
            programs, tables = fit(draft, problem, shape)
            fitted.append(linked(programs, tables.on_device(tables.on_host(pinned=False))))
        play(work, fitted, (room.rows_q, room.rows_kv), sink=sink)
        for programs in fitted:
            check_positions(programs, problem)


def has_positions(problem: Problem) -> bool:
    """Whether the pairs of each area lie in one document."""
    try:
        check_one_document(problem, "score_mod")
    except ValueError:
        return False
    return True


def check_positions(programs: Programs[Rows], problem: Problem) -> None:
    """Each launch knows the sequences and positions of its rows, which `play` has compared with the rows it reads."""
    tables = RowPositions(programs, problem, CPU)
    for launch in (*programs.forward.of(Launch), *programs.backward.of(Launch)):
        found = tables.of(launch)
        of_queries = [position_of(row, problem.starts_q) for row in rows_of(launch.q_rows)]
        of_keys = [position_of(row, problem.starts_kv) for row in rows_of(launch.kv_rows)]
        shifts = [s.len_kv - s.len_q for s in problem.sequences]
        wanted = [
            [sequence for sequence, _ in of_queries],
            [position for _, position in of_queries],
            [position + shifts[sequence] for sequence, position in of_queries],
            [position for _, position in of_keys],
        ]
        if programs.spare_rows:  # then the tables have zeros behind the rows
            sizes = launch.batch.max_q, launch.batch.max_q, launch.batch.max_q, launch.batch.max_kv
            wanted = [some + [0] * (size - len(some)) for some, size in zip(wanted, sizes, strict=True)]
        assert [table.tolist() for table in found[:4]] == wanted
        if programs.spare_rows or launch.batch.starts is not None:
            assert found.segment_places is None
        else:
            places = segments_of(wanted, list(launch.batch.cu_q), list(launch.batch.cu_kv))
            assert (None if found.segment_places is None else found.segment_places.T.tolist()) == places
            assert found.aligned == (places is not None and not any(x % 16 for _, *some in places for x in some))


def segments_of(tables: list[list[int]], cu_q: list[int], cu_kv: list[int]) -> list[list[int]] | None:
    """The sequence of each segment, its first positions; None unless the positions of each one are consecutive."""
    sequences, *positions = tables
    found: list[list[int]] = []
    for q, q_stop, kv, kv_stop in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:], strict=False):
        spans = [(q, q_stop), (q, q_stop), (kv, kv_stop)]
        for table, (start, stop) in zip(positions, spans, strict=True):
            if table[start:stop] != [*range(table[start], table[start] + stop - start)]:
                return None
        assert len(set(sequences[q:q_stop])) == 1
        found.append([sequences[q], *(table[start] for table, (start, _) in zip(positions, spans, strict=True))])
    return found


def position_of(row: int, starts: Seq[int]) -> tuple[int, int]:
    """The sequence of a global row, and its position there."""
    sequence = max(n for n, start in enumerate(starts[:-1]) if start <= row)
    return sequence, row - starts[sequence]


def sizes_of(problem: Problem) -> tuple[int, int]:
    batch = 1 if problem.qkv_format == "thd" else len(problem.sequences)
    return slice_rows(problem, "q") * batch, slice_rows(problem, "kv") * batch


SINKS = st.sampled_from(["vanilla", "vanilla", "learnable"])


@settings(max_examples=examples(100), suppress_health_check=SLOW)
@given(problems((1, 2, 3, 4)), st.sampled_from([(-1, -1), (0, 0), (2, 0), (3, 1), (-1, 1)]), SINKS, OFF)
def test_problems(problem: Problem, window: tuple[int, int], softmax_type: str, off: set[str]) -> None:
    with switched_off(*off):
        check(replace(problem, window_size=window, softmax_type=softmax_type))


@settings(max_examples=examples(100), suppress_health_check=SLOW)
@given(problems_of_areas((1, 2, 3)), OFF)
def test_areas(problem: Problem, off: set[str]) -> None:
    """A launch may have rows of several documents, a segment of one."""
    with switched_off(*off):
        check(problem, fits=False)


def random_programs(
    work: Workload, schedule: Schedule, rule: WindowRule, *, sink: bool = False
) -> list[Programs[Rows]]:
    steps = zip(schedule.forward, schedule.backward, strict=True)
    how: dict[str, Any] = {"sink": sink, "skipped": skipped()}
    return [uploaded(lower(work, rank, *both, schedule.saved, rule, **how)) for rank, both in enumerate(steps)]


@settings(max_examples=examples(150), suppress_health_check=SLOW)
@given(st.data(), st.sampled_from([0, 3, 2048]), st.booleans(), OFF)
def test_random_schedules(data: st.DataObject, large: int, sink: bool, off: set[str]) -> None:
    """Of problems, and of tables that no problem has."""
    own = (-1, -1)
    if data.draw(st.booleans()):
        problem = data.draw(small_problems())
        work = problem.workload
        own = problem.window_size[0], 0 if problem.causal else problem.window_size[1]
    else:
        work = data.draw(random_workloads())
    schedule = data.draw(random_schedules(work))
    with switched_off(*off):
        play(work, random_programs(work, schedule, WindowRule(own, large), sink=sink), sink=sink)


SAME = tuple(Sequence(n, n, n, n) for n in (16, 8))


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["cp_comm_type"])
@pytest.mark.one_in(3)
def test_documents(schedule: dict[str, Any], layout: str, mask: str) -> None:
    check(Problem(4, SAME, **schedule, qkv_format="thd", layout=layout, attn_mask_type=mask, heads_q=8, heads_kv=2))


@settings(max_examples=examples(100))
@given(problems((1, 2, 3, 4)), st.sampled_from([(-1, -1), (2, 0), (3, 1)]))
def test_folded_batches(problem: Problem, window: tuple[int, int]) -> None:
    """The folded steps of all ranks are a schedule of the packed problem: one sequence of many heads."""
    mask = problem.attn_mask_type.replace("padding_", "").replace("padding", "no_mask")
    first = problem.sequences[0] if problem.sequences else Sequence(8, 8, 24, 24)
    slots = -(-max(first.slots_q, 1) // 24) * 24, -(-max(first.slots_kv, 1) // 24) * 24
    sequences = (Sequence(*slots, *slots),) * max(1, len(problem.sequences))
    comm = "all_gather" if problem.cp_comm_type == "all_gather" else "p2p"
    options = {"cp_comm_type": comm, "a2a_size": 1, "qkv_format": "sbhd", "attn_mask_type": mask}
    options["layout"] = "contiguous" if problem.layout == "contiguous" else "dual_chunk"
    problem = replace(problem, sequences=sequences, window_size=window, **options)
    packing = Packing(problem)
    assert packing.folded
    packed = packing.packed_problem
    rank_schedules = [fold_batch(make_rank_schedule(problem, rank), problem) for rank in range(problem.cp_size)]
    forward, backward = zip(*rank_schedules, strict=True)
    heads = packed.heads_q, packed.heads_kv
    assert heads == (problem.heads_q * len(sequences), problem.heads_kv * len(sequences))
    verify_tables(packed.workload, Schedule("folded", heads, forward, backward, saved_kinds(problem)))


def test_shared_keys_of_several_sequences() -> None:
    """A window over sequences of other lengths of q and k: launches read keys of all of them as one span."""
    lengths = (4, 16), (12, 4), (20, 28)
    sequences = tuple(Sequence(q, kv, q, kv) for q, kv in lengths)
    mask = "padding_causal_bottom_right"
    check(Problem(2, sequences, qkv_format="thd", layout="contiguous", attn_mask_type=mask, window_size=(3, 0)))
