"""Several linear layers on one plan, and the tables of such plans."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
import cp_ref
from cp_fast.kernels.linear.linear_kernels import Maps, apply, compose_in_waves
from cp_fast.layers.linear_plan import LinearTables
from cp_fast.layers.state_tables import ScanTable
from cp_ref import SimGroup
from cp_ref.reference.linear.recurrence import dense_causal_conv1d, dense_linear_attention
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.problem import Problem
from tests.linear.problems import linear_problems
from tests.marks import examples

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}
SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 4, "d_v": 4, "dtype": torch.float64, "device": "cpu"}
TOTAL = 24


def layer(seed: int, rows: int = TOTAL) -> dict[str, torch.Tensor]:
    """Tensors of all tokens: h 1, h_v 2, d_k 3, d_v 2."""
    draw = torch.Generator().manual_seed(seed)

    def some(*last: int) -> torch.Tensor:
        return torch.randn(rows, *last, generator=draw, dtype=torch.float64)

    k = torch.nn.functional.normalize(some(1, 3), dim=-1)
    return {"q": some(1, 3), "k": k, "v": some(2, 2), "g": -some(2).abs(), "beta": some(2).sigmoid()}


def two_layers(package: Any, member: SimMember, call: Callable[..., torch.Tensor]) -> None:
    """A convolution, a linear layer, and another one after it: results and gradients are those of one rank."""
    cp, cu = package.ContextParallel(member), torch.tensor([0, 9, 9, 20])
    plan = package.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, linear=True, **SIZES)
    tensors, weight = layer(1, 20), torch.linspace(-1, 1, 4, dtype=torch.float64).expand(2, 4).clone()
    mine = {name: package.shard(x, cp=cp, plan=plan).requires_grad_() for name, x in tensors.items()}
    factors = weight.clone().requires_grad_()

    def model(v: torch.Tensor) -> torch.Tensor:
        rest = {name: x for name, x in mine.items() if name != "v"}
        mixed = package.causal_conv1d(v.flatten(1)[:, :2], factors, cp=cp, plan=plan, activation="silu")
        once = package.linear_attention(**rest, v=v * mixed[..., None], cp=cp, plan=plan)
        return package.linear_attention(**rest, v=once, cp=cp, plan=plan, kind="gated_delta_rule")

    out = call(model, mine["v"])
    out.square().sum().backward()

    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    whole = weight.clone().requires_grad_()
    rest = {name: x for name, x in leaves.items() if name != "v"}
    lengths: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens": cu}
    mixed = dense_causal_conv1d(leaves["v"].flatten(1)[:, :2], whole, activation="silu", **lengths)
    once, _ = dense_linear_attention(**rest, v=leaves["v"] * mixed[..., None], **lengths)  # type: ignore[arg-type]
    wanted, _ = dense_linear_attention(**rest, v=once, **lengths)  # type: ignore[arg-type]
    wanted.square().sum().backward()
    torch.testing.assert_close(package.unshard(out.detach(), cp=cp, plan=plan), wanted.detach())
    for name, x in mine.items():
        torch.testing.assert_close(package.unshard(_grad(x), cp=cp, plan=plan), _grad(leaves[name]))
    shares = torch.stack(member.all_gather_object(_grad(factors)))
    torch.testing.assert_close(shares.sum(0), _grad(whole))


@pytest.mark.parametrize("package", PACKAGES)
def test_layers_after_each_other(package: str) -> None:
    SimGroup(2).run(lambda member: two_layers(PACKAGES[package], member, lambda model, v: model(v)))


def _grad(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad


def by_table(table: ScanTable, maps: Maps, states: torch.Tensor | None, count: int) -> torch.Tensor:
    """What a launch computes, step by step. A place that no step writes stays NaN."""
    found = maps.b.new_full((count, *maps.b.shape[1:]), torch.nan)
    bounds = table.first.tolist()
    for (low, high), start in zip(pairwise(bounds), table.starts.tolist(), strict=True):
        state = torch.zeros_like(found[:1]) if states is None or start < 0 else states[start : start + 1]
        for slot, place in table.steps[low:high].tolist():
            if place >= 0:
                found[place] = state[0]
            if slot >= 0:
                state = apply(maps.m[slot : slot + 1], state) + maps.b[slot : slot + 1]
    return found


@settings(max_examples=examples(200), deadline=None)
@given(linear_problems(), st.booleans())
def test_the_table_and_the_waves_are_one(problem: Problem, initial: bool) -> None:
    draw = torch.Generator().manual_seed(problem.cp_size)
    for rank in range(problem.cp_size):
        plan = LinearTables(problem, rank, torch.device("cpu"))
        for tables in plan.passes:
            (exchanged,) = tables.messages.rows.values()
            slots = exchanged.gathered.total
            m, b, states = (
                torch.randn(n, 1, 2, 2, generator=draw, dtype=torch.float64)
                for n in (slots, slots, len(problem.sequences))
            )
            given = states if initial else None
            count = len(plan.sequences.packed)
            wanted = compose_in_waves(tables, Maps(m, b), given, count, transposed=False)
            torch.testing.assert_close(by_table(tables.scans, Maps(m, b), given, count), wanted)


@settings(max_examples=examples(100), deadline=None)
@given(linear_problems((1, 2, 4)), st.integers(1, 6), st.integers(0, 3))
def test_a_run_is_read_from_its_first_row_and_the_rows_before_it(problem: Problem, size: int, rank: int) -> None:
    tables = LinearTables(problem, rank % problem.cp_size, torch.device("cpu")).halo(size)
    slots, stops, after = (table.tolist() for table in tables.reads)
    n, row = len(slots), 0
    assert all(0 <= slot <= tables.zeros for table in (slots, after) for some in table for slot in some)
    while row < n:
        stop = stops[row]
        assert row < stop <= n
        assert stops[row:stop] == [stop] * (stop - row)
        held = [*slots[row][: size - 1], *range(row, stop), *after[stop - 1]]  # what a kernel marches through
        for here in range(row, stop):
            assert slots[here] == held[here - row : here - row + size]
            assert after[here] == held[here - row + size :][: size - 1]
        row = stop


@settings(max_examples=examples(100), deadline=None)
@given(linear_problems((1, 2, 4)), st.integers(1, 6), st.integers(0, 3))
def test_the_next_rows_of_a_document_are_those_that_read_a_row(problem: Problem, size: int, rank: int) -> None:
    tables = LinearTables(problem, rank % problem.cp_size, torch.device("cpu")).halo(size)
    slots, n = tables.reads.slots.tolist(), len(tables.reads.slots)
    for row, after in enumerate(tables.reads.after.tolist()):
        for distance, slot in enumerate(after, 1):
            readers = [reader for reader in range(n) if slots[reader][size - 1 - distance] == row]
            assert readers == ([slot] if slot < n else [])
    rows = [*tables.edges.tolist(), *range(n, tables.zeros)]
    for row, readers in zip(rows, tables.edges_read_by.tolist(), strict=True):
        for k, reader in enumerate(readers):
            assert [reader] == ([i for i in range(n) if slots[i][k] == row] or [n])
