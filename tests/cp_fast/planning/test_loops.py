"""The planner's loops: C++ and numpy make the same plans, bit for bit."""

from __future__ import annotations

import gc
import os
from dataclasses import asdict
from itertools import count
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cp_fast.planning.columns import Chunked, Range
from cp_fast.planning.compile import draft_program
from cp_fast.planning.loops import loops, memory
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.strategies import problems as conformance_problems
from cp_fast.kernels import use
from cp_fast.packing import Packing
from cp_fast.planning import tiles
from cp_fast.planning.tables import Tables
from cp_ref.spec import Problem, Sequence, Sequences
from tests.marks import needs_cxx
from tests.spec.problems import problems

EXAMPLES = int(os.environ.get("CP_PLANS", "1000"))


def plan(problem: Problem, rank: int, kernels: str) -> tuple[Any, ...]:
    """All that there is of a plan on the host."""
    with use(kernels):
        draft = draft_program(Packing(problem).packed_problem, rank)
    assert isinstance(draft.tables, Tables)
    keys = {key for step in draft.backward for launch in step.launches for key in (launch.cu_q, launch.cu_kv)}
    lengths = [draft.tables.cumulative(key).tolist() for key in sorted(keys)]
    steps = [asdict(step) for step in (*draft.forward, *draft.backward)]
    table = draft.tables.on_host(pinned=False)
    return steps, draft.sides, draft.real_q_rows, lengths, table.tolist()


def check(problem: Problem, *ranks: int) -> None:
    for rank in ranks or range(problem.cp_size):
        assert plan(problem, rank, "native") == plan(problem, rank, "torch"), (problem, rank)


@needs_cxx
@settings(max_examples=EXAMPLES)
@given(st.one_of(problems(cp_sizes=(1, 2, 3, 4, 5, 8)), conformance_problems()))
def test_any_problem_has_one_plan(problem: Problem) -> None:
    check(problem)


@needs_cxx
@settings(max_examples=EXAMPLES // 4)
@given(problems(cp_sizes=(1, 2, 3, 4)))
def test_nothing_is_read_before_it_is_written(problem: Problem) -> None:
    """Fresh memory that holds something, and never the same."""
    empty: Any = np.empty
    values = count(-1_094_795_586, 7)

    def poisoned(*args: Any, **kwargs: Any) -> np.ndarray:
        found: Any = empty(*args, **kwargs)
        found.fill(next(values) % np.iinfo(found.dtype).max)
        return found

    with mock.patch.object(np, "empty", poisoned), mock.patch.object(memory, "_blocks", []):
        check(problem)


@needs_cxx
@settings(max_examples=EXAMPLES // 4)
@given(problems(cp_sizes=(1, 2, 3, 4)))
def test_large_tiles_too(problem: Problem) -> None:
    """With a limit for "large" that small problems reach."""
    with mock.patch.object(tiles, "LARGE", 3):
        check(problem)


@needs_cxx
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("window", [-1, 64, 4096])
@pytest.mark.parametrize("cp_comm_type", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
def test_many_sequences(layout: str, cp_comm_type: str, window: int, padded: bool) -> None:
    real = np.random.default_rng(7).integers(0, 2048, 700)
    slots = -(-real // 64) * 64
    lengths = (real if padded else slots).tolist()
    size = {"a2a": 32, "a2a+p2p": 8}.get(cp_comm_type, 1)
    problem = Problem(
        32, Sequences(lengths, lengths, slots.tolist(), slots.tolist()), cp_comm_type, size, layout,
        "thd", "padding_causal", (window, -1), heads_q=32, heads_kv=32,
    )  # fmt: skip
    check(problem, 0, 11, 31)


@needs_cxx
@pytest.mark.parametrize("window", [-1, 5000])
@pytest.mark.parametrize("cp_comm_type", ["p2p", "all_gather", "a2a"])
def test_positions_that_need_64_bits(cp_comm_type: str, window: int) -> None:
    sequences = tuple(Sequence(n, n, n, n) for n in (2**30, 8, 2**29))
    size = 2 if cp_comm_type == "a2a" else 1
    problem = Problem(
        2, sequences, cp_comm_type, size, qkv_format="thd", attn_mask_type="padding_causal", window_size=(window, -1),
        heads_q=2, heads_kv=2,
    )  # fmt: skip
    for rank in range(2):
        found = [draft_tables(problem, rank, kernels) for kernels in ("native", "torch")]
        assert found[0] == found[1]


def draft_tables(problem: Problem, rank: int, kernels: str) -> tuple[Any, ...]:
    """A plan without its row numbers, of which there are too many."""
    with use(kernels):
        draft = draft_program(Packing(problem).packed_problem, rank)
    assert isinstance(draft.tables, Tables)
    return [asdict(step) for step in draft.backward], draft.sides, draft.tables.on_host(pinned=False).tolist()


def test_without_native_kernels_numpy_makes_plans() -> None:
    with use("torch"):
        assert loops().name == "numpy"
    with mock.patch("cp_fast.kernels.select.why_not", lambda name, device: None if name == "torch" else "not here"):
        assert loops().name == "numpy"
        with use("native"), pytest.raises(RuntimeError, match="not here"):
            loops()


@needs_cxx
def test_an_array_that_does_not_fit_is_refused() -> None:
    """A mistake of a planner's must not become one in memory."""
    with use("native"):
        native = loops()
    lengths, numbers = np.arange(4, dtype=np.int32), np.array([0, 1, -1, -1])
    owned = native.owned(Chunked(lengths, lengths, numbers))
    assert native.below(owned, lengths - 1).tolist() == [0, 0, 1, 2]
    message = "another size or dtype"
    for position in (lengths[:3], lengths.astype(np.int64), lengths.astype(np.int16)):
        with pytest.raises(AssertionError, match=message):
            native.below(owned, position)
    with pytest.raises((AssertionError, ValueError)):
        native.below(owned, np.arange(8, dtype=np.int32)[::2])  # not contiguous
    with pytest.raises(AssertionError, match=message):
        native.below(native.owned(Chunked(lengths, lengths[1:], numbers)), lengths)
    with pytest.raises(AssertionError, match=message):
        native.packed((Range(lengths, lengths[:2]),))


def test_a_block_of_memory_is_used_again_when_nobody_has_an_array_of_it() -> None:
    kind = np.dtype(np.int32)
    with mock.patch.object(memory, "_blocks", []):
        first = memory.Memory().array(100, kind)
        second = memory.Memory().array(100, kind)
        assert not np.shares_memory(first, second)
        place, part = first.ctypes.data, first[10:20]
        del first
        assert memory.Memory().array(100, kind).ctypes.data != place  # a part is alive
        del part
        gc.collect()
        one = memory.Memory()
        again = one.array(100, kind)
        assert again.ctypes.data == place
        more = one.array(7, kind)
        assert not np.shares_memory(again, more)
        assert len(one.array(1 << 24, kind)) == 1 << 24  # larger than a block
