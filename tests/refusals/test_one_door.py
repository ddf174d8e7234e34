"""What one rank alone refuses in a call, all ranks refuse: functions with other libraries' names, and our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_fast.integrations import flash_attn, ring_flash_attn, sdpa, transformer_engine
from cp_ref import SimGroup

CU = torch.tensor([0, 16, 24, 48], dtype=torch.int32)
DENSE, PACKED = torch.zeros(2, 4, 2, 8), torch.zeros(24, 2, 8)
Call = Callable[..., Any]
FLASH: Any = flash_attn
RING: Any = ring_flash_attn
ENGINE: Any = transformer_engine
SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}


def updated(package: Any, cp: Any, **given: Any) -> None:
    plan = package.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=CU, max_sequences=4, **SIZES)
    plan.update(cp=cp, **{"cu_seqlens_q": CU, **given})


def engine(cp: Any, **given: Any) -> Any:
    named = {"cp_group": cp.group, "cp_comm_type": "p2p", **given}
    x = (DENSE,) * 3
    return ENGINE.attn_forward_func_with_cp(True, *x, *[None] * 6, 0.0, cp_global_ranks=None, cp_stream=None, **named)


def llama3(cp: Any, **given: Any) -> Any:
    cp = cp_fast.ContextParallel(cp.group, layout="contiguous")
    where = (CU, CU, 24, 24, 1, slice(0, 48))
    return RING.llama3_flash_attn_varlen_func(*(PACKED,) * 3, *where, cp=cp, **given)


CALLS: dict[str, tuple[Call, Any]] = {
    "attention": (lambda cp, **given: cp_fast.attention(DENSE, DENSE, DENSE, cp=cp, **given), cp_fast),
    "attention of cp_ref": (lambda cp, **given: cp_ref.attention(DENSE, DENSE, DENSE, cp=cp, **given), cp_ref),
    "make_plan": (
        lambda cp, **given: cp_fast.make_plan(cp=cp, batch_size=2, seqlen_q=8, **SIZES, **given),
        cp_fast,
    ),
    "make_plan of cp_ref": (
        lambda cp, **given: cp_ref.make_plan(cp=cp, batch_size=2, seqlen_q=8, **SIZES, **given),
        cp_ref,
    ),
    "update": (lambda cp, **given: updated(cp_fast, cp, **given), cp_fast),
    "update of cp_ref": (lambda cp, **given: updated(cp_ref, cp, **given), cp_ref),
    "flash_attn": (lambda cp, **given: FLASH.flash_attn_func(DENSE, DENSE, DENSE, cp=cp, **given), cp_fast),
    "flash_attn_varlen": (
        lambda cp, **given: FLASH.flash_attn_varlen_func(*(PACKED,) * 3, CU, CU, 24, 24, cp=cp, **given),
        cp_fast,
    ),
    "zigzag": (lambda cp, **given: RING.zigzag_ring_flash_attn_func(*(DENSE,) * 3, cp=cp, **given), cp_fast),
    "zigzag_varlen": (
        lambda cp, **given: RING.zigzag_ring_flash_attn_varlen_func(*(PACKED,) * 3, CU // 2, 12, cp=cp, **given),
        cp_fast,
    ),
    "llama3": (llama3, cp_fast),
    "sdpa": (lambda cp, **given: sdpa.scaled_dot_product_attention(DENSE, DENSE, DENSE, cp=cp, **given), cp_fast),
    "transformer_engine": (engine, cp_fast),
}
FLASH_LIKE: list[dict[str, Any]] = [
    {"dropout_p": 0.1},
    {"causal": "no"},
    {"causal": 2},
    {"return_attn_probs": 1},
    {"window_size": 3},
]
WRONG: dict[str, list[dict[str, Any]]] = {
    "attention": [{"softcap": "much"}],
    "attention of cp_ref": [{"softcap": "much"}],
    "make_plan": [{"softcap": "much"}],
    "make_plan of cp_ref": [{"softcap": "much"}],
    "update": [{"cu_seqlens_q": "many"}],
    "update of cp_ref": [{"cu_seqlens_q": "many"}],
    "flash_attn": FLASH_LIKE,
    "flash_attn_varlen": [*FLASH_LIKE, {"block_table": CU}],
    "zigzag": FLASH_LIKE,
    "zigzag_varlen": FLASH_LIKE,
    "llama3": FLASH_LIKE,
    "sdpa": [{"is_causal": "no"}, {"attn_mask": DENSE}, {"enable_gqa": 1}],
    "transformer_engine": [{"fp8": True}, {"attn_mask_type": 3}, {"cp_comm_type": "rings"}, {"window_size": 3}],
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [(name, wrong) for name in CALLS for wrong in [{"no_such_keyword": 1}, *WRONG[name]]],
)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.one_in(3)
def test_what_one_rank_refuses_all_refuse(name: str, wrong: dict[str, Any], alone: bool) -> None:
    """alone: on rank 1; else on both. Afterwards the group works on, which it would not with a message left over."""
    call, package = CALLS[name]

    def one(member: Any) -> str:
        cp = package.ContextParallel(member)
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
            call(cp, **(wrong if member.rank or not alone else {}))
        call(cp)
        return str(caught.value)

    (argument,) = wrong
    first, second = SimGroup(2).run(one)
    assert argument in second
    assert argument in first
    assert not alone or first.startswith("rank 1 refused its arguments")


def test_longest_lengths_are_integers() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        x = (PACKED,) * 3
        with pytest.raises(TypeError, match="max_seqlen_q is tensor"):
            FLASH.flash_attn_varlen_func(*x, CU, CU, torch.tensor(24), 24, cp=cp)
        with pytest.raises(TypeError, match=r"max_seqlen is 12\.5"):
            RING.zigzag_ring_flash_attn_varlen_func(*x, CU // 2, 12.5, cp=cp)

    SimGroup(2).run(one)


def test_zigzag_lengths_divide_and_do_not_overflow() -> None:
    """Of lengths in int32 the global ones are not."""

    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        function = RING.zigzag_ring_flash_attn_varlen_func
        x = (PACKED,) * 3
        with pytest.raises(ValueError, match=r"cu_seqlens gives sequence 1 5 tokens .* 2 \* cp_size = 4"):
            function(*x, torch.tensor([0, 4, 9, 24]), 24, cp=cp)
        beyond = torch.tensor([0, 2**31 - 2], dtype=torch.int32)
        with pytest.raises(ValueError, match=f"{2**32 - 4}"):
            function(*x, beyond, 2**31, cp=cp)
        with pytest.raises(ValueError, match=r"cu_seqlens\[-1\] is"):
            function(*x, torch.tensor([0, 2**61]), None, cp=cp)
        function(*x, CU.to(torch.int64) // 2, None, cp=cp)

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", [cp_fast, cp_ref])
@pytest.mark.parametrize(
    "given", [{"cu_seqlens_q": CU // 2}, {"cu_seqlens_q": CU // 2 - 1, "cu_seqlens_q_padded": CU // 2}]
)
def test_lengths_of_one_rank_are_no_lengths_of_the_whole(package: Any, given: dict[str, torch.Tensor]) -> None:
    """Half of the rows would come out zero. With a row more they are a tail, and in a plan with room its tail."""

    def one(member: Any) -> None:
        cp, which = package.ContextParallel(member), list(given)[-1]
        lengths: dict[str, Any] = {"qkv_format": "thd", **given, "cu_seqlens_q": given["cu_seqlens_q"].clamp(min=0)}
        cure = rf"{which} ends at 24, and q has 24 rows on this rank alone; cu_seqlens are global, .* end at 48"
        with pytest.raises(ValueError, match=cure):
            package.attention(*(PACKED,) * 3, cp=cp, **lengths)
        plan = package.make_plan(cp=cp, **lengths, **SIZES)
        with pytest.raises(ValueError, match=cure):
            package.attention(*(PACKED,) * 3, cp=cp, plan=plan)
        package.attention(*(torch.zeros(25, 2, 8),) * 3, cp=cp, **lengths)
        plan = package.make_plan(cp=cp, **lengths, **SIZES, max_sequences=3, max_tokens_q=48)
        package.attention(*(PACKED,) * 3, cp=cp, plan=plan)

    SimGroup(2).run(one)


def test_lengths_of_one_rank_in_a_function_of_another_name() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        with pytest.raises(ValueError, match="cu_seqlens_q ends at 24, and q has 24 rows on this rank alone"):
            FLASH.flash_attn_varlen_func(*(PACKED,) * 3, CU // 2, CU // 2, 12, 12, cp=cp)
        with pytest.raises(ValueError, match="cu_seqlens_kv ends at 24, and k has 24 rows"):
            FLASH.flash_attn_varlen_func(PACKED[:12], PACKED, PACKED, CU // 2, (CU // 2) - CU % 3, 12, 12, cp=cp)
        FLASH.flash_attn_varlen_func(*(PACKED,) * 3, CU, CU, 24, 24, cp=cp)

    SimGroup(2).run(one)


def test_one_token_is_one_row_of_every_slice() -> None:
    """Slices of one token's batch are as long as the batch: lengths and slices that are right."""
    x, cu = torch.zeros(1, 2, 8), torch.tensor([0, 1])
    SimGroup(4).run(
        lambda m: cp_fast.attention(x, x, x, cp=cp_fast.ContextParallel(m), qkv_format="thd", cu_seqlens_q=cu)
    )
