"""What attention, plans, cuts and linear layers refuse, and in which words, on one rank of two and in both packages.

The tables are of (call, what is wrong in a good one, what the error says). The rank that is wrong raises its own error,
the other one an error that quotes it, and the group still works.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cp_fast
import cp_ref
from cp_ref import SimGroup
from tests.refusals import says

PACKAGES = pytest.mark.parametrize("package", [cp_ref, cp_fast], ids=["cp_ref", "cp_fast"])
ONES, ZEROS = torch.ones, torch.zeros
CU = torch.tensor([0, 8, 16])
META = torch.empty(2, 4, 4, 8, device="meta")
NESTED = torch.nested.nested_tensor([ZEROS(2, 3), ZEROS(4, 3)], layout=torch.jagged)
SIZES = {"heads_q": 4, "heads_kv": 4, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
PLANS = SIZES | {"batch_size": 2, "seqlen_q": 8}
Q = ZEROS(2, 4, 4, 8)  # one rank's slice: b 2, s 8/2, h 4, d 8


def attend(package: Any, cp: Any, **odd: Any) -> None:
    package.attention(cp=cp, **({"q": Q, "k": Q, "v": Q} | odd))


def attend_packed(package: Any, cp: Any, **odd: Any) -> None:
    q = ZEROS(8, 4, 8)
    attend(package, cp, **({"q": q, "k": q, "v": q, "qkv_format": "thd", "cu_seqlens_q": CU} | odd))


def attend_with_sink(package: Any, cp: Any, **odd: Any) -> None:
    attend(package, cp, **({"softmax_type": "learnable", "softmax_offset": ZEROS(4)} | odd))


def attend_planned(package: Any, cp: Any, **odd: Any) -> None:
    of_plan = {name: x for name, x in odd.items() if name in ("score_mod", "dropout_p")}
    attend(package, cp, plan=package.make_plan(cp=cp, **PLANS, **of_plan), **odd)


def plan(package: Any, cp: Any, **odd: Any) -> None:
    package.make_plan(cp=cp, **(PLANS | odd))


def unshard(package: Any, cp: Any, **odd: Any) -> None:
    package.unshard(cp=cp, **({"x": ZEROS(8, 3), "qkv_format": "thd", "cu_seqlens_padded": CU} | odd))


WRONG: list[tuple[Callable[..., None], str, Any, str]] = [
    (attend, "q", META, ""),
    (attend, "k", NESTED, ""),
    (attend, "v", ZEROS(2, 4, 4, 8).to_sparse(), ""),
    (attend, "qkv_format", np.array(["a", "b"]), ""),
    (attend, "window_size", torch.empty(2, device="meta"), ""),
    (attend, "window_size", (0, True), ""),
    (attend, "window_size", b"ab", ""),
    (attend, "window_size", {1: 2, 3: 4}, ""),
    (attend, "window_size", (10**30, 0), ""),
    (attend, "softmax_scale", 10**400, ""),
    (attend, "softmax_scale", math.nan, ""),
    (attend, "softcap", 1e-300, ""),
    (attend, "deterministic", ZEROS(2), ""),
    (attend, "return_lse", "no", ""),
    (attend, "return_max_logit", 1, ""),
    (attend, "plan", 3, ""),
    (attend_packed, "cu_seqlens_q", torch.empty(3, dtype=torch.int32, device="meta"), ""),
    (attend_packed, "cu_seqlens_kv", NESTED, ""),
    (attend_packed, "cu_seqlens_q_padded", np.array([0, 8, 16]), ""),
    (attend_packed, "cu_seqlens_q", torch.tensor([0, 8, 2**63 - 1]), ""),
    (attend_with_sink, "softmax_offset", torch.empty(4, device="meta"), ""),
    (attend_with_sink, "softmax_offset", ZEROS(4).to_sparse(), ""),
    (plan, "device", "gpu", ""),
    (plan, "device", None, ""),
    (plan, "device", -1, ""),
    (plan, "batch_size", 2**40, ""),
    (plan, "seqlen_q", 10**400, ""),
    (plan, "return_lse", None, ""),
    (unshard, "x", None, ""),
    (unshard, "x", NESTED, ""),
    (unshard, "qkv_format", "BSHD", ""),
    (unshard, "cu_seqlens_padded", None, ""),
    (unshard, "cu_seqlens_padded", torch.tensor([0, 17]), "x has|sequence 0 has length 17"),
]


def plain(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 1


def with_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score * table[h]


def captures_a_tensor(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * TABLE[h]


def of_flash_attention(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    return score


def four(score: Any, b: Any, h: Any, q_idx: Any) -> Any:
    return score


def nameless(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **tables: Any) -> Any:
    return score


def too_small(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score[..., :1]


def integers(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx


def by_query(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[q_idx]


def raises(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score.no_name


def a_number(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 1.0


def softmax(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score.exp() / score.exp().sum(-1, keepdim=True)


TABLE = ONES(4)
HALF: dict[str, Any] = {"dropout_p": 0.5}
NO_KEY = [[0, 8, 0, 8, -1, 0]]  # a good area of 16 rows
AREAS: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 5, 12]), "cu_seqlens_q_padded": CU}
AREAS["areas"] = torch.tensor(NO_KEY)
PROBLEMS: list[tuple[dict[str, Any], str]] = [  # what make_plan, supports, attention and dense_attention refuse
    ({"score_mod": "alibi"}, "TypeError: score_mod is of type str; it must be a plain Python function"),
    ({"score_mod": functools.partial(with_table, table=TABLE)}, "TypeError: .*functools.partial; it must"),
    (
        {"score_mod": captures_a_tensor},
        "ValueError: .*captures_a_tensor captures TABLE, of type torch.Tensor; .* give tensors by aux_tensors",
    ),
    ({"score_mod": (plain, plain)}, "TypeError: .*FlashAttention's own kernels.*in PyTorch"),
    ({"score_mod": of_flash_attention}, "TypeError: .*a function of seqlen_info; give the"),
    ({"score_mod": (plain, None)}, "TypeError: score_mod is of type tuple; it must be a plain Python"),
    ({"score_mod": four}, r"ValueError: score_mod is four\(score.*must be \(score, b, h, q_idx"),
    ({"score_mod": nameless}, "ValueError: .*one by name for each of aux_tensors"),
    ({"dropout_p": 1.0}, r"ValueError: dropout_p is 1.0; it must be 0, or at least 2\*\*-32"),
    ({"dropout_p": -0.1}, "ValueError: dropout_p is -0.1; it must be 0, or"),
    ({"dropout_p": 1e-12}, "ValueError: dropout_p is 1e-12; it must be 0, or"),
    ({"dropout_p": math.nan}, "ValueError: dropout_p is nan; it must be 0, or"),
    ({"dropout_p": 10**400}, "ValueError: dropout_p is an integer of 1329 bits"),
    ({"dropout_p": "0.1"}, "TypeError: dropout_p is '0.1'; it must be a number"),
    ({"dropout_p": True}, "TypeError: dropout_p is True; it must be a number"),
    (AREAS | {"areas": NO_KEY}, "TypeError: areas is of type list; it must be an int32 or int64 tensor"),
    (AREAS | {"areas": torch.tensor(NO_KEY).float()}, "TypeError: areas has dtype torch.float32; it must be int32"),
    (AREAS | {"areas": torch.tensor(NO_KEY[0])}, r"ValueError: areas has shape \[6\]; it must be"),
    (AREAS | {"areas": ZEROS(1, 5).long()}, r"ValueError: areas has shape \[1, 5\]; it must be"),
    (AREAS | {"areas": torch.tensor([[4, 4, 0, 8, -1, -1]])}, r"ValueError: areas\[0\] is \[4, 4, .*q_start, q_stop"),
    (AREAS | {"areas": torch.tensor([*NO_KEY, [8, 9, 8, 3, -1, -1]])}, r"ValueError: areas\[1\] .*k_start, k_stop"),
    (AREAS | {"areas": torch.tensor([[-1, 4, 0, 8, -1, -1]])}, r"ValueError: areas\[0\] .*within the 16"),
    (AREAS | {"areas": torch.tensor([[0, 4, 0, 17, -1, -1]])}, r"ValueError: .*k_start.*within the 16 rows"),
    (AREAS | {"areas": torch.tensor([[0, 4, 0, 4, -2, 0]])}, r"ValueError: areas\[0\] .*left and right must"),
    (
        AREAS | {"areas": torch.tensor([*NO_KEY, [7, 8, 3, 4, -1, -1]])},
        r"ValueError: areas\[0\] .* and areas\[1\] .* both have query row 7 and key row 3",
    ),
    (AREAS | {"attn_mask_type": "causal"}, "ValueError: attn_mask_type is 'causal', but areas are given"),
    (AREAS | {"window_size": (3, 0)}, r"ValueError: window_size is \(3, 0\), but areas are given"),
    (AREAS | {"qkv_format": "bshd"}, "ValueError: areas are given, but qkv_format is 'bshd'"),
]
LEAF = ONES(4, requires_grad=True)
CALLS: list[tuple[dict[str, Any], str]] = [  # what attention refuses with a plan and without one, and dense_attention
    ({"alibi_slopes": [0.5, 0.5]}, "TypeError: alibi_slopes is of type list; it must be a tensor"),
    (
        {"alibi_slopes": ONES(3)},
        r"ValueError: alibi_slopes has shape \[3\]; it must be \[h_q\] = \[4\] or \[b, h_q\] = \[2, 4\]",
    ),
    ({"alibi_slopes": ONES(3, 4)}, r"ValueError: alibi_slopes has shape \[3, 4\]"),
    ({"alibi_slopes": ONES(4).double()}, "TypeError: alibi_slopes has dtype torch.float64; it must"),
    (
        {"alibi_slopes": LEAF},
        r"Unsupported: alibi_slopes that requires a gradient is not supported:\n.* give alibi_slopes.detach\(\)",
    ),
    ({"alibi_slopes": ONES(4, device="meta")}, "ValueError: alibi_slopes is on meta"),
    ({"aux_tensors": {"table": TABLE}}, "ValueError: aux_tensors has 'table', but there is no"),
    ({"score_mod": plain, "aux_tensors": [TABLE]}, "TypeError: aux_tensors is of type list"),
    ({"score_mod": with_table}, "ValueError: .*has no tensors; score_mod with_table takes 'table' by name"),
    (
        {"score_mod": plain, "aux_tensors": {"table": TABLE}},
        "ValueError: aux_tensors has 'table'; score_mod plain takes no tensors by name",
    ),
    ({"score_mod": with_table, "aux_tensors": {"table": 1.0}}, r"TypeError: aux_tensors\['table'\] is"),
    (
        {"score_mod": with_table, "aux_tensors": {"table": LEAF}},
        r"Unsupported: aux_tensors\['table'\] that requires a gradient is not supported:\n.* give aux_tensors",
    ),
    ({"score_mod": too_small}, "ValueError: score_mod too_small gave shape .* for scores"),
    (
        {"score_mod": by_query, "aux_tensors": {"table": ONES(3)}},
        "ValueError: score_mod by_query raised IndexError: .* It must take every pair of a sequence's queries and keys",
    ),
    ({"score_mod": raises}, "ValueError: score_mod raises raised AttributeError: .*no_name"),
    ({"score_mod": a_number}, "TypeError: score_mod a_number gave of type float; it must give a tensor"),
    ({"score_mod": integers}, "TypeError: score_mod integers gave a tensor of torch.int32; it must give"),
    ({"score_mod": softmax}, "ValueError: score_mod softmax is not element-wise"),
    (HALF, "ValueError: dropout_seed is None, but dropout_p is 0.5; they belong together"),
    ({"dropout_seed": 3}, "ValueError: dropout_seed is given, but dropout_p is 0.0; they belong"),
    (HALF | {"dropout_seed": 0.5}, "TypeError: dropout_seed is of type float; it must be an int"),
    (HALF | {"dropout_seed": 2**63}, "ValueError: dropout_seed is 9223372036854775808; it must be"),
    (HALF | {"dropout_seed": torch.tensor([1, 2])}, r"ValueError: dropout_seed is a tensor \[2\] of"),
    (HALF | {"dropout_seed": torch.tensor(1).int()}, r"ValueError: .*a tensor \[\] of torch.int32"),
]


def refused(package: Any, call: Callable[..., None], odd: dict[str, Any], words: str) -> None:
    """Play a call that is wrong on rank 1 alone, then a good one."""

    def one(member: Any) -> Exception:
        cp = package.ContextParallel(member)
        with pytest.raises((ValueError, TypeError, cp_ref.Unsupported)) as caught:
            call(package, cp, **(odd if member.rank else {}))
        call(package, cp)
        return caught.value

    other, own = SimGroup(2).run(one)
    assert says(own, words), own
    assert str(other).startswith("rank 1 refused its arguments, so rank 0 does not start: ")
    assert str(other).endswith(str(own))


@PACKAGES
@pytest.mark.parametrize(("call", "name", "value", "words"), WRONG, ids=lambda x: getattr(x, "__name__", None))
def test_a_wrong_argument(package: Any, call: Any, name: str, value: Any, words: str) -> None:
    refused(package, call, {name: value}, words or name)


@PACKAGES
@pytest.mark.parametrize(("odd", "words"), PROBLEMS)
def test_a_wrong_problem(package: Any, odd: dict[str, Any], words: str) -> None:
    areas = "areas" in odd
    packed = ZEROS(16, 4, 8) if odd.get("qkv_format") == "thd" else ZEROS(1, 16, 4, 8)
    tensors = {"q": packed, "k": packed, "v": packed} if areas else {}
    refused(package, attend, odd | tensors, words)
    refused(package, plan, odd | ({"batch_size": None, "seqlen_q": None} if areas else {}), words)

    def one(member: Any) -> None:
        cp, sizes = package.ContextParallel(member), SIZES if areas else PLANS
        for call in (
            lambda: package.supports(cp=cp, **sizes, **odd),
            lambda: cp_ref.dense_attention(**({"q": Q, "k": Q, "v": Q} | tensors), **odd),
        ):
            with pytest.raises((ValueError, TypeError, cp_ref.Unsupported)) as caught:
                call()
            assert says(caught.value, words), caught.value

    SimGroup(2).run(one)


@PACKAGES
@pytest.mark.parametrize(("odd", "words"), CALLS)
def test_wrong_scores_of_a_call(package: Any, odd: dict[str, Any], words: str) -> None:
    refused(package, attend, odd, words)

    def one(member: Any) -> None:
        cp = package.ContextParallel(member)
        for call in (
            lambda: attend_planned(package, cp, **odd),
            lambda: cp_ref.dense_attention(Q, Q, Q, **odd),
        ):
            with pytest.raises((ValueError, TypeError, cp_ref.Unsupported)) as caught:
                call()
            assert says(caught.value, words), caught.value

    SimGroup(2).run(one)


@PACKAGES
def test_areas_cannot_be_updated(package: Any) -> None:
    def one(member: Any) -> None:
        given = {"cp": package.ContextParallel(member), "max_sequences": 2} | AREAS | SIZES
        with pytest.raises(cp_ref.Unsupported, match="areas and max_sequences is not supported") as caught:
            package.make_plan(**given)
        assert package.supports(**given) == (False, str(caught.value))

    SimGroup(2).run(one)


# ---- linear layers

LINEAR: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 5, 8]), **SIZES}
LINEAR |= {"heads_q": 2, "heads_kv": 2, "d_qk": 4, "d_v": 4}
ROWS: dict[str, Any] = {
    "q": ONES(4, 2, 3),
    "k": ONES(4, 2, 3),
    "v": ONES(4, 4, 5),
    "g": ZEROS(4, 4),
    "beta": ONES(4, 4),
}


def linear(package: Any, cp: Any, **odd: Any) -> None:
    """h 2, h_v 4, d_k 3, d_v 5."""
    made = package.make_plan(cp=cp, linear=True, **LINEAR)
    package.linear_attention(**(ROWS | {"cp": cp, "plan": made} | odd))


def convolve(package: Any, cp: Any, **odd: Any) -> None:
    made = package.make_plan(cp=cp, linear=True, **LINEAR)
    package.causal_conv1d(**({"x": ONES(4, 3), "weight": ONES(3, 4), "cp": cp, "plan": made} | odd))


def plan_linear(package: Any, cp: Any, **odd: Any) -> None:
    package.make_plan(cp=cp, **(LINEAR | {"linear": True} | odd))


LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "gla"}, "kind is 'gla'; it must be one of 'gated_delta_rule', 'kda', 'mamba2', 'mamba'"),
    ({"beta": None}, "beta is None, but kind is 'gated_delta_rule'"),
    ({"kind": "mamba2"}, "beta is given, but kind is 'mamba2'"),
    ({"kind": "mamba", "beta": None}, "A is None, but kind is 'mamba', which needs it"),
    ({"A": torch.ones(2, 4, 4)}, "A is given, but kind is 'gated_delta_rule', which has none; leave it out"),
    ({"output_final_state": 1}, "output_final_state is 1; it must be True or False"),
    ({"scale": math.nan}, "scale is nan; it must be finite"),
    ({"scale": math.inf}, "scale is inf; it must be finite"),
    ({"scale": "1"}, "scale is '1'; it must be a number"),
    ({"scale": True}, "scale is True; it must be a number"),
    ({n: x[:3] for n, x in ROWS.items()}, "q has 3 tokens; by the global lengths, cu_seqlens_q, which end at 8, rank"),
    (
        {n: torch.cat([x, x]) for n, x in ROWS.items()},
        "cu_seqlens_q ends at 8, and q has 8 rows on this rank alone",
    ),
    (
        {"kind": "mamba", "beta": None, "g": ONES(4, 4, 5), "A": ONES(4, 5, 3)},
        r"A has shape \[4, 5, 3\]; it must be \[h_v, d_k, d_v\] = \[4, 3, 5\]",
    ),
    (
        {"kind": "mamba", "beta": None, "g": ONES(4, 4, 5), "A": ONES(4, 3, 5).half()},
        "A has dtype torch.float16; it must be float32",
    ),
    ({"k": ONES(5, 2, 3)}, r"k has shape \[5, 2, 3\] and q \[4, 2, 3\]; their rows must be equal"),
    ({"q": ONES(1, 4, 2, 3)}, r"q has shape \[1, 4, 2, 3\]; qkv_format 'thd' needs \[t, h, d_k\]"),
    ({"g": ONES(4, 4, 3)}, r"g has shape \[4, 4, 3\]; qkv_format 'thd' needs \[t, h_v\]"),
    ({"kind": "kda"}, r"g has shape \[4, 4\]; qkv_format 'thd' needs \[t, h_v, d_k\]"),
    ({"k": ONES(4, 1, 3)}, r"k has shape \[4, 1, 3\] and q \[4, 2, 3\]; they must be equal"),
    ({"v": ONES(4, 3, 5), "g": ONES(4, 3), "beta": ONES(4, 3)}, "h_v is 3 and h is 2; h_v must be a multiple of h"),
    ({"g": ONES(4, 2)}, r"g has shape \[4, 2\]; its last sizes must be \[4\]"),
    ({"beta": ONES(4, 2)}, r"beta has shape \[4, 2\]; its last sizes must be \[4\]"),
    ({"q": ONES(4, 0, 3), "k": ONES(4, 0, 3)}, "h is 0; it must be at least 1"),
    ({"v": ONES(4, 4, 0)}, "d_v is 0; it must be at least 1"),
    ({"k": ONES(4, 2, 3).double()}, "k has dtype torch.float64; it must be float32"),
    ({"g": ONES(4, 4).bfloat16()}, "g has dtype torch.bfloat16; it must be float32"),
    ({"q": ONES(4, 2, 3, dtype=torch.int64)}, "q has dtype torch.int64; it must be float16, bfloat16"),
    ({"q": [1.0]}, "q is of type list; it must be a tensor"),
    ({"g": None}, "g is None; it must be a tensor"),
    ({"v": ONES(4, 4, 5).to_sparse()}, "v is a nested or sparse tensor"),
    ({"q": ONES(4, 2, 3, device="meta")}, "q is on meta"),
    ({"g": ONES(4, 4, device="meta")}, "g is on meta"),
    (
        {"initial_state": ONES(1, 4, 3, 5)},
        r"initial_state has shape \[1, 4, 3, 5\]; it must be \[b, h_v, d_k, d_v\] = \[2, 4, 3, 5\]",
    ),
    (
        {"initial_state": ONES(2, 4, 3, 5).half()},
        "initial_state has dtype torch.float16; it must be float32 or float64",
    ),
    ({"plan": None}, r"plan is None; it must be a cp_\w+.Plan, made with linear=True"),
]
CONVOLUTIONS: list[tuple[dict[str, Any], str]] = [
    ({"x": ONES(4, 3, 1)}, r"x has shape \[4, 3, 1\]; qkv_format 'thd' needs \[t, channels\]"),
    ({"x": ONES(3, 3)}, "x has 3 tokens; by the global lengths"),
    ({"weight": ONES(2, 4)}, r"weight has shape \[2, 4\], and x has 3 channels; it must be \[channels, ker"),
    ({"weight": ONES(3, 1, 4)}, r"weight has shape \[3, 1, 4\]"),
    ({"weight": ONES(3, 0)}, "kernel_size is 0; it must be at least 1"),
    ({"bias": ONES(4)}, r"bias has shape \[4\], and x has 3 channels"),
    ({"weight": ONES(3, 4).half()}, "weight has dtype torch.float16; it must be float32"),
    ({"activation": "gelu"}, "activation is 'gelu'; it must be one of 'silu', 'swish'"),
    ({"weight": None}, "weight is None; it must be a tensor"),
]
LINEAR_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"linear": "yes"}, "linear is 'yes'; it must be True or False"),
    ({"areas": torch.tensor([[0, 5, 0, 5, -1, 0]])}, "linear is True, but areas are given"),
    ({"cu_seqlens_kv": torch.tensor([0, 4, 8])}, ".*the lengths of queries and keys differ"),
    ({"cu_seqlens_kv_padded": torch.tensor([0, 6, 9])}, ".*the lengths of queries and keys differ"),
]


@PACKAGES
@pytest.mark.parametrize("call", [linear, convolve, plan_linear])
def test_wrong_linear_layers(call: Any, package: Any) -> None:
    for odd, words in {linear: LAYERS, convolve: CONVOLUTIONS, plan_linear: LINEAR_PLANS}[call]:
        refused(package, call, odd, words)


def test_a_known_call_hides_no_wrong_one() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        made = {"cp": cp, "plan": cp_fast.make_plan(cp=cp, **LINEAR, linear=True)}
        layer: dict[str, Any] = ROWS | made | {"scale": 1.0, "output_final_state": True}
        convolution: dict[str, Any] = {"x": ONES(4, 3), "weight": ONES(3, 4), "activation": "silu"} | made
        for call, good, wrong in (
            (cp_fast.linear_attention, layer, LAYERS),
            (cp_fast.causal_conv1d, convolution, CONVOLUTIONS),
        ):
            for odd, words in wrong:
                for _ in range(2):
                    call(**good)
                with pytest.raises((ValueError, TypeError)) as caught:
                    call(**(good | odd))
                assert says(caught.value, words), caught.value

    SimGroup(2).run(one)


@PACKAGES
def test_other_sizes_on_other_ranks(package: Any) -> None:
    def one(member: Any) -> None:
        cp, more = package.ContextParallel(member), member.rank
        with pytest.raises(ValueError, match=r"rank . has d_v=. where rank . has d_v="):
            linear(package, cp, v=ONES(4, 4, 5 + more))
        with pytest.raises(ValueError, match=r"rank . has kernel_size=. where rank . has kernel_size="):
            convolve(package, cp, weight=ONES(3, 4 + more))
        with pytest.raises(ValueError, match=r"the ranks have different problems: .*linear=True"):
            plan_linear(package, cp, linear=more == 0)

    SimGroup(2).run(one)


@PACKAGES
def test_a_plan_that_is_not_for_linear_layers(package: Any) -> None:
    def one(member: Any) -> None:
        cp = package.ContextParallel(member)
        made = package.make_plan(cp=cp, **LINEAR)
        with pytest.raises(ValueError, match="plan was made without linear=True, so it has no state messages"):
            linear(package, cp, plan=made)
        for schedule in (lambda: made.states, lambda: made.halo(4)):
            with pytest.raises(ValueError, match="plan was made without linear=True; it has schedules of attention"):
                schedule()

    SimGroup(2).run(one)
