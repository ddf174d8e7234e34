"""What linear and sparse layers refuse, and in which words, on one rank of two and in both packages."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import cp_fast
from cp_ref import SimGroup, Unsupported
from tests.refusals import PACKAGES, refused, says

# ---- linear layers

ONES, ZEROS = torch.ones, torch.zeros
BATCH: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 5, 8])}
BATCH |= {"heads_q": 2, "heads_kv": 2, "d_qk": 4, "d_v": 4, "dtype": torch.float32, "device": "cpu"}
ROWS: dict[str, Any] = {
    "q": ONES(4, 2, 3),
    "k": ONES(4, 2, 3),
    "v": ONES(4, 4, 5),
    "g": ZEROS(4, 4),
    "beta": ONES(4, 4),
}


def linear(package: Any, cp: Any, **odd: Any) -> None:
    """h 2, h_v 4, d_k 3, d_v 5."""
    made = package.make_plan(cp=cp, linear=True, **BATCH)
    package.linear_attention(**(ROWS | {"cp": cp, "plan": made} | odd))


def convolve(package: Any, cp: Any, **odd: Any) -> None:
    made = package.make_plan(cp=cp, linear=True, **BATCH)
    package.causal_conv1d(**({"x": ONES(4, 3), "weight": ONES(3, 4), "cp": cp, "plan": made} | odd))


def plan_linear(package: Any, cp: Any, **odd: Any) -> None:
    package.make_plan(cp=cp, **(BATCH | {"linear": True} | odd))


LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "gla"}, "kind is 'gla'; it must be one of 'gated_delta_rule', 'kda', 'mamba2', 'mamba'"),
    ({"beta": None}, "beta is None, but kind is 'gated_delta_rule'"),
    ({"kind": "mamba2"}, "beta is given, but kind is 'mamba2'"),
    ({"kind": "mamba", "beta": None}, "A is None, but kind is 'mamba', which needs it"),
    ({"A": ONES(4, 3, 5)}, "A is given, but kind is 'gated_delta_rule', which has none; leave it out"),
    (
        {"kind": "mamba", "beta": None, "g": ONES(4, 4, 5), "A": ONES(4, 5, 3)},
        r"A has shape \[4, 5, 3\]; it must be \[h_v, d_k, d_v\] = \[4, 3, 5\]",
    ),
    (
        {"kind": "mamba", "beta": None, "g": ONES(4, 4, 5), "A": ONES(4, 3, 5).half()},
        "A has dtype torch.float16; it must be float32",
    ),
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


# ---- sparse attention

CHOSEN: dict[str, Any] = {"q": ONES(4, 2, 4), "k": ONES(4, 2, 4), "v": ONES(4, 2, 4)}
CHOSEN["indices"] = ZEROS(4, 3, dtype=torch.int32)
INDEXER: dict[str, Any] = {"q_index": ONES(4, 2, 3), "k_index": ONES(4, 3), "weights": ONES(4, 2)}


def planned(package: Any, cp: Any, odd: dict[str, Any]) -> dict[str, Any]:
    """A context whose schedule sparse attention takes, and its plan; the given context where there is a plan."""
    if "plan" in odd:
        return {"cp": cp}
    cp = package.ContextParallel(cp.group, "all_gather")
    return {"cp": cp, "plan": package.make_plan(cp=cp, **BATCH)}


def sparse(package: Any, cp: Any, **odd: Any) -> None:
    package.sparse_attention(**(CHOSEN | planned(package, cp, odd) | odd))


def select(package: Any, cp: Any, **odd: Any) -> None:
    package.select_keys(**(INDEXER | {"top_k": 2} | planned(package, cp, odd) | odd))


def lose(package: Any, cp: Any, **odd: Any) -> None:
    """The loss of an indexer."""
    constants = {name: x for name, x in CHOSEN.items() if name != "v"}
    package.index_loss(**(INDEXER | constants | {"lse": ZEROS(2, 4)} | planned(package, cp, odd) | odd))


SPARSE: list[tuple[dict[str, Any], str]] = [
    ({"indices": ZEROS(4, 3).long()}, "TypeError: indices has dtype torch.int64"),
    ({"indices": CHOSEN["indices"][:3]}, r"indices has shape \[3, 3\] and q \[4"),
    ({"indices": ZEROS(4, 3, 3).int()}, r"indices has shape .*; its last sizes must be \[2, 3\]"),
    ({"indices": ZEROS(4, 0).int()}, "top_k of indices is 0; it must be"),
    ({"q": ONES(4, 1, 4)}, r"q has shape \[4, 1, 4\]; its last sizes"),
    ({"k": ONES(3, 2, 4)}, "k has 3 tokens; by the global lengths"),
    ({"v": ONES(4, 2, 4).double()}, "TypeError: v has dtype torch.float64; it must be float32"),
    ({"softmax_scale": -1.0}, "ValueError: softmax_scale is -1.0; it must be finite"),
    ({"softmax_offset": ONES(2)}, "ValueError: .*'vanilla'; it needs 'learnable'"),
    ({"return_lse": 1}, "TypeError: return_lse is 1; it must be True or False"),
]
ENTRIES: dict[str, Any] = {"k_entries": ONES(1, 2, 4), "v_entries": ONES(1, 2, 4)}  # of a window of 4 on each rank


def compress(package: Any, cp: Any, **odd: Any) -> None:
    given = {"values": ONES(4, 6), "gates": ONES(4, 6), "rate": 4}
    package.compress_keys(**(given | planned(package, cp, odd) | odd))


def attend_compressed(package: Any, cp: Any, **odd: Any) -> None:
    given = {name: x for name, x in CHOSEN.items() if name != "indices"} | ENTRIES | {"rate": 4}
    package.compressed_attention(**(given | compressed(package, cp, odd) | odd))


def compressed(package: Any, cp: Any, odd: dict[str, Any]) -> dict[str, Any]:
    """A context and a plan in whose batch each rank owns one window of 4."""
    if "plan" in odd:
        return {"cp": cp}
    cp = package.ContextParallel(cp.group, "all_gather", layout="contiguous")
    return {"cp": cp, "plan": package.make_plan(cp=cp, **(BATCH | {"cu_seqlens_q": torch.tensor([0, 8])}))}


COMPRESSIONS: list[tuple[dict[str, Any], str]] = [
    ({"rate": 0}, "ValueError: rate is 0; it must be at least 1"),
    ({"rate": 2.0}, "TypeError: rate is 2.0"),
    ({"rate": None}, "TypeError: rate is None; it must be the number of tokens of a window"),
    ({"overlap": 1}, "TypeError: overlap is 1; it must be True or False"),
    ({"values": ONES(4, 5), "gates": ONES(4, 5), "overlap": True}, "values has 5 channels; it must have an even"),
    ({"values": ONES(4, 6, 1)}, r"values has shape \[4, 6, 1\]; qkv_format 'thd' needs \[t, c\]"),
    ({"gates": ONES(4, 5)}, r"gates has shape \[4, 5\] and values \[4, 6\]; they must be equal"),
    ({"gates": ONES(4, 6).half()}, "TypeError: gates has dtype torch.float16"),
    ({"bias": ONES(3, 6)}, r"bias has shape \[3, 6\]; it must be \[rate, c\] = \[4, 6\]"),
    ({"bias": ONES(4, 6).double()}, "TypeError: bias has dtype torch.float64"),
]
COMPRESSED: list[tuple[dict[str, Any], str]] = [
    ({"k_entries": ONES(2, 2, 4)}, r"k_entries has shape \[2, 2, 4\]; rank . owns 1 windows of 4 tokens, so it must"),
    ({"v_entries": ONES(1, 4)}, r"v_entries has shape \[1, 4\]; rank . owns 1 windows of 4 tokens"),
    ({"k_entries": ONES(1, 2, 4).double()}, "TypeError: k_entries has dtype torch.float64; it must be float32"),
    ({"rate": 2}, r"k_entries has shape \[1, 2, 4\]; rank . owns 2 windows of 2 tokens"),
    ({"indices": ZEROS(4, 3).long()}, "TypeError: indices has dtype torch.int64"),
    ({"softmax_offset": ONES(2)}, "ValueError: .*'vanilla'; it needs 'learnable'"),
    ({"rate": None}, "TypeError: rate is None; it must be the number of tokens of a window"),
]
SELECTIONS: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 0}, "ValueError: top_k is 0; it must be at least 1"),
    ({"scale": math.nan}, "ValueError: scale is nan; it must be finite"),
    ({"k_index": ONES(4, 2)}, r"ValueError: k_index has shape \[4, 2\]; its"),
    ({"weights": ONES(4, 2).half()}, "TypeError: weights has dtype torch.float16"),
]
LOSSES: list[tuple[dict[str, Any], str]] = [
    ({"lse": ZEROS(4, 2)}, r"ValueError: lse has shape \[4, 2\]; it must be \[h_q, s\] = \[2"),
    ({"lse": ZEROS(2, 4).double()}, "TypeError: lse has dtype torch.float64; it"),
]
WRONG = {
    linear: LAYERS, convolve: CONVOLUTIONS, plan_linear: LINEAR_PLANS, sparse: SPARSE, select: SELECTIONS, lose: LOSSES,
    compress: COMPRESSIONS, attend_compressed: COMPRESSED,
}  # fmt: skip

# ---- all of them


@PACKAGES
@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_layer(call: Any, package: Any) -> None:
    for odd, words in WRONG[call]:
        refused(package, call, odd, words)


def test_a_known_call_hides_no_wrong_one() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        made = {"cp": cp, "plan": cp_fast.make_plan(cp=cp, **BATCH, linear=True)}
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
        made = package.make_plan(cp=cp, **BATCH)
        with pytest.raises(ValueError, match="plan was made without linear=True, so it has no state messages"):
            linear(package, cp, plan=made)
        for schedule in (lambda: made.states, lambda: made.halo(4)):
            with pytest.raises(ValueError, match="plan was made without linear=True; it has schedules of attention"):
                schedule()

    SimGroup(2).run(one)


@PACKAGES
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"softcap": 30.0}, r"sparse_attention lacks softcap\n.*make the plan without it"),
        ({"softmax_type": "off-by-one"}, r"sparse_attention lacks softmax_type off-by-one"),
        ({"score_mod": lambda score, b, h, q_idx, kv_idx: score}, r"sparse_attention lacks score_mod"),
        ({"dropout_p": 0.5}, r"sparse_attention lacks dropout"),
        ({"comm": "p2p"}, r"by cp_comm_type 'p2p' is not supported:\n.*cp_comm_type='all_gather'"),
        ({"comm": "a2a+p2p"}, r"by cp_comm_type 'a2a\+p2p' is not supported:\n.*cp_comm_type='all_gather'"),
    ],
)
def test_what_sparse_attention_lacks(more: dict[str, Any], words: str, package: Any) -> None:
    options = {name: x for name, x in more.items() if name != "comm"}

    def one(member: Any) -> None:
        comm = more.get("comm", "all_gather")
        cp = package.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
        plan = package.make_plan(cp=cp, **BATCH, **options)
        supported, why = package.supports(cp=cp, **BATCH, **options, sparse=True)
        assert not supported
        assert re.search(words.replace("sparse_attention", "sparse attention"), why)
        assert package.supports(cp=cp, **BATCH, **options) == (True, "")
        with pytest.raises(Unsupported, match=words):
            sparse(package, cp, plan=plan)
        if comm != "all_gather":
            with pytest.raises(Unsupported, match=words):
                select(package, cp, plan=plan)

    SimGroup(2).run(one)


@PACKAGES
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"attn_mask_type": "padding"}, r"rate is 4, but the plan's attn_mask_type is 'padding'; .*must be causal"),
        ({"areas": torch.tensor([[0, 5, 0, 5, -1, 0]]), "attn_mask_type": None}, r"rate is 4, but the plan has areas"),
        ({"cu_seqlens_kv": torch.tensor([0, 4, 8])}, r"rate is 4, but the lengths of queries and keys differ"),
        ({"comm": "p2p"}, r"by cp_comm_type 'p2p' is not supported:\n.*cp_comm_type='all_gather'"),
        ({"softcap": 30.0}, r"compressed_attention lacks softcap"),
    ],
)
def test_plans_without_windows(more: dict[str, Any], words: str, package: Any) -> None:
    def one(member: Any) -> None:
        cp = package.ContextParallel(member, more.get("comm", "all_gather"))
        plan = package.make_plan(cp=cp, **(BATCH | {name: x for name, x in more.items() if name != "comm"}))
        calls = [attend_compressed] if "softcap" in more else [compress, attend_compressed]
        for call in calls:
            with pytest.raises((ValueError, Unsupported), match=words):
                call(package, cp, plan=plan)

    SimGroup(2).run(one)


def test_values_apart_from_keys_of_one_kind() -> None:
    """A rank without entries could not tell whether those of others are parts of their keys."""
    k = ONES(4, 2, 4)
    words = "v is a part of k in memory, and v_entries is no part of its keys"

    def one(member: Any) -> None:
        with pytest.raises(ValueError, match=words):
            attend_compressed(cp_fast, cp_fast.ContextParallel(member, "all_gather"), k=k, v=k)

    SimGroup(2).run(one)


@PACKAGES
def test_a_plan_says_that_it_is_for_sparse_attention(package: Any) -> None:
    def one(member: Any) -> None:
        cp = package.ContextParallel(member, "all_gather")
        assert "sparse attention too" in str(package.make_plan(cp=cp, **BATCH, sparse=True))
        with pytest.raises(TypeError, match=r"sparse is 1; it must be True or False"):
            package.make_plan(cp=cp, **BATCH, sparse=1)

    SimGroup(2).run(one)


@PACKAGES
def test_keys_of_other_documents_are_refused(package: Any) -> None:
    """A position in the row's document would have two meanings."""

    def one(member: Any) -> None:
        cp = package.ContextParallel(member, "all_gather")
        plan = package.make_plan(cp=cp, **BATCH, areas=torch.tensor([[0, 8, 0, 8, -1, 0]]), attn_mask_type=None)
        with pytest.raises(ValueError, match=r"indices is given, and areas connect documents 0 and 1"):
            sparse(package, cp, plan=plan)
        with pytest.raises(ValueError, match=r"top_k is given, and areas connect documents 0 and 1"):
            select(package, cp, plan=plan)

    SimGroup(2).run(one)
