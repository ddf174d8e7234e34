"""Every layout, with lengths that do not divide, in both packages against the oracle; and slices there and back."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
import cp_ref
from conformance.case import Case
from conformance.checks.calls import check_plan
from conformance.checks.values import check_logic
from conformance.implementation import Implementation
from conformance.problems.strategies import tables
from conformance.tensors import plan_arguments
from cp_ref import SimGroup
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.simulator import SimMember
from tests.marks import examples
from tests.spec.problems import small_problems

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(60), deadline=None)
@given(small_problems(), st.integers(0, 3), st.booleans())
def test_layouts_by_name(package: str, problem: Problem, tail: int, use_plan: bool) -> None:
    problem = replace(problem, d_qk=3, d_v=2, dtype="float64")
    tail = tail * problem.cp_size if problem.qkv_format == "thd" else 0
    case = Case(problem, tail, tail, return_lse=True, loss="out+lse", use_plan=use_plan)
    implementation = Implementation(PACKAGES[package], package)
    assert check_logic(implementation, case) == []
    assert check_plan(implementation, case) == []


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_tables(package: str, data: st.DataObject) -> None:
    cp_size = data.draw(st.integers(1, 4))
    lengths = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    table = data.draw(tables(lengths, cp_size))
    comm, window = data.draw(st.sampled_from(["p2p", "all_gather", "a2a"])), data.draw(st.sampled_from([-1, 0, 3]))
    mask = data.draw(st.sampled_from(["causal", "no_mask"]))
    against_oracle(PACKAGES[package], cp_size, comm, lengths, table, mask, window)


STRIPES = [("p2p", 1, -1), ("p2p", 3, -1), ("p2p", 1, 20), ("all_gather", 1, -1), ("a2a", 2, -1)]


@pytest.mark.parametrize(("comm", "rows", "window"), STRIPES)
def test_stripes(comm: str, rows: int, window: int) -> None:
    """A few rows to each rank in turn: many fragments, each with other keys, which `cp_fast` makes few segments."""
    lengths = (61, 5, 100)
    table = [
        (start // rows % 3, number, start, min(start + rows, length))
        for number, length in enumerate(lengths)
        for start in range(0, length, rows)
    ]
    against_oracle(cp_fast, 3, comm, lengths, table, "causal", window)


def against_oracle(
    played: Any, cp_size: int, comm: str, lengths: tuple[int, ...], table: Any, mask: str, window: int
) -> None:
    cu = torch.tensor([0, *accumulate(lengths)])
    options = {"qkv_format": "thd", "attn_mask_type": mask, "window_size": (window, -1), "cu_seqlens_q": cu}
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(sum(lengths), cp_size, 4, generator=generator).double() for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = cp_ref.dense_attention(*leaves, **options)[0]
    want = [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def one_rank(member: SimMember) -> list[torch.Tensor]:
        cp = played.ContextParallel(member, comm)
        sizes = {"heads_q": cp_size, "heads_kv": cp_size, "d_qk": 4, "d_v": 4, "dtype": q.dtype, "device": "cpu"}
        made = played.make_plan(cp=cp, **options, **sizes, layout=table)
        mine = [played.shard(x, cp=cp, plan=made).requires_grad_() for x in (q, k, v)]
        assert torch.equal(made.position_ids, played.position_ids(cp=cp, plan=made))
        others = [played.position_ids(cp=cp, plan=made, rank=rank) for rank in range(cp_size)]
        assert torch.equal(others[member.rank], made.position_ids)
        assert torch.equal(played.unshard(mine[0].detach(), cp=cp, plan=made), q)
        local = played.attention(*mine, cp=cp, plan=made)
        grads = torch.autograd.grad(local, mine, played.shard(dout, cp=cp, plan=made))
        return [played.unshard(x, cp=cp, plan=made) for x in (local.detach(), *grads)]

    for results in SimGroup(cp_size).run(one_rank):
        for got, exact in zip(results, want, strict=True):
            torch.testing.assert_close(got, exact, atol=1e-10, rtol=1e-10)


TWO = Problem(2, (Sequence(5, 5, 5, 5), Sequence(4, 4, 4, 4)), qkv_format="thd", dtype="float64")
REFUSED: dict[str, tuple[Any, str]] = {
    "no such rank": ([(2, 0, 0, 5), (0, 1, 0, 4)], "layout has rank 2"),
    "no such sequence": ([(0, 0, 0, 5), (0, 2, 0, 4)], "layout has sequence 2"),
    "past the end": ([(0, 0, 0, 6), (0, 1, 0, 4)], "rows 0 to 6 of sequence 0, which has 5"),
    "empty": ([(0, 0, 0, 5), (0, 1, 2, 2)], "start < stop"),
    "nobody, between": ([(0, 0, 0, 2), (1, 0, 3, 5), (0, 1, 0, 4)], "row 2 of sequence 0 to nobody"),
    "nobody, at the end": ([(0, 0, 0, 5), (1, 1, 0, 3)], "row 3 of sequence 1 to nobody"),
    "two ranks": ([(0, 0, 0, 3), (1, 0, 2, 5), (0, 1, 0, 4)], "row 2 of sequence 0 to two ranks"),
    "three numbers": ([(0, 0, 5)], r"layout\[0\] is \(0, 0, 5\)"),
    "no integer": ([(0, 0, 0, 5.0)], r"layout\[0\]"),
    "no table": (7, "layout is a int"),
    "a name": ("balanced", "a layout's name belongs to the ContextParallel"),
}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", REFUSED)
def test_tables_that_are_refused(name: str, package: str) -> None:
    table, words = REFUSED[name]

    def one_rank(member: SimMember) -> None:
        cp = PACKAGES[package].ContextParallel(member)
        with pytest.raises((ValueError, TypeError), match=words):
            PACKAGES[package].make_plan(cp=cp, **plan_arguments(TWO), layout=table)

    SimGroup(2).run(one_rank)


CROSS = replace(TWO, sequences=(Sequence(5, 7, 5, 7),), layout="balanced")
BATCH = Problem(2, (Sequence(8, 8, 8, 8),), layout="balanced", dtype="float64")


@pytest.mark.parametrize("package", PACKAGES)
def test_what_balanced_refuses(package: str) -> None:
    played = PACKAGES[package]

    def one_rank(member: SimMember) -> None:
        cp = played.ContextParallel(member, layout="balanced")
        with pytest.raises(ValueError, match="layout is 'balanced', which needs keys and queries in the same places"):
            played.make_plan(cp=cp, **plan_arguments(CROSS))
        with pytest.raises(ValueError, match="in 'bshd' needs a padding mask, but attn_mask_type is 'causal'"):
            played.make_plan(cp=cp, **plan_arguments(BATCH))
        for call in (
            lambda: played.shard(torch.zeros(1, 8), cp=cp),
            lambda: played.unshard(torch.zeros(1, 4), cp=cp),
            lambda: played.position_ids(cp=cp, seqlen=8),
            lambda: played.thd.get_batch_on_this_cp_rank({"tokens": torch.zeros(1, 8)}, cp=cp),
        ):
            with pytest.raises(ValueError, match=r"layout 'balanced' is known to a plan alone; give plan=make_plan"):
                call()

    SimGroup(2).run(one_rank)


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_plans_of_balanced_are_updated_in_place(comm: str) -> None:
    """Each next batch is right, or refused because the first one's messages and launches have no room for it."""
    most, width = 60, 3

    def one_rank(member: SimMember) -> int:
        cp = cp_fast.ContextParallel(member, comm, layout="balanced")  # type: ignore[arg-type]
        sizes: dict[str, Any] = {"heads_q": 3, "heads_kv": 3, "d_qk": width, "d_v": width}
        options: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, most])}
        room: dict[str, Any] = {"max_sequences": 8, "max_tokens_q": most}
        made = cp_fast.make_plan(cp=cp, **options, **sizes, dtype=torch.float64, device="cpu", **room)
        right = 0
        for lengths in ([most], [40, 20], [8] * 7, [1, 50, 3], [0, 7, 0], [2]):
            cu = torch.tensor([0, *accumulate(lengths)])
            generator = torch.Generator().manual_seed(len(lengths))
            q, k, v = (torch.randn(sum(lengths), 3, width, generator=generator).double() for _ in range(3))
            try:
                made.update(cp=cp, cu_seqlens_q=cu)
            except ValueError:
                continue
            padded = [torch.cat([x, x.new_zeros(most - len(x), 3, width)]) for x in (q, k, v)]
            out = cp_fast.attention(*(cp_fast.shard(x, cp=cp, plan=made) for x in padded), cp=cp, plan=made)
            whole = cp_fast.unshard(out, cp=cp, plan=made)[: sum(lengths)]
            want = cp_ref.dense_attention(q, k, v, qkv_format="thd", cu_seqlens_q=cu)[0]
            torch.testing.assert_close(whole, want, atol=1e-10, rtol=1e-10)
            right += 1
        return right

    counts = SimGroup(3).run(one_rank)
    assert len(set(counts)) == 1
    assert counts[0] >= 2
