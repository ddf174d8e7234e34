"""Reports about ring attention and hybrids of it: ring-flash-attention, yunchang (USP), MagiAttention, and what is
built on them.
"""

from __future__ import annotations

from conformance.judge.named_entries import TableEntry, dense
from conformance.known.by_hand import packed_qkv
from conformance.known.known_bug import Known, case, reported

__all__ = ["REPORTS"]

_RFA = "zhuzilin/ring-flash-attention#"
_USP = "feifeibear/long-context-attention#"
_MAGI = "SandAI-org/MagiAttention#"
_LONG = {"dtype": "bfloat16", "heads_q": 1, "heads_kv": 1, "d_qk": 32, "d_v": 32}


REPORTS: dict[str, Known] = {
    "rfa-42": reported(
        _RFA + "42",
        "Errors of the backward pass grew with the ring, without bound for deep models: every hop rounded to bfloat16.",
        case(8, dense(256), **_LONG),
        case(8, dense(256), attn_mask_type="no_mask", **_LONG),
        tiers=("budget",),
    ),
    "rfa-22": reported(
        _RFA + "22",
        "Every block's output was rounded to bfloat16 before the merge in float32.",
        case(8, dense(256), attn_mask_type="no_mask", **_LONG),
        tiers=("budget",),
    ),
    "rfa-87": reported(
        _RFA + "87",
        "dq came back in bfloat16 for float16 inputs.",
        case(2, dense(64), dtype="float16", d_qk=32, d_v=32),
        tiers=("logic", "budget"),
    ),
    "rfa-46": reported(
        _RFA + "46",
        "The zigzag ring on packed sequences read illegal memory in the halves of its lengths.",
        case(4, dense(8), dense(24), dense(8), call="strided"),
        tiers=("logic", "hygiene"),
    ),
    "rfa-39": reported(
        _RFA + "39",
        "A length that does not divide (32,769) left some ranks with other messages than their "
        "peers, and an obscure error.",
        case(4, dense(33)),
        case(4, dense(33), layout="contiguous"),
    ),
    "easycontext-47": reported(
        "jzhang38/EasyContext#47",
        "2,999 tokens were split 750, 750, 750, 749, and the ranks' shapes did not fit.",
        case(4, dense(15), qkv_format="bshd", attn_mask_type="causal"),
        tiers=("plan", "logic"),
    ),
    "easycontext-14": reported(
        "jzhang38/EasyContext#14",
        "exp overflowed in the merge by LSE.",
        case(2, dense(8), softmax_scale=1000.0),
        tiers=("logic",),
    ),
    "prime-rl-2828": reported(
        "PrimeIntellect-ai/prime-rl#2828",
        "The ring ignored the sliding window.",
        case(4, dense(32), window_size=(5, 0)),
        case(4, dense(32), window_size=(5, 3), attn_mask_type="no_mask"),
    ),
    "prime-rl-3397": reported(
        "PrimeIntellect-ai/prime-rl#3397",
        "Attention sinks were silently dropped under context parallelism.",
        case(2, dense(8), softmax_type="learnable"),
        schedules=("p2p", "a2a"),
    ),
    "prime-rl-3042": reported(
        "PrimeIntellect-ai/prime-rl#3042",
        "Ulysses stopped at as many ranks as there are kv heads; beyond, kv heads have to be replicated.",
        case(4, dense(16), heads_q=8, heads_kv=2),
        case(8, dense(16), heads_q=8, heads_kv=1),
        schedules=("a2a", "a2a+p2p"),
    ),
    "usp-149": reported(
        _USP + "149",
        "The backward pass returned another number of gradients than the forward pass had arguments.",
        case(2, dense(8), softmax_type="learnable", qkv_format="bshd", attn_mask_type="causal"),
        case(2, dense(8), qkv_format="bshd", attn_mask_type="causal", call="use_plan return_max_logit deterministic"),
        schedules=("p2p", "a2a+p2p"),
        tiers=("logic",),
    ),
    "usp-72": reported(
        _USP + "72",
        "Updating the LSE was not stable.",
        case(4, dense(16), softmax_scale=300.0),
        schedules=("p2p", "a2a+p2p"),
        tiers=("logic",),
    ),
    "usp-120": Known(
        _USP + "120",
        TableEntry(
            "The backward pass of q, k and v packed in one tensor failed; the test returned before it.",
            by_hand=packed_qkv,
        ),
    ),
    "megatron-1341": reported(
        "NVIDIA/Megatron-LM#1341",
        "a2a+p2p needs another order of the ranks' tokens than p2p, and batches were cut in the order of p2p.",
        case(4, dense(16), dense(8)),
        case(6, dense(24), heads_q=6, heads_kv=6),
        case(8, dense(16), heads_q=2, heads_kv=2),
        schedules=("a2a+p2p",),
        tiers=("plan", "logic"),
    ),
    "magi-71": reported(
        _MAGI + "71",
        "Hierarchical communication took a wrong rank for the peer.",
        case(8, dense(32), heads_q=8, heads_kv=8),
        case(6, dense(24), heads_q=6, heads_kv=2),
        schedules=("a2a+p2p",),
    ),
    "magi-239": reported(
        _MAGI + "239",
        "max_logit was wrong where several ranks contribute to it.",
        case(4, dense(16), heads_q=4, heads_kv=2, call="return_max_logit"),
        case(2, dense(8), dense(16, 4), call="return_max_logit", attn_mask_type="no_mask"),
        schedules=("p2p", "all_gather", "a2a", "a2a+p2p"),
        tiers=("logic",),
    ),
    "magi-55": reported(
        _MAGI + "55",
        "out and dq were wrong now and then while communication overlapped: a fence was missing.",
        case(4, dense(64), heads_q=4, heads_kv=2, call="deterministic"),
        tiers=("determinism", "logic"),
    ),
    "magi-123": reported(
        _MAGI + "123",
        "Cross attention failed an assertion that both sides have the same length.",
        case(2, dense(8, 16), dense(12, 4), attn_mask_type="padding"),
        schedules=("p2p", "all_gather", "a2a", "a2a+p2p"),
    ),
}
