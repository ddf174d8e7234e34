"""`unshard` and `roll`: what one rank alone does differently raises on all, before anything travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_fast.integrations.flash_attn import flash_attn_func
from cp_fast.integrations.sdpa import scaled_dot_product_attention
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


LOOKS_AT_THE_END: dict[str, tuple[int, int, dict[str, Any]]] = {
    "no mask": (13, 13, {"attn_mask_type": "no_mask"}),
    "two-sided window": (13, 13, {"attn_mask_type": "no_mask", "window_size": (3, 2)}),
    "cross attention": (16, 13, {"attn_mask_type": "no_mask"}),
    "causal, fewer keys": (16, 7, {"attn_mask_type": "causal"}),
    "bottom right": (7, 13, {"attn_mask_type": "causal_bottom_right"}),
    "max_logit": (13, 13, {"return_max_logit": True}),
    "ALiBi of cross attention": (7, 13, {"alibi_slopes": torch.tensor([0.5, 0.25])}),
}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", LOOKS_AT_THE_END)
def test_attention_that_depends_on_the_end_of_slices_needs_a_plan(name: str, package: str) -> None:
    len_q, len_kv, how = LOOKS_AT_THE_END[name]
    cp_lib, generator = PACKAGES[package], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 8, generator=generator).double() for n in (len_q, len_kv, len_kv))
    given = dict(how)
    wants_max = given.pop("return_max_logit", False)
    out, _, max_logit = cp_ref.dense_attention(q, k, v, **given)
    slopes = {name: given.pop(name) for name in ("alibi_slopes",) if name in given}

    def one(member: Any) -> None:
        cp = cp_lib.ContextParallel(member)
        even = [torch.zeros(1, -(-n // 4) * 2, 2, 8).double() for n in (len_q, len_kv, len_kv)]
        cp_lib.attention(*even, cp=cp, **how)  # nothing was cut: these are whole, and their plan is kept
        parts = [cp_lib.shard(x, cp=cp_lib.ContextParallel(member)) for x in (q, k, v)]  # another context of the group
        with pytest.raises(ValueError, match=r"shard has cut a sequence of .* Give plan=make_plan"):
            cp_lib.attention(*parts, cp=cp, **how)
        plan = cp_lib.make_plan(
            cp=cp,
            batch_size=1,
            seqlen_q=len_q,
            seqlen_kv=len_kv,
            heads_q=2,
            heads_kv=2,
            d_qk=8,
            d_v=8,
            dtype=q.dtype,
            device="cpu",
            return_max_logit=wants_max,
            **given,
        )
        results = cp_lib.attention(*parts, cp=cp, plan=plan, return_max_logit=wants_max, **slopes)
        found, *most = results if wants_max else (results,)
        torch.testing.assert_close(cp_lib.unshard(found, cp=cp, seqlen=len_q), out.to(q), atol=1e-10, rtol=0)
        for logit in most:
            torch.testing.assert_close(logit, max_logit.to(logit), atol=1e-10, rtol=0)

    SimGroup(2).run(one)


DROP_INS: dict[str, Callable[..., Any]] = {
    "sdpa": lambda q, k, v, cp: scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), cp=cp),
    "flash_attn_func": lambda q, k, v, cp: flash_attn_func(q, k, v, cp=cp),
}


@pytest.mark.parametrize("name", DROP_INS)
def test_functions_without_a_plan_refuse_slices_whose_end_they_need(name: str) -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        part = cp_fast.shard(torch.zeros(1, 13, 2, 8), cp=cp)
        with pytest.raises(ValueError, match=r"'no_mask' with .* where a function takes no plan: call attention"):
            DROP_INS[name](part, part, part, cp=cp)

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("how", [{}, {"window_size": (3, 0)}, {"alibi_slopes": torch.tensor([0.5, 0.25])}])
def test_causal_attention_needs_no_end_of_slices(how: dict[str, Any], package: str) -> None:
    cp_lib, generator = PACKAGES[package], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 13, 2, 8, generator=generator).double() for _ in range(3))
    want = cp_ref.dense_attention(q, k, v, **how)[0].to(q)

    def one(member: Any) -> torch.Tensor:
        cp = cp_lib.ContextParallel(member)
        out = cp_lib.attention(*(cp_lib.shard(x, cp=cp) for x in (q, k, v)), cp=cp, **how)
        return cp_lib.unshard(out, cp=cp, seqlen=13)

    torch.testing.assert_close(SimGroup(2).run(one)[0], want, atol=1e-10, rtol=0)
