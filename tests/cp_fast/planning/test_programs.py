"""Every rank's program is what the specification's schedule says, token by token; and many sequences cost little."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from cp_fast.planning.compile import compile_program
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.strategies import problems as conformance_problems
from cp_fast.planning import tiles
from cp_ref.spec import Problem, Sequence, make_schedule
from tests.cp_fast.planning.played import PlayedTile, check_programs
from tests.spec.problems import problems

CPU = torch.device("cpu")
EXAMPLES = int(os.environ.get("CP_PLANS", "1000"))


def played(problem: Problem) -> list[list[PlayedTile]]:
    programs = [compile_program(problem, rank, CPU) for rank in range(problem.cp_size)]
    return check_programs(problem, programs, make_schedule(problem))


@settings(max_examples=EXAMPLES)
@given(st.one_of(problems(cp_sizes=(1, 2, 3, 4, 5, 8)), conformance_problems()))
def test_programs_do_what_the_schedule_says(problem: Problem) -> None:
    played(problem)


@pytest.mark.parametrize("cp_comm_type", ["p2p", "all_gather"])
@pytest.mark.parametrize("chunks", list(product((1, 2, 3), (1, 2, 3))), ids=str)
def test_every_small_window_over_every_small_shape(cp_comm_type: str, chunks: tuple[int, int]) -> None:
    """One key too many between two ranges of keys that become one is rare among random problems."""
    for cp_size, left, right in product((2, 3), (-1, 0, 2, 5), (-1, 0, 1, 2, 4, 6)):
        q, kv = (2 * cp_size * chunk for chunk in chunks)
        for mask in ("no_mask", "causal_bottom_right"):
            played(
                Problem(
                    cp_size, (Sequence(q, kv, q, kv),), cp_comm_type, attn_mask_type=mask, window_size=(left, right)
                )
            )


@settings(max_examples=EXAMPLES // 4)
@given(problems(cp_sizes=(1, 2, 3, 4, 6)), st.data())
def test_a_sequences_tiles_do_not_depend_on_the_others(problem: Problem, data: st.DataObject) -> None:
    """The same tiles with the same windows in the same order, so that its results have the same bits."""
    problem = replace(problem, layout="dual_chunk", qkv_format="thd")
    if not problem.sequences:
        return
    chosen = data.draw(st.integers(0, len(problem.sequences) - 1))
    alone = replace(problem, sequences=(problem.sequences[chosen],))
    for batch, single in zip(played(problem), played(alone), strict=True):
        assert [_moved(t, problem, chosen) for t in batch if _belongs(t, problem, chosen)] == single


def _belongs(tile: PlayedTile, problem: Problem, seq: int) -> bool:
    return problem.starts_q[seq] <= tile.queries[0] < problem.starts_q[seq + 1]


def _moved(tile: PlayedTile, problem: Problem, seq: int) -> PlayedTile:
    q, k = problem.starts_q[seq], problem.starts_kv[seq]
    return tile._replace(queries=tuple(n - q for n in tile.queries), keys=tuple(n - k for n in tile.keys))


@pytest.mark.parametrize(("cp_comm_type", "most"), [("p2p", 3), ("all_gather", 4), ("a2a", 1)])
@pytest.mark.parametrize("window", [-1, 16, 64, 500])
def test_documents_of_any_lengths_share_few_launches(cp_comm_type: str, most: int, window: int) -> None:
    """However many documents there are, and wherever a window cuts each of them."""
    lengths = np.random.default_rng(window + 1).integers(1, 3000, 200).tolist()
    slots = [-(-n // 16) * 16 for n in lengths]
    sequences = tuple(Sequence(n, n, s, s) for n, s in zip(lengths, slots, strict=True))
    size = 8 if cp_comm_type == "a2a" else 1
    problem = Problem(
        8, sequences, cp_comm_type, size, qkv_format="thd", window_size=(window, 0), heads_q=8, heads_kv=8
    )
    if window < 0:
        problem = replace(problem, window_size=(-1, -1))
    for rank in range(8):
        program = compile_program(problem, rank, CPU)
        assert max(len(step.launches) for step in program.forward) <= (most if window > 0 else 2)


@settings(max_examples=EXAMPLES // 4)
@given(problems(cp_sizes=(1, 2, 3, 4, 6)))
def test_large_tiles_with_windows_of_their_own(problem: Problem) -> None:
    """As above, with a limit for "large" that small problems reach."""
    with mock.patch.object(tiles, "LARGE", 3):
        played(problem)


@pytest.mark.parametrize(("chunk", "launches"), [(2048, 1), (1024, 2)])
def test_a_large_tile_that_the_window_cuts_is_one_launch(chunk: int, launches: int) -> None:
    """Unit 1 sees the end of unit 0's chunk through its window: a trapezoid, in one piece or in two."""
    one = Sequence(8 * chunk, 8 * chunk, 8 * chunk, 8 * chunk)
    problem = Problem(4, (one,), qkv_format="thd", window_size=(chunk + chunk // 2, 0))
    assert len(compile_program(problem, 1, CPU).forward[1].launches) == launches


@pytest.mark.parametrize("cp_comm_type", ["p2p", "all_gather", "a2a"])
def test_ten_thousand_sequences_have_the_launches_of_one(cp_comm_type: str) -> None:
    one = Sequence(256, 256, 256, 256)
    size = 16 if cp_comm_type == "a2a" else 1
    single = Problem(16, (one,), cp_comm_type, size, qkv_format="thd", heads_q=16, heads_kv=16)
    many = replace(single, sequences=(one,) * 10_000)
    counts = [[len(step.launches) for step in compile_program(problem, 5, CPU).forward] for problem in (single, many)]
    assert counts[0] == counts[1]
