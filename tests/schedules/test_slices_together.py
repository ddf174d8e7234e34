"""`unshard` and `roll`: what one rank alone does differently raises on all, before anything travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_ref import SimGroup

CALLS: dict[str, Callable[..., Any]] = {
    "unshard": lambda x, **how: cp_fast.unshard(x, **how),
    "roll": lambda x, **how: cp_fast.roll(x, -1, **how),
}
PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("call", CALLS)
def test_requires_grad_on_one_rank(package: str, call: str) -> None:
    def one(member: Any) -> str:
        x = torch.zeros(1, 4, requires_grad=member.rank == 1)
        with pytest.raises(ValueError, match="the ranks have different problems") as caught:
            CALLS[call](x, cp=PACKAGES[package].ContextParallel(member))
        return str(caught.value)

    for said in SimGroup(2).run(one):
        assert "requires_grad=True" in said
        assert "requires_grad=False" in said


@pytest.mark.parametrize("call", CALLS)
def test_requires_grad_where_nothing_is_recorded(call: str) -> None:
    def one(member: Any) -> torch.Tensor:
        with torch.no_grad():
            return CALLS[call](torch.ones(1, 4, requires_grad=member.rank == 1), cp=cp_fast.ContextParallel(member))

    assert all(found.shape[0] == 1 for found in SimGroup(2).run(one))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_keyword_on_one_rank(package: str, call: str) -> None:
    def one(member: Any) -> str:
        odd = {"sequence_length": 8} if member.rank == 1 else {}
        with pytest.raises((TypeError, ValueError)) as caught:
            CALLS[call](torch.zeros(1, 4), cp=PACKAGES[package].ContextParallel(member), **odd)
        return str(caught.value)

    other, own = SimGroup(2).run(one)
    assert own == f"{call}() got an unexpected keyword argument 'sequence_length'"
    assert other == f"rank 1 refused its arguments, so rank 0 does not start: TypeError: {own}"


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("call", CALLS)
def test_a_length_that_slices_do_not_tell_is_asked_for(call: str, layout: Any, qkv_format: str) -> None:
    """13 tokens on 4 ranks are cut as 16, and a slice of 4 rows may be of either."""

    def one(member: Any) -> None:
        cp: Any = cp_fast.ContextParallel(member, layout=layout)
        x = torch.arange(1.0, 14).view((1, 13) if qkv_format == "bshd" else (13, 1))
        where: dict[str, Any] = {"cp": cp, "qkv_format": qkv_format}
        CALLS[call](torch.zeros(4, 4), **where)  # nothing was cut yet
        part = cp_fast.shard(x, **where)
        with pytest.raises(ValueError, match=r"seqlen is None, and cp has cut a sequence of 13 into slices of 4 rows;"):
            CALLS[call](part, **where)
        found = CALLS[call](part, **where, seqlen=13)
        if call == "unshard":
            assert torch.equal(found, x)
        padded = CALLS[call](part, **where, seqlen=16)
        assert padded.numel() == (16 if call == "unshard" else 4)

    SimGroup(4).run(one)
