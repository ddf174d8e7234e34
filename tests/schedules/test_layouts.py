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
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import LAYOUTS
from tests.marks import examples
from tests.spec.problems import small_problems

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(60), deadline=None)
@given(small_problems(), st.integers(0, 3), st.booleans())
@pytest.mark.one_in(2)
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


SIDES = {"cp_ref": cp_ref, "cp_fast": cp_fast}
SIZES = {"heads_q": 12, "heads_kv": 12, "d_qk": 4, "d_v": 4, "dtype": torch.float64, "device": "cpu"}


def moved(x: torch.Tensor, shifts: int, fill: float) -> torch.Tensor:
    """One sequence [s, ...], shifted."""
    rows = torch.arange(len(x)) - shifts
    there = (rows >= 0) & (rows < len(x))
    result = torch.full_like(x, fill)
    result[there] = x[rows[there]]
    return result


@pytest.mark.parametrize("package", SIDES)
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_roll(package: str, data: st.DataObject) -> None:
    played = SIDES[package]
    comm = data.draw(st.sampled_from(["p2p", "a2a", "a2a+p2p"]))
    cp_size = data.draw(st.sampled_from([4] if comm == "a2a+p2p" else [1, 2, 3, 4]))
    layout, shifts = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.integers(-5, 5))
    qkv_format = data.draw(st.sampled_from(["thd", "bshd", "sbhd"]))
    by_plan = layout == "balanced" or data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    cu = torch.tensor([0, *accumulate(lengths)])
    if qkv_format == "thd":
        x = torch.arange(1.0, 1 + 2 * sum(lengths)).double().view(-1, 2)
        want = torch.cat([moved(part, shifts, 0) for part in x.split(lengths)])
        planned: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": cu}
        given_lengths: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_padded": cu}
    else:
        batch, seqlen = len(lengths), max(1, *lengths)
        x = torch.arange(1.0, 1 + 2 * batch * seqlen).double().view(batch, seqlen, 2)
        want = torch.stack([moved(part, shifts, 0) for part in x])
        if qkv_format == "sbhd":
            x, want = x.transpose(0, 1).contiguous(), want.transpose(0, 1).contiguous()
        planned = {"qkv_format": qkv_format, "batch_size": batch, "seqlen_q": seqlen, "cu_seqlens_q": cu}
        planned["attn_mask_type"] = "padding_causal"
        given_lengths = {"qkv_format": qkv_format}

    def one_rank(member: SimMember) -> torch.Tensor:
        cp = played.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm, layout=layout)
        how: dict[str, Any] = {"plan": played.make_plan(cp=cp, **planned, **SIZES)} if by_plan else given_lengths
        size = {} if by_plan or qkv_format == "thd" else {"seqlen": x.shape[1 if qkv_format == "bshd" else 0]}
        mine = played.shard(x, cp=cp, **how).requires_grad_()
        rolled = played.roll(mine, shifts, cp=cp, **how, **size)
        assert torch.equal(rolled, played.shard(want, cp=cp, **how))
        (grad,) = torch.autograd.grad(rolled, mine, rolled.detach())
        labels = played.roll(mine.detach().long(), shifts, cp=cp, **how, **size, fill_value=-100)
        there = played.unshard(labels, cp=cp, **how, **size)
        assert torch.equal(there, torch.where(want == 0, -100, want).long())
        return played.unshard(grad, cp=cp, **how, **size)

    returned = torch.where(torch.isin(x, want), x, 0.0)  # what was moved somewhere comes back, the rest has no gradient
    for grad in SimGroup(cp_size).run(one_rank):
        assert torch.equal(grad, returned)


@pytest.mark.parametrize("package", SIDES)
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"shifts": 1.0}, "shifts is 1.0; it must be an integer"),
        ({"shifts": -2}, "the ranks have different problems.*roll"),
        ({"fill_value": "pad"}, "fill_value is 'pad'; it must be a number"),
        ({"fill_value": 0.5}, "fill_value is 0.5, but x has dtype torch.int64"),
        ({"seqlen": 9}, "x has 4 rows"),
    ],
)
def test_a_wrong_argument_on_one_rank_raises_on_all(odd: dict[str, Any], words: str, package: str) -> None:
    def one_rank(member: SimMember) -> None:
        cp = SIDES[package].ContextParallel(member)
        arguments = {"shifts": -1} | (odd if member.rank else {})
        with pytest.raises((ValueError, TypeError), match=words):
            SIDES[package].roll(torch.zeros(2, 4, dtype=torch.int64), cp=cp, **arguments)

    SimGroup(2).run(one_rank)
