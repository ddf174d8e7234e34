"""What attention and plans refuse of masks and scores, and in which words, on one rank of two and in both packages.

The tables are of (call, what is wrong in a good one, what the error says). The rank that is wrong raises its own error,
the other one an error that quotes it, and the group still works.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import cp_ref
from cp_ref import SimGroup
from tests.refusals import PACKAGES, refused, says

ONES, ZEROS = torch.ones, torch.zeros
CU = torch.tensor([0, 8, 16])
SIZES = {"heads_q": 4, "heads_kv": 4, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
PLANS = SIZES | {"batch_size": 2, "seqlen_q": 8}
Q = ZEROS(2, 4, 4, 8)  # one rank's slice: b 2, s 8/2, h 4, d 8


def attend(package: Any, cp: Any, **odd: Any) -> None:
    package.attention(cp=cp, **({"q": Q, "k": Q, "v": Q} | odd))


def attend_packed(package: Any, cp: Any, **odd: Any) -> None:
    q = ZEROS(8, 4, 8)
    attend(package, cp, **({"q": q, "k": q, "v": q, "qkv_format": "thd", "cu_seqlens_q": CU} | odd))


def attend_planned(package: Any, cp: Any, **odd: Any) -> None:
    of_plan = {name: x for name, x in odd.items() if name in ("score_mod", "dropout_p")}
    attend(package, cp, plan=package.make_plan(cp=cp, **PLANS, **of_plan), **odd)


def plan(package: Any, cp: Any, **odd: Any) -> None:
    package.make_plan(cp=cp, **(PLANS | odd))


def unshard(package: Any, cp: Any, **odd: Any) -> None:
    package.unshard(cp=cp, **({"x": ZEROS(8, 3), "qkv_format": "thd", "cu_seqlens_padded": CU} | odd))


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


@PACKAGES
@pytest.mark.parametrize(("odd", "words"), PROBLEMS)
@pytest.mark.one_in(3)
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
@pytest.mark.one_in(3)
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


@PACKAGES
@pytest.mark.parametrize(
    ("name", "value"), [("layout", "contiguous"), ("backend", "auto"), ("cp_comm_type", "a2a"), ("size", 3)]
)
def test_a_context_stays_as_it_was_made(package: Any, name: str, value: Any) -> None:
    """What it was asked for is in plans and known calls."""
    cp = SimGroup(2).run(package.ContextParallel)[0]
    with pytest.raises(AttributeError, match=f"{name} of a context is set when it is made"):
        setattr(cp, name, value)
    with pytest.raises(AttributeError, match=f"{name} of a context is set when it is made"):
        delattr(cp, name)
    cp.note = "other attributes are the user's"
