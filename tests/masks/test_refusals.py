"""What is wrong with attention slices is named, on every rank, by every function that takes them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cp_fast
import cp_ref
from conformance.problems.strategies import areas as drawn_areas
from cp_ref import SimGroup
from cp_ref.schedules.attention_slices import AttentionSliceRow, areas_of_rows, common_pair
from cp_ref.schedules.problem import Sequence

CU = torch.tensor([0, 5, 12])
PADDED = torch.tensor([0, 8, 16])
SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 1, "d_qk": 4, "d_v": 4, "dtype": torch.float64, "device": "cpu"}
LENGTHS: dict[str, Any] = {"cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED}
GOOD = [[0, 8, 0, 8, -1, 0]]


def raised(call: Any, *tensors: torch.Tensor, **arguments: Any) -> Exception:
    with pytest.raises((ValueError, TypeError, cp_ref.Unsupported)) as caught:
        call(*tensors, **arguments)
    return caught.value


@pytest.mark.parametrize("package", [cp_ref, cp_fast])
def test_the_ranks_agree_on_areas(package: Any) -> None:
    def one(member: Any) -> list[str]:
        cp = package.ContextParallel(member)
        found = []
        for areas in ([*GOOD, [8 + member.rank, 16, 8, 16, -1, -1]], GOOD if member.rank else [[0, 8, 0, 99, -1, 0]]):
            arguments = {**LENGTHS, **SIZES, "qkv_format": "thd", "areas": torch.tensor(areas)}
            found.append(str(raised(package.make_plan, cp=cp, **arguments)))
        return found

    (_, refused), (differ, told) = SimGroup(2).run(one)
    expected = "rank 1 has areas[1]=(9, 16, 8, 16, -1, -1) where rank 0 has areas[1]=(8, 16, 8, 16, -1, -1)"
    assert differ == f"the ranks have different problems: {expected}"
    assert refused.startswith("areas[0] is [0, 8, 0, 99, -1, 0]; k_start, k_stop must lie within the 16 rows")
    assert told.startswith(
        "rank 0 refused its arguments, so rank 1 does not start: ValueError: areas[0] is [0, 8, 0, 99"
    )


@pytest.mark.parametrize("package", [cp_ref, cp_fast])
def test_areas_beside_a_plan_and_rows_that_see_nothing(package: Any) -> None:
    areas = torch.tensor([[0, 3, 0, 8, -1, -1]])

    def one(member: Any) -> None:
        cp = package.ContextParallel(member)
        plan = package.make_plan(cp=cp, qkv_format="thd", areas=areas, **LENGTHS, **SIZES)
        q = torch.ones(8, 2, 4, dtype=torch.float64)
        with pytest.raises(ValueError, match="areas is given beside a plan, which has its own"):
            package.attention(q, q[:, :1], q[:, :1], cp=cp, plan=plan, areas=areas)
        out, lse = package.attention(q, q[:, :1], q[:, :1], cp=cp, plan=plan, return_lse=True)
        seen = torch.tensor([True, True] + [False] * 6 if member.rank == 0 else [True] + [False] * 7)
        assert torch.equal(lse[0].isfinite(), seen)
        torch.testing.assert_close(out[:, 0, 0], seen.double())
        assert torch.equal(out[~seen], torch.zeros_like(out[~seen]))

    SimGroup(2).run(one)


def shared(areas: list[AttentionSliceRow]) -> set[tuple[int, int, int, int]]:
    """Every (attention slice, attention slice, query, key) that two attention slices have, by the definition."""
    sets = [{(i, j) for i in range(a[0], a[1]) for j in range(a[2], a[3]) if _sees(a, i, j)} for a in areas]
    return {(n, m, *pair) for m in range(len(sets)) for n in range(m) for pair in sets[n] & sets[m]}


def _sees(area: AttentionSliceRow, i: int, j: int) -> bool:
    aligned = i + area[3] - area[1]
    return (area[4] < 0 or j >= aligned - area[4]) and (area[5] < 0 or j <= aligned + area[5])


ROWS = st.lists(st.integers(0, 9), min_size=2, max_size=2, unique=True).map(sorted)


@given(
    drawn_areas((Sequence(9, 9, 9, 9),)),
    st.lists(st.tuples(ROWS, ROWS, st.integers(-1, 4), st.integers(-1, 4)), max_size=2),
)
def test_overlaps_are_found_exactly(disjoint: tuple[AttentionSliceRow, ...], more: list[Any]) -> None:
    rows = [*disjoint, *((*q, *k, left, right) for q, k, left, right in more)]
    rows = [row for row in rows if areas_of_rows((row,)).pairs[0]]
    found, expected = common_pair(areas_of_rows(tuple(rows))), shared(rows)
    assert (found is None) == (not expected)
    assert found is None or found in expected


def test_overlaps_are_found_quickly() -> None:
    """Of twenty thousand documents, of one prompt with as many answers, and of the diagonals of a matrix."""
    n, m = 20_000, np.arange(20_000)
    start = np.arange(n) * 4
    none, zero = np.full(n, -1), np.zeros(n, dtype=np.int64)
    masks = {
        "documents": [start, start + 4, start, start + 4, none, zero],
        "answers": [start + 4, start + 8, zero, zero + 4, none, none],
        "diagonals": [0 * m, n - m, m, 0 * m + n, 0 * m, 0 * m],
    }
    for name, columns in masks.items():
        areas = areas_of_rows(tuple(map(tuple, np.stack(columns, axis=1).tolist())))  # type: ignore[arg-type]
        began = time.process_time()
        assert common_pair(areas) is None, name
        assert time.process_time() - began < 1, name
