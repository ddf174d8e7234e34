"""Which results have the bits of one launch: the proof on launches against sets of rows, row by row."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_fast.compile.chosen_schedule import Choices, chosen_rank_schedule
from cp_fast.compile.own_keys import choose_own_first
from cp_fast.compile.packing import Packing
from cp_fast.compile.pipeline import lowered, optimized, upload
from cp_fast.compile.program import Accumulate, Launch, Program, Programs
from cp_fast.compile.same_bits import same_bits
from cp_ref.schedules.areas import Areas
from cp_ref.schedules.planners.make_schedule import saved_kinds
from cp_ref.schedules.problem import Problem, Sequence
from tests.cp_fast.compile.brute_force import rows_of
from tests.marks import examples
from tests.spec.problems import problems, problems_of_areas


def programs_of(
    problem: Problem, rank: int, *, deterministic: bool = True, shared_keys_tile: int = 1, key_block: int = 4
) -> Programs[Any]:
    first = choose_own_first(problem, deterministic=deterministic)
    steps = chosen_rank_schedule(problem, rank, Choices(first, (), key_block))
    draft = lowered(Packing(problem), rank, steps, saved_kinds(problem), shared_keys_tile=shared_keys_tile)
    return upload(optimized(draft, writes_rows=shared_keys_tile > 0), torch.device("cpu"))


def seen_by(row: int, areas: Areas) -> list[tuple[list[int], int]]:
    """Of each area that has this row of queries: its keys from the first one of the area to the last one seen, and how
    many of them come before the first one seen.
    """
    found = []
    for q0, q1, k0, k1, lo, hi in areas.rows():
        if q0 <= row < q1:
            found.append((list(range(k0, min(k1, row + hi + 1))), max(row + lo - k0, 0)))
    return found


def segments(program: Program[Any]) -> list[tuple[list[int], list[int]]]:
    """The rows of queries and of keys of every segment."""
    found = []
    for launch in program.of(Launch):
        batch, sides = launch.batch, (rows_of(launch.q_rows), rows_of(launch.kv_rows))
        sizes = [[b - a for a, b in pairwise(cumulative)] for cumulative in (batch.cu_q, batch.cu_kv)]
        for starts in zip(*batch.first_rows, *sizes, strict=True):
            (a, c), (n, m) = starts[:2], starts[2:]
            found.append((sides[0][a : a + n], sides[1][c : c + m]))
    return found


def has_all_keys(program: Program[Any], areas: Areas, key_block: int) -> bool:
    """Whether each row of each segment has all of its keys there, in order, from the first one of its area or a number
    of whole blocks behind it, and belongs to one area.
    """
    for queries, keys in segments(program):
        if keys != list(range(keys[0], keys[0] + len(keys))):
            return False
        for row in queries:
            seen = seen_by(row, areas)
            if len(seen) != 1:
                return False
            (wanted, hidden), missing = seen[0], keys[0] - seen[0][0][0]
            if (
                missing < 0
                or missing % key_block
                or missing > hidden
                or keys[: len(wanted) - missing] != wanted[missing:]
            ):
                return False
    return True


def is_judged(program: Program[Any], areas: Areas) -> bool:
    """Whether consecutive queries of a segment are rows of one area: of others the proof promises nothing."""
    starts = {q0 for q0, *_ in areas.rows()}
    return not any(b == a + 1 and b in starts for queries, _ in segments(program) for a, b in pairwise(queries))


def added_to(program: Program[Any], kind: str) -> list[tuple[int, int, int]]:
    """The buffer, row and head of every sum that a partial result of this kind is accumulated into."""
    found = []
    for one in program.of(Accumulate):
        if program.buffers[one.source.buffer].kind == kind:
            rows = one.target.rows
            numbers = list(range(rows.start, rows.stop)) if isinstance(rows, slice) else torch.as_tensor(rows).tolist()
            found += [(one.target.buffer, row, head) for row in numbers for head in range(*one.target.heads)]
    return found


@settings(max_examples=examples(100))
@given(st.one_of(problems((1, 2, 3, 4)), problems_of_areas((1, 2, 3))), st.booleans(), st.integers(0, 1), st.data())
def test_a_promise_holds_row_by_row(problem: Problem, deterministic: bool, shares: int, data: st.DataObject) -> None:
    rank, block = data.draw(st.integers(0, problem.cp_size - 1)), data.draw(st.sampled_from([1, 2, 3, 8]))
    programs = programs_of(problem, rank, deterministic=deterministic, shared_keys_tile=shares, key_block=block)
    packed = Packing(problem).packed_problem
    areas = packed.workload.areas
    found = same_bits(programs, packed, deterministic=deterministic, key_block=block)
    begins = {0, *accumulate(one.slots_kv for one in packed.sequences)}  # Of sequences, where the whole launch begins.
    from_first_keys = packed.areas is not None or all(k0 in begins for _, _, k0, *_ in areas.rows())
    for program, name in ((programs.forward, "out"), (programs.backward, "dq")):
        if name in found:
            assert from_first_keys
            assert has_all_keys(program, areas, block)
        elif (
            from_first_keys
            and areas.queries.disjoint
            and (name == "out" or (deterministic and "out" in found))
            and is_judged(program, areas)
        ):
            assert not has_all_keys(program, areas, block)
    added = added_to(programs.backward, "dkv")
    assert ("dk" in found) <= ("dq" in found) <= ("out" in found)
    assert ("dk" not in found) or len(added) == len(set(added))


def document(comm: Any, cp_size: int, window: tuple[int, int] = (-1, -1), **how: Any) -> Problem:
    lengths = (Sequence(64, 64, 64, 64), Sequence(32, 32, 32, 32))
    sizes = {"heads_q": 8, "heads_kv": 8, "qkv_format": "thd", "attn_mask_type": "padding_causal"}
    return Problem(cp_size, lengths, comm, cp_size if comm == "a2a" else 1, window_size=window, **(sizes | how))


ROWS, ALL = ("out", "lse"), ("out", "lse", "dq", "dk", "dv")


@pytest.mark.parametrize("layout", ["dual_chunk", "balanced"])
@pytest.mark.parametrize(
    ("comm", "deterministic", "wanted"),
    [("all_gather", False, ROWS), ("all_gather", True, (*ROWS, "dq")), ("a2a", False, ROWS), ("a2a", True, ALL)],
)
def test_what_is_promised(comm: str, deterministic: bool, wanted: tuple[str, ...], layout: str) -> None:
    for cp_size in (2, 4):
        problem = document(comm, cp_size, layout=layout)
        for rank in range(cp_size):
            programs = programs_of(problem, rank, deterministic=deterministic)
            found = same_bits(programs, problem, deterministic=deterministic, key_block=4)
            assert set(wanted) <= set(found)


def test_two_chunks_in_one_segment_have_the_bits() -> None:
    """Without a causal mask in dual_chunk one segment has both chunks of a rank, which see the same keys."""
    problem = document("all_gather", 2, layout="dual_chunk", attn_mask_type="padding")
    programs = programs_of(problem, 0)  # the first chunk of four, and the last
    assert any(queries != list(range(queries[0], queries[-1] + 1)) for queries, _ in segments(programs.forward))
    assert same_bits(programs, problem, deterministic=True, key_block=4) == (*ROWS, "dq")


def test_nothing_is_promised_of_partial_results() -> None:
    problem = document("p2p", 2)
    programs = [programs_of(problem, rank) for rank in range(problem.cp_size)]
    assert () in [same_bits(one, problem, deterministic=True, key_block=4) for one in programs]


def test_gradients_are_promised_only_with_what_they_are_computed_from() -> None:
    """A window on both sides: the rank's forward pass has partial results, and its backward pass has none."""
    problem = document("all_gather", 2, (3, 40), layout="contiguous", attn_mask_type="padding")
    programs, areas = programs_of(problem, 1), problem.workload.areas
    assert not has_all_keys(programs.forward, areas, 4)
    assert has_all_keys(programs.backward, areas, 4)
    assert same_bits(programs, problem, deterministic=True, key_block=4) == ()


def test_keys_of_windows_begin_with_a_block() -> None:
    problem = document("all_gather", 4, window=(5, 0))
    for block, wanted in ((0, ()), (1, (*ROWS, "dq")), (4, (*ROWS, "dq")), (16, (*ROWS, "dq"))):
        programs = [programs_of(problem, rank, key_block=block) for rank in range(problem.cp_size)]
        for one in programs:
            begins = [keys[0] - (64 if keys[0] >= 64 else 0) for _, keys in segments(one.forward)]
            assert any(begins)
            assert not block or not any(begin % block for begin in begins)
        judged = block or 4  # As if nothing were known when the keys were planned.
        assert {same_bits(one, problem, deterministic=True, key_block=judged) for one in programs} == {wanted}


def test_nothing_is_promised_where_nobody_sees_the_first_key() -> None:
    """One launch has a segment with all keys of the sequence, so its blocks begin elsewhere."""
    problem = Problem(
        2,
        (Sequence(8, 32, 8, 32),),
        "all_gather",
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
        window_size=(5, 0),
    )
    for rank in range(2):
        programs = programs_of(problem, rank, key_block=4)
        assert same_bits(programs, problem, deterministic=True, key_block=4) == ()
