"""`roll` across ranks is a roll inside every sequence: any layout, forward and backward, both packages."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
import cp_ref
from cp_ref import SimGroup
from cp_ref.schedules.words import LAYOUTS
from cp_ref.simulator import SimMember
from tests.marks import examples

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}
SIZES = {"heads_q": 4, "heads_kv": 4, "d_qk": 4, "d_v": 4, "dtype": torch.float64, "device": "cpu"}


def moved(x: torch.Tensor, shifts: int, fill: float) -> torch.Tensor:
    """One sequence [s, ...], shifted."""
    rows = torch.arange(len(x)) - shifts
    there = (rows >= 0) & (rows < len(x))
    result = torch.full_like(x, fill)
    result[there] = x[rows[there]]
    return result


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_roll(package: str, data: st.DataObject) -> None:
    played = PACKAGES[package]
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


@pytest.mark.parametrize("package", PACKAGES)
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
        cp = PACKAGES[package].ContextParallel(member)
        arguments = {"shifts": -1} | (odd if member.rank else {})
        with pytest.raises((ValueError, TypeError), match=words):
            PACKAGES[package].roll(torch.zeros(2, 4, dtype=torch.int64), cp=cp, **arguments)

    SimGroup(2).run(one_rank)
