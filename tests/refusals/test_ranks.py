"""What is wrong on one rank raises on all of them, in both packages, and what there is no derivative of is refused."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import cp_fast
import cp_ref
from cp_ref import SimGroup
from cp_ref.reference.simulator import SimMember
from tests.refusals.test_calls import CU, PACKAGES, SIZES, attend, attend_packed, plan, unshard

COMMS = pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])


def context(package: Any, member: SimMember, comm: Any = "p2p") -> Any:
    return package.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)


def qkv(member: SimMember, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(member.rank)
    return [torch.randn(2, 4, 4, 8, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


@PACKAGES
def test_what_is_no_context_is_named(package: Any) -> None:
    other = cp_ref if package is cp_fast else cp_fast

    def one(member: SimMember) -> None:
        x = torch.zeros(2, 4, 4, 8)
        own = (
            lambda cp: package.attention(x, x, x, cp=cp),
            lambda cp: plan(package, cp),
            lambda cp: package.supports(cp=cp, batch_size=1, seqlen_q=8, **SIZES),
            lambda cp: package.thd.get_batch_on_this_cp_rank({}, cp=cp),
        )
        shared = (  # by both packages, so that they take the other one's context
            lambda cp: package.shard(x, cp=cp),
            lambda cp: package.unshard(x, cp=cp),
            lambda cp: package.roll(x, 1, cp=cp),
            lambda cp: package.position_ids(cp=cp, seqlen=8),
        )
        for cp in (None, member, SimGroup(2), context(other, member)):
            for call in own:
                with pytest.raises(TypeError, match=rf"^cp is .*; it must be a {package.__name__}\.ContextParallel"):
                    call(cp)
        for cp in (None, member, SimGroup(2)):
            for call in shared:
                with pytest.raises(TypeError, match=r"^cp is .*; it must be a ContextParallel, made of a group"):
                    call(cp)

    SimGroup(2).run(one)


@PACKAGES
def test_what_is_not_there_yet_is_named(package: Any) -> None:
    with pytest.raises(TypeError, match=r"^group is None; .* call torch\.distributed\.init_process_group\(\) first$"):
        package.ContextParallel(torch.distributed.group.WORLD)
    with pytest.raises(TypeError, match=rf"^cp is None; it must be a {package.__name__}\.ContextParallel"):
        attend(package, None)


SLICES = [  # call, what is odd, what the error says
    (
        attend_packed,
        {"cu_seqlens_q": 2 * CU},
        "q has 8 tokens; by the global lengths, cu_seqlens_q, which end at 32, rank",
    ),
    (
        attend_packed,
        {"cu_seqlens_q": CU, "cu_seqlens_q_padded": 2 * CU},
        "q has 8 tokens; by the global lengths, cu_seqlens_q_padded, which end at 32, rank",
    ),
    (
        attend,
        dict.fromkeys("qkv", torch.zeros(2, 7, 4, 8)),
        "local sequence length 8: a sequence of 14 is cut as if padded to 16",
    ),
]


@PACKAGES
@pytest.mark.parametrize(("call", "odd", "says"), SLICES)
def test_slices_that_lengths_do_not_give_are_refused(package: Any, call: Any, odd: dict[str, Any], says: str) -> None:
    def one(member: SimMember) -> None:
        with pytest.raises(ValueError, match=re.escape(says)):
            call(package, context(package, member), **odd)

    SimGroup(2).run(one)


@PACKAGES
def test_a_pair_that_is_no_grid_is_refused(package: Any) -> None:
    def one(member: SimMember) -> None:
        cp = package.ContextParallel((member, member), "a2a+p2p")
        with pytest.raises(ValueError, match=r"^group is a pair .* not the rows and columns of one grid"):
            plan(package, cp)

    SimGroup(2).run(one)


@PACKAGES
def test_numpy_numbers_are_numbers(package: Any) -> None:
    def one(member: SimMember) -> str:
        odd: dict[str, Any] = {} if member.rank else {"heads_q": np.int64(4), "seqlen_q": np.int32(8)}
        made = package.make_plan(
            cp=context(package, member),
            window_size=(np.int64(3), 0) if member.rank else [3, 0],
            softmax_scale=np.float32(0.5) if member.rank else 0.5,
            **(SIZES | {"batch_size": 2, "seqlen_q": 8} | odd),
        )
        return str(made.problem)

    texts = SimGroup(2).run(one)
    assert texts[0] == texts[1]
    assert "np." not in texts[0]


@PACKAGES
def test_slices_of_different_lengths_are_not_put_together(package: Any) -> None:
    def one(member: SimMember) -> str:
        lengths = [0, 8, 16] if member.rank else [0, 4, 16]
        with pytest.raises(ValueError, match="different problems") as caught:
            unshard(package, context(package, member), cu_seqlens_padded=torch.tensor(lengths))
        return str(caught.value)

    assert "cu_seqlens_padded=(0, 4, 16) where rank 1 has cu_seqlens_padded=(0, 8, 16)" in SimGroup(2).run(one)[0]


def test_calls_that_would_send_different_messages_are_told_apart() -> None:
    def one(member: SimMember) -> list[str]:
        first = member.rank == 0
        said: list[str] = []
        calls: list[tuple[Any, dict[str, Any]]] = [
            ("p2p", {"return_max_logit": first}),
            ("a2a", {"return_lse": first}),
            ("p2p", {"softmax_type": "learnable", "softmax_offset": torch.zeros(4, requires_grad=first)}),
        ]
        q, k, v = qkv(member)
        for comm, how in calls:
            cp = cp_fast.ContextParallel(member, comm, softmax_offset_grad="total")
            with pytest.raises(ValueError, match="different problems") as caught:
                cp_fast.attention(q, k, v, cp=cp, **how)
            said.append(str(caught.value).partition("rank 0 has ")[2])
        return said

    names = "return_max_logit", "return_lse", "softmax_offset.requires_grad"
    assert SimGroup(2).run(one)[0] == [f"{name}=True where rank 1 has {name}=False" for name in names]


@PACKAGES
@COMMS
@pytest.mark.one_in(3)
def test_the_shares_of_the_sink_s_gradient_add_up_to_the_total(package: Any, comm: str) -> None:
    """And [1, h, 1, 1] is taken, with a gradient of that shape."""

    def one(member: SimMember) -> list[torch.Tensor]:
        group = member.split(2) if comm == "a2a+p2p" else member
        grads = []
        for kind, shape in (("share", [4]), ("total", [1, 4, 1, 1])):
            q, k, v = qkv(member)
            cp = package.ContextParallel(group, comm, softmax_offset_grad=kind)
            offset = torch.arange(4.0).double().view(shape).requires_grad_()
            package.attention(q, k, v, cp=cp, softmax_type="learnable", softmax_offset=offset).square().sum().backward()
            assert offset.grad is not None
            assert list(offset.grad.shape) == shape
            grads.append(offset.grad.flatten())
        return grads

    shares, totals = zip(*SimGroup(4).run(one), strict=True)
    torch.testing.assert_close(sum(shares), totals[0])
    assert all(torch.equal(total, totals[0]) for total in totals)
    assert not torch.equal(shares[0], totals[0])


@PACKAGES
def test_ranks_that_ask_for_shares_and_totals_are_told_apart(package: Any) -> None:
    def one(member: SimMember) -> None:
        q, k, v = qkv(member)
        kinds = ("share", "total") if member.rank == 0 else ("total", "share")
        cp = package.ContextParallel(member, softmax_offset_grad=kinds[0])
        said = "rank {} has softmax_offset_grad={} where rank {} has softmax_offset_grad={}"
        with pytest.raises(ValueError, match=said.format(member.rank, kinds[0], 1 - member.rank, kinds[1])):
            package.attention(q, k, v, cp=cp)

    SimGroup(2).run(one)


@PACKAGES
@COMMS
@pytest.mark.one_in(3)
def test_lse_may_be_differentiated_on_one_rank_alone(package: Any, comm: str) -> None:
    def one(member: SimMember) -> list[torch.Tensor | None]:
        cp, grads = context(package, member, comm), []
        for weight in (None, 0.0):  # no gradient of lse, and one of zeros
            q, k, v = qkv(member)
            out, lse = package.attention(q, k, v, cp=cp, return_lse=True)
            loss = out.square().sum()
            if member.rank == 1:
                loss = loss + lse.sum()
            elif weight is not None:
                loss = loss + weight * lse.sum()
            loss.backward()
            grads += [q.grad, k.grad, v.grad]
        return grads

    for grads in SimGroup(4).run(one):
        torch.testing.assert_close(grads[:3], grads[3:], rtol=1e-12, atol=1e-12)


@PACKAGES
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_batched_gradients_are_refused_by_name(compiled: bool, package: Any) -> None:
    """`torch.autograd.grad(..., is_grads_batched=True)`, as `jacobian(vectorize=True)` calls it, also of a graph."""
    if compiled and package is cp_ref:
        return  # it has no graph

    def one(member: SimMember) -> None:
        cp = context(package, member)
        q, k, v = (x.detach().requires_grad_() for x in qkv(member))
        sizes = {"heads_q": q.shape[2], "heads_kv": k.shape[2], "d_qk": q.shape[3], "d_v": v.shape[3]}
        length = q.shape[1] * member.size
        plan = package.make_plan(cp=cp, batch_size=len(q), seqlen_q=length, dtype=q.dtype, device="cpu", **sizes)
        calls = [lambda: package.attention(q, k, v, cp=cp, plan=plan)]
        calls = [torch.compile(calls[0], backend="aot_eager")] if compiled else calls
        calls += [] if compiled else [lambda: package.unshard(q, cp=cp), lambda: package.roll(q, 1, cp=cp)]
        lengths = torch.tensor([0, 4])
        if package is cp_fast and not compiled:
            calls.append(lambda: package.thd.thd_sequence_order_to_cp_rank_order(q[0, :4], lengths, 2))
        for call in calls:
            out = call()
            with pytest.raises(NotImplementedError, match=r"is_grads_batched=True.* is not supported"):
                torch.autograd.grad(out, q, torch.stack([torch.ones_like(out)] * 2), is_grads_batched=True)

    SimGroup(2).run(one)


@PACKAGES
@COMMS
def test_a_sink_of_minus_infinity_has_no_gradient_where_nothing_is_seen(package: Any, comm: str) -> None:
    def one(member: SimMember) -> torch.Tensor | None:
        q, k, v = qkv(member)
        offset = torch.tensor([-math.inf, 0.0, 1.0, -math.inf], dtype=torch.float64, requires_grad=True)
        sizes = {"cu_seqlens_q": torch.tensor([0, 16, 32]), "cu_seqlens_kv": torch.tensor([0, 2, 2])}
        mask = {"attn_mask_type": "padding_causal_bottom_right"}
        cp = context(package, member, comm)
        out = package.attention(q, k, v, cp=cp, softmax_type="learnable", softmax_offset=offset, **mask, **sizes)
        out.square().sum().backward()
        return offset.grad

    shares = torch.stack([grad for grad in SimGroup(4).run(one) if grad is not None])
    assert len(shares) == 4
    assert shares.isfinite().all()
    assert shares[:, [0, 3]].eq(0).all()
    assert shares.sum(dim=0)[[1, 2]].ne(0).all()


def test_a_plan_is_itself_alone() -> None:
    def one(member: SimMember) -> None:
        cp = context(cp_fast, member)
        made, other = (cp_fast.make_plan(cp=cp, batch_size=2, seqlen_q=16, **SIZES) for _ in range(2))
        assert {made: "mine"}.get(made) == "mine"
        assert made != other
        assert made != copy.copy(made)

    SimGroup(2).run(one)


KNOWN: dict[Any, list[tuple[dict[str, Any], str]]] = {  # of a plan's softmax_type, what is wrong and in which words
    "vanilla": [
        ({"cp": 3}, "cp is of type int; it must be a cp_fast.ContextParallel"),
        ({"q": torch.zeros(2, 8, 4, 8, dtype=torch.float64)}, "dtype"),
        ({"v": torch.zeros(2, 8, 4, 4)}, "d_v of q, k, v is 4, but the plan was made for 8"),
        ({"k": torch.zeros(2, 6, 4, 8), "v": torch.zeros(2, 6, 4, 8)}, "k has shape [2, 6, 4, 8]"),
        ({"return_lse": 0}, "return_lse is 0"),
        ({"softcap": 2.0}, "softcap is 2.0, but the plan was made for"),
        ({"softmax_offset": torch.ones(4)}, "softmax_offset is given, but softmax_type is 'vanilla'"),
    ],
    "learnable": [
        ({"softmax_offset": None}, "softmax_offset is None"),
        ({"softmax_offset": torch.ones(3)}, "softmax_offset has shape [3]; it must be [h_q] = [4]"),
        ({"softmax_offset": torch.ones(4).int()}, "softmax_offset has dtype torch.int32"),
    ],
}


@pytest.mark.parametrize("softmax_type", KNOWN)
def test_a_known_call_of_attention_hides_no_wrong_one(softmax_type: Any) -> None:
    def one(member: SimMember) -> None:
        cp, x = context(cp_fast, member), torch.zeros(2, 8, 4, 8)
        made = cp_fast.make_plan(cp=cp, batch_size=2, seqlen_q=16, softmax_type=softmax_type, **SIZES)
        good: dict[str, Any] = {"q": x, "k": x, "v": x, "cp": cp, "plan": made}
        good |= {"softmax_offset": torch.ones(4)} if softmax_type == "learnable" else {}
        other = {"cp": cp_fast.ContextParallel(member, layout="contiguous")}, "cp has layout 'contiguous'"
        for odd, words in [*KNOWN[softmax_type], other]:
            for _ in range(2):
                cp_fast.attention(**good)
            with pytest.raises((ValueError, TypeError)) as caught:
                cp_fast.attention(**(good | odd))
            assert words in str(caught.value)
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            torch.func.vmap(lambda q: cp_fast.attention(**(good | {"q": q})))(x[None])

    SimGroup(2).run(one)
