"""Areas through whole schedules: proved on integers, and computed by both packages against the oracle in float64."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
import cp_ref
from benchmarks import masks
from conformance.case import Case
from conformance.checks.values import check_logic
from conformance.problems.strategies import areas as drawn_areas
from conformance.tensors import seen
from cp_ref import SimGroup, dense_attention
from cp_ref.schedules.areas import WindowRow, areas_of_windows, common_pair
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.verify.proof import verify
from tests.marks import examples
from tests.spec.problems import problems_of_areas

NUMBER = int(os.environ.get("CP_AREAS", "100"))


@settings(max_examples=examples(2 * NUMBER))
@given(problems_of_areas((1, 2, 3, 4, 6, 8)))
def test_schedules_compute_every_pair_once(problem: Problem) -> None:
    assert Problem.parse(str(problem)) == problem
    areas = problem.workload.areas
    shown = {
        (i, j)
        for q0, q1, k0, k1, lo, hi in areas.rows()
        for i in range(q0, q1)
        for j in range(k0, k1)
        if lo <= j - i <= hi
    }
    assert shown == {(i, j) for i, keys in seen(problem) for j in keys}
    assert problem.pairs == areas.pairs.sum() == len(shown)
    verify(problem, make_schedule(problem))


@pytest.mark.parametrize("package", [cp_ref, cp_fast])
@settings(max_examples=examples(NUMBER))
@given(problems_of_areas(), st.booleans(), st.integers(0, 1))
def test_both_packages_meet_the_oracle(package: object, problem: Problem, use_plan: bool, tail: int) -> None:
    tail *= problem.cp_size
    case = Case(problem, tail, tail, use_plan=use_plan, return_lse=True, return_max_logit=True, loss="out+lse")
    assert check_logic(package, case) == []  # type: ignore[arg-type]


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
        for some in ([*GOOD, [8 + member.rank, 16, 8, 16, -1, -1]], GOOD if member.rank else [[0, 8, 0, 99, -1, 0]]):
            arguments = {**LENGTHS, **SIZES, "qkv_format": "thd", "areas": torch.tensor(some)}
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


def shared(areas: list[WindowRow]) -> set[tuple[int, int, int, int]]:
    """Every (area, area, query, key) that two areas have, by the definition."""
    sets = [{(i, j) for i in range(a[0], a[1]) for j in range(a[2], a[3]) if _sees(a, i, j)} for a in areas]
    return {(n, m, *pair) for m in range(len(sets)) for n in range(m) for pair in sets[n] & sets[m]}


def _sees(area: WindowRow, i: int, j: int) -> bool:
    aligned = i + area[3] - area[1]
    return (area[4] < 0 or j >= aligned - area[4]) and (area[5] < 0 or j <= aligned + area[5])


ROWS = st.lists(st.integers(0, 9), min_size=2, max_size=2, unique=True).map(sorted)


@given(
    drawn_areas((Sequence(9, 9, 9, 9),)),
    st.lists(st.tuples(ROWS, ROWS, st.integers(-1, 4), st.integers(-1, 4)), max_size=2),
)
def test_overlaps_are_found_exactly(disjoint: tuple[WindowRow, ...], more: list[Any]) -> None:
    rows = [*disjoint, *((*q, *k, left, right) for q, k, left, right in more)]
    rows = [row for row in rows if areas_of_windows((row,)).pairs[0]]
    found, expected = common_pair(areas_of_windows(tuple(rows))), shared(rows)
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
        areas = areas_of_windows(tuple(map(tuple, np.stack(columns, axis=1).tolist())))  # type: ignore[arg-type]
        began = time.process_time()
        assert common_pair(areas) is None, name
        assert time.process_time() - began < 1, name


TIMED = 128


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    with patch.multiple(masks, PROMPT=16, ANSWER=8, BLOCK=8, FIRST=4, WINDOW=16):
        yield
    dist.destroy_process_group()


def test_written_out_is_the_oracle(alone: None) -> None:
    job = masks.Job(1, TIMED, tuple(masks.MASKS), (), (), 1, 1, 0.0, heads_q=4, heads_kv=2, dim=8)
    generator = torch.Generator().manual_seed(0)
    heads = {"q": 4, "k": 2, "v": 2, "dout": 4}
    x = {name: torch.randn(TIMED, n, 8, generator=generator) for name, n in heads.items()}
    for name, (maker, _) in masks.MASKS.items():
        q, k, v = (x[n].double().requires_grad_() for n in "qkv")
        cu = torch.tensor([0, TIMED], dtype=torch.int32)
        out, _, _ = dense_attention(q, k, v, qkv_format="thd", areas=maker(TIMED), cu_seqlens_q=cu)
        expected = [out.detach(), *torch.autograd.grad(out, (q, k, v), x["dout"].double())]
        assert masks.worst_error(expected, masks.written_out(job, name, x)) < 1e-5, name
