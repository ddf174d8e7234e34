"""The table of special cases: every edge of what attention means, one name each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance.case import Case
from conformance.entries import Change, TableEntry, dense, every_schedule, problem
from conformance.tensors import GlobalTensors
from cp_ref.spec import Sequence

__all__ = ["SPECIAL"]


_FREE = ("qkv_format", "layout", "heads_kv")  # where an entry does not name them, it is not about them


def _entry(
    text: str,
    cp_size: int,
    *sequences: Sequence,
    tails: tuple[int, int] = (0, 0),
    tiers: tuple[str, ...] = ("logic", "probes"),
    change: Change | None = None,
    call: dict[str, object] | None = None,
    gpu: bool = False,
    **fields: object,
) -> TableEntry:
    """An entry under every schedule; `call` has fields of the case, `fields` those of the problem; `gpu` for one that
    takes a CPU too long.
    """
    options = {"return_lse": True, "return_max_logit": True, "loss": "out+lse", "seed": 7, **(call or {})}
    p = problem(cp_size, *sequences, **fields)
    case = Case(p, tail_q=tails[0], tail_kv=tails[1], **options)  # pyright: ignore[reportArgumentType]
    only = (p.cp_comm_type,) if "cp_comm_type" in fields else ("p2p", "all_gather", "a2a", "a2a+p2p")
    cases = (case,) if "cp_comm_type" in fields else every_schedule(case, only)
    free = tuple(name for name in _FREE if name not in fields)
    return TableEntry(text, cases, tiers, change, free=free, gpu=gpu)


def _with_offset(value: float) -> Change:
    return lambda t: replace(t, softmax_offset=torch.full_like(_offset(t), value))


def _offset(t: GlobalTensors) -> torch.Tensor:
    assert t.softmax_offset is not None
    return t.softmax_offset


def _constant_scores(q: float, k: float) -> Change:
    """Every score q * k * d * scale; NaN of padding stays."""
    return lambda t: replace(t, q=t.q * 0 + q, k=t.k * 0 + k)


def _one_dominant_key(t: GlobalTensors) -> GlobalTensors:
    """The first slot's key takes all the weight of whoever sees it."""
    k = t.k.clone()
    k[0] = k[0] * 0 + 40.0
    return replace(t, q=t.q.abs() + 1.0, k=k)


def _no_dout(t: GlobalTensors) -> GlobalTensors:
    return replace(t, dout=t.dout * 0)


_PADDED = (Sequence(5, 5, 8, 8), Sequence(8, 8, 8, 8), Sequence(0, 0, 8, 8))
_NONE = [Sequence(0, 0, 0, 0)] * 1000
_FEW: dict[str, Any] = {"dtype": "float32", "heads_q": 2, "heads_kv": 1, "d_qk": 1, "d_v": 4}
_FEW_WIDE: dict[str, Any] = _FEW | {"dtype": "float64"}
_BATCH: dict[str, Any] = {"qkv_format": "bshd", "attn_mask_type": "padding_causal"}

SPECIAL: dict[str, TableEntry] = {
    # values
    "equal-scores": _entry("q = 0: every weight is 1 / n", 2, dense(8), change=_constant_scores(0.0, 1.0)),
    "very-negative-scores": _entry(
        "every score -1e4: lse is not near 0",
        2,
        dense(8),
        change=_constant_scores(60.0, -60.0),
        call={"magnitude": 60.0},
    ),
    "very-positive-scores": _entry(
        "every score 1e4: exp overflows without a maximum",
        2,
        dense(8),
        change=_constant_scores(60.0, 60.0),
        call={"magnitude": 60.0},
    ),
    "huge-lse": _entry("scores of some 1e5", 2, dense(16), call={"magnitude": 300.0}),
    "one-dominant-key": _entry("one weight is 1, the others are 0", 2, dense(8), change=_one_dominant_key),
    "softcap-saturated": _entry("scores far beyond the softcap", 2, dense(8), softcap=2.0, call={"magnitude": 30.0}),
    "softcap-and-everything": _entry(
        "softcap, window, sink and groups", 2, *_PADDED, softcap=3.0, window_size=(3, 0), softmax_type="learnable"
    ),
    "sink-huge": _entry(
        "a sink that takes all the weight", 2, dense(8), softmax_type="learnable", change=_with_offset(200.0)
    ),
    "sink-tiny": _entry("a sink that takes none", 2, dense(8), softmax_type="learnable", change=_with_offset(-200.0)),
    "scale-tiny": _entry("softmax_scale 1e-6", 2, dense(8), softmax_scale=1e-6),
    "scale-one": _entry("softmax_scale 1", 2, dense(8), softmax_scale=1.0),
    "float16-scores-beyond-its-range": _entry(
        "q.k is more than 65,504", 2, dense(8), dtype="float16", change=_constant_scores(120.0, 120.0), tiers=("logic",)
    ),
    "bfloat16-scores-beyond-its-precision": _entry(
        "scores that bfloat16 cannot tell apart", 2, dense(8), dtype="bfloat16", change=_constant_scores(40.0, 40.0)
    ),
    # lengths
    "no-sequence": _entry("a batch of none", 2, tails=(4, 2)),
    "no-sequence-no-slot": _entry("tensors without a single row", 2),
    "only-empty-sequences": _entry("three sequences of length 0", 2, *[Sequence(0, 0, 0, 0)] * 3),
    "empty-sequence-first": _entry("nothing, then something", 2, Sequence(0, 0, 0, 0), dense(8)),
    "empty-sequence-between": _entry("nothing in the middle", 2, dense(8), Sequence(0, 0, 0, 0), dense(4)),
    "empty-sequence-last": _entry("something, then nothing", 2, dense(8), Sequence(0, 0, 0, 0)),
    "no-queries": _entry("keys that nobody asks for: their gradients are 0", 2, Sequence(0, 8, 0, 8), dense(4)),
    "no-keys": _entry("queries that see nothing: out 0, lse -inf", 2, Sequence(8, 0, 8, 0), dense(4)),
    "no-keys-off-by-one": _entry(
        "queries that see the sink alone: out 0, lse 0", 2, Sequence(8, 0, 8, 0), dense(4), softmax_type="off-by-one"
    ),
    "no-keys-learnable": _entry(
        "queries that see the sink alone: lse is its logit", 2, Sequence(8, 0, 8, 0), softmax_type="learnable"
    ),
    "one-token": _entry("one token in its slots", 2, Sequence(1, 1, 4, 4)),
    "one-query-many-keys": _entry("a decoding step", 2, Sequence(1, 16, 4, 16), attn_mask_type="no_mask"),
    "one-query-bottom-right": _entry(
        "a decoding step, causal", 2, Sequence(1, 16, 4, 16), attn_mask_type="causal_bottom_right"
    ),
    "many-queries-one-key": _entry("every query sees one key, or none", 2, Sequence(16, 1, 16, 4)),
    "one-token-per-rank": _entry("contiguous, as many tokens as ranks", 4, dense(4), layout="contiguous"),
    "one-token-per-chunk": _entry("dual_chunk, as many tokens as chunks", 4, dense(8)),
    "shorter-than-the-group": _entry("fewer tokens than ranks", 4, Sequence(3, 3, 8, 8)),
    "a-rank-of-padding": _entry("some ranks hold nothing real", 4, Sequence(5, 5, 32, 32)),
    "all-padding": _entry("slots, and not one token", 2, Sequence(0, 0, 16, 16)),
    "one-less-than-a-chunk": _entry("the last slot of the first chunk is padding", 2, Sequence(3, 3, 16, 16)),
    "one-more-than-a-chunk": _entry("the second chunk has one token", 2, Sequence(5, 5, 16, 16)),
    "one-less-than-all": _entry("the very last slot is padding", 4, Sequence(31, 31, 32, 32)),
    "uneven": _entry("dual_chunk of lengths that do not divide", 4, dense(13), dense(1), dense(6), layout="dual_chunk"),
    "uneven-contiguous": _entry("parts of which the last is shorter", 4, dense(5), dense(4), layout="contiguous"),
    "fewer-tokens-than-ranks": _entry("slices of one row, and ranks with tail alone", 4, dense(3)),
    "balanced-one-document": _entry("cut for every rank", 4, dense(37), layout="balanced"),
    "balanced-of-length-1": _entry("nothing travels", 4, *[dense(1)] * 9, layout="balanced"),
    "balanced-one-is-nearly-all": _entry("a long one, and crumbs", 4, dense(61), *[dense(1)] * 3, layout="balanced"),
    "balanced-empty-documents": _entry(
        "some have no token", 3, dense(0), dense(11), dense(0), dense(4), dense(0), layout="balanced"
    ),
    "balanced-fewer-tokens-than-ranks": _entry("a rank of tail alone", 4, dense(2), dense(1), layout="balanced"),
    "balanced-many-documents": _entry(
        "of one and two tokens",
        4,
        *[dense(1), dense(2)] * 300,
        layout="balanced",
        cp_comm_type="p2p",
        heads_q=1,
        heads_kv=1,
        tiers=("logic",),
    ),
    "sequence-inside-a-rank": _entry(
        "contiguous: whole sequences on one rank", 2, dense(3), dense(5), dense(8), layout="contiguous"
    ),
    "sequence-across-ranks": _entry(
        "contiguous: a sequence that begins and ends inside ranks",
        4,
        dense(1),
        dense(13),
        dense(2),
        layout="contiguous",
    ),
    "hundreds-of-sequences": _entry("120 sequences of 4 slots", 2, *[Sequence(3, 3, 4, 4), dense(4)] * 60),
    "thousands-of-empty-sequences": _entry(
        "2,003 sequences, three of them with tokens", 2, dense(4), *_NONE, dense(8), *_NONE, dense(4), tiers=("logic",)
    ),
    "tile-borders": _entry("63, 64 and 65 tokens", 2, Sequence(63, 63, 64, 64), dense(64), Sequence(65, 65, 68, 68)),
    # padding and tails
    "padding-between": _entry("padding after every sequence", 2, *_PADDED),
    "padding-of-keys-alone": _entry("keys are padded, queries are not", 2, Sequence(8, 5, 8, 8), dense(8)),
    "padding-of-queries-alone": _entry("queries are padded, keys are not", 2, Sequence(5, 8, 8, 8), dense(8)),
    "tail": _entry("a buffer longer than its sequences", 2, dense(8), tails=(6, 6)),
    "tail-of-queries": _entry("a tail of queries, none of keys", 2, dense(8), tails=(8, 0)),
    "tail-of-keys": _entry("a tail of keys, none of queries", 2, dense(8), tails=(0, 8)),
    "tail-longer-than-all": _entry("more tail than tokens", 2, Sequence(1, 1, 4, 4), tails=(64, 64)),
    "tail-after-padding": _entry("padding, then a tail", 4, Sequence(9, 9, 16, 16), tails=(4, 8)),
    "padding-mask-in-a-batch": _entry(
        "bshd with lengths of its own for every sequence",
        2,
        *(Sequence(n, n, 8, 8) for n in (8, 5, 1, 0)),
        **_BATCH,
    ),
    "padding-mask-in-sbhd": _entry(
        "sbhd with lengths, queries and keys apart",
        2,
        Sequence(8, 3, 8, 12),
        Sequence(2, 12, 8, 12),
        **(_BATCH | {"qkv_format": "sbhd"}),  # pyright: ignore[reportArgumentType]
    ),
    "sbhd-of-equal-lengths": _entry(
        "sbhd without padding, a sink per head: a batch that may be folded into the heads",
        2,
        *[dense(8)] * 3,
        qkv_format="sbhd",
        attn_mask_type="causal",
        softmax_type="learnable",
    ),
    # masks
    "bottom-right-fewer-keys": _entry(
        "d < 0: the first queries see nothing", 2, dense(16, 8), attn_mask_type="causal_bottom_right"
    ),
    "bottom-right-more-keys": _entry(
        "d > 0: the first query sees many", 2, dense(8, 16), attn_mask_type="causal_bottom_right"
    ),
    "bottom-right-by-real-lengths": _entry(
        "d is of tokens, not of slots", 2, Sequence(5, 7, 8, 16), attn_mask_type="padding_causal_bottom_right"
    ),
    "bottom-right-another-d-each": _entry(
        "d differs in sign between sequences",
        2,
        dense(12, 4),
        dense(4, 12),
        dense(8),
        attn_mask_type="padding_causal_bottom_right",
    ),
    "bottom-right-empty-rows-and-sink": _entry(
        "rows that see the sink alone", 2, dense(16, 4), attn_mask_type="causal_bottom_right", softmax_type="learnable"
    ),
    "bottom-right-window": _entry(
        "a window around a shifted diagonal", 2, dense(8, 16), attn_mask_type="causal_bottom_right", window_size=(3, 0)
    ),
    "causal-more-keys": _entry("top-left: the last keys are seen by nobody", 2, dense(8, 16)),
    "causal-more-queries": _entry("top-left: the last queries see all keys", 2, dense(16, 8)),
    "window-of-itself": _entry("window (0, 0): each query sees its own key", 4, dense(16), window_size=(0, 0)),
    "window-of-itself-unmasked": _entry(
        "the same without a causal mask", 2, dense(12), window_size=(0, 0), attn_mask_type="no_mask"
    ),
    "window-of-one": _entry("window (1, 0)", 4, dense(16), window_size=(1, 0)),
    "window-larger-than-all": _entry("a window wider than the sequence", 2, dense(8), window_size=(100, 100)),
    "window-as-long-as-all": _entry("left = length - 1 hides nothing", 2, dense(8), window_size=(7, 0)),
    "window-one-short-of-all": _entry("left = length - 2 hides one pair", 2, dense(8), window_size=(6, 0)),
    "window-at-a-chunk": _entry("left = a chunk", 4, dense(32), window_size=(4, 0)),
    "window-right-alone": _entry("keys up to three ahead", 2, dense(16), window_size=(-1, 3), attn_mask_type="no_mask"),
    "window-left-alone": _entry("without a causal mask", 2, dense(16), window_size=(2, -1), attn_mask_type="no_mask"),
    "window-in-a-batch": _entry(
        "it crosses the corners of tiles in many ways",
        4,
        dense(96),
        window_size=(17, 17),
        qkv_format="bshd",
        attn_mask_type="no_mask",
    ),
    "window-past-the-keys": _entry(
        "the last queries see nothing", 2, dense(16, 4), window_size=(2, 2), attn_mask_type="no_mask"
    ),
    "positions-beyond-1024": _entry(
        "1,504 tokens: tables of positions that end at a power of two", 2, dense(1504), tiers=("probes",), **_FEW
    ),
    "positions-beyond-4096": _entry(  # float32 does not count so far by plain sums
        "4,112 tokens", 2, dense(4112), tiers=("probes",), **_FEW_WIDE
    ),
    "positions-beyond-65536": _entry("70,000 tokens, on a GPU", 4, dense(70_000), tiers=("probes",), gpu=True, **_FEW),
    "one-key-too-few": _entry("rows of 200 keys: one less changes an error bound by nothing", 2, dense(200)),
    "window-and-sink": _entry("both at once", 2, dense(16), window_size=(3, 0), softmax_type="learnable"),
    # areas
    "areas-prompt-and-answers": _entry(
        "a prompt that three answers see, which do not see each other",
        2,
        dense(16),
        areas=((0, 4, 0, 4, -1, 0), (4, 16, 0, 4, -1, -1), *((n, n + 4, n, n + 4, -1, 0) for n in (4, 8, 12))),
        attn_mask_type="causal",
    ),
    "areas-before-a-causal-one": _entry(
        "keys of three places, the last ones causal, for the same queries",
        2,
        dense(16),
        areas=((0, 8, 0, 8, -1, 0), (8, 16, 0, 2, -1, -1), (8, 16, 5, 8, -1, -1), (8, 16, 8, 16, -1, 0)),
        attn_mask_type="causal",
        layout="contiguous",
    ),
    "areas-of-blocks": _entry(
        "each block of four sees all before it and itself: a staircase of rectangles",
        2,
        dense(32),
        areas=tuple((n, n + 4, 0, n + 4, -1, -1) for n in range(0, 32, 4)),
        attn_mask_type="causal",
    ),
    "areas-across-documents": _entry(
        "documents see each other, and no area sees padding",
        2,
        *_PADDED,
        areas=((0, 24, 0, 24, -1, 0),),
        attn_mask_type="causal",
    ),
    # heads and head dims
    "fewer-kv-heads-than-ranks": _entry("2 kv heads on 4 ranks: replicated", 4, dense(16), heads_q=8, heads_kv=2),
    "one-kv-head": _entry("multi-query attention on 4 ranks", 4, dense(16), heads_q=4, heads_kv=1),
    "one-query-head-per-rank": _entry("8 heads on 8 ranks", 8, dense(16), heads_q=8, heads_kv=8),
    "groups-of-six": _entry("12 query heads over 2", 2, dense(8), heads_q=12, heads_kv=2),
    "three-kv-heads": _entry("6 query heads over 3, on 3 ranks", 3, dense(12), heads_q=6, heads_kv=3),
    "head-dim-1": _entry("d_qk 1, d_v 1", 2, dense(8), d_qk=1, d_v=1),
    "head-dim-odd": _entry("d_qk 5, d_v 3", 2, dense(8), d_qk=5, d_v=3),
    "head-dim-192-128": _entry("latent attention, grouped", 2, dense(8), d_qk=192, d_v=128),
    "head-dim-128-192": _entry("d_v larger than d_qk", 2, dense(8), d_qk=128, d_v=192),
    "head-dim-256": _entry("the largest of most kernels", 2, dense(8), d_qk=256, d_v=256),
    "head-dim-264": _entry("larger than that of most kernels", 2, dense(8), d_qk=264, d_v=264),
    # groups
    "group-of-one": _entry("cp_size 1", 1, dense(8), Sequence(3, 3, 4, 4)),
    "group-of-seven": _entry("a prime number of ranks", 7, dense(14), heads_q=7, heads_kv=1),
    "group-of-sixteen": _entry(
        "more ranks than any head count here", 16, dense(32), heads_q=16, heads_kv=4, tiers=("logic",)
    ),
    "inner-group-of-one": _entry("a2a+p2p that is a ring", 4, dense(16), cp_comm_type="a2a+p2p", a2a_size=1),
    "inner-group-of-all": _entry("a2a+p2p that is an a2a", 4, dense(16), cp_comm_type="a2a+p2p", a2a_size=4),
    # gradients
    "lse-gradient-of-empty-rows": _entry(
        "dlse is -inf where lse is", 2, dense(16, 8), attn_mask_type="causal_bottom_right", call={"loss": "lse"}
    ),
    "lse-gradient-alone": _entry("no gradient of out: dv is 0", 2, dense(8), call={"loss": "lse"}),
    "lse-gradient-with-sink": _entry(
        "lse counts the sink, and so does its gradient", 2, dense(8), softmax_type="learnable", call={"loss": "lse"}
    ),
    "zero-dout": _entry("every gradient is 0", 2, dense(8), change=_no_dout, call={"loss": "out"}),
    "gradients-of-a-ring-of-eight": _entry(
        "dk and dv are added up in float32, however long the ring",
        8,
        dense(256),
        attn_mask_type="no_mask",
        **(_FEW | {"dtype": "float16", "d_qk": 32, "d_v": 32}),
        tiers=("budget",),
        call={"loss": "out"},
    ),
    "gradient-of-k-alone": _entry("only k needs one", 2, dense(8), call={"grads": "k"}),
    "gradient-of-v-alone": _entry("only v needs one", 2, dense(8), call={"grads": "v"}),
    "gradient-of-the-sink-alone": _entry(
        "only softmax_offset needs one", 2, dense(8), softmax_type="learnable", call={"grads": "o"}
    ),
    "no-gradient": _entry("no input needs one", 2, dense(8), call={"grads": ""}),
    # max_logit
    "max-logit-of-nothing": _entry("-inf on every rank", 2, dense(8, 0), call={"loss": "out"}),
    "max-logit-on-one-rank": _entry(
        "the largest score is on the first rank's first row", 4, dense(16), change=_one_dominant_key
    ),
}
