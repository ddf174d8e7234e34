"""The table of special cases: every edge of what attention means, one name each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from conformance.case import SCORE_MODS
from conformance.problems.named import PADDED, Change, NamedCases, TableEntry, dense, entry, one_dominant_key
from conformance.tensors import GlobalTensors
from cp_ref.schedules.problem import Sequence

__all__ = ["SPECIAL", "SpecialCase"]


def _with_offset(value: float) -> Change:
    return lambda t: replace(t, softmax_offset=torch.full_like(_offset(t), value))


def _offset(t: GlobalTensors) -> torch.Tensor:
    assert t.softmax_offset is not None
    return t.softmax_offset


def _constant_scores(q: float, k: float) -> Change:
    """Every score q * k * d * scale; NaN of padding stays."""
    return lambda t: replace(t, q=t.q * 0 + q, k=t.k * 0 + k)


VALUES: dict[str, TableEntry] = {
    "equal-scores": entry("q = 0: every weight is 1 / n", 2, dense(8), change=_constant_scores(0.0, 1.0)),
    "very-negative-scores": entry(
        "every score -1e4: lse is not near 0",
        2,
        dense(8),
        change=_constant_scores(60.0, -60.0),
        call={"magnitude": 60.0},
    ),
    "very-positive-scores": entry(
        "every score 1e4: exp overflows without a maximum",
        2,
        dense(8),
        change=_constant_scores(60.0, 60.0),
        call={"magnitude": 60.0},
    ),
    "huge-lse": entry("scores of some 1e5", 2, dense(16), call={"magnitude": 300.0}),
    "one-dominant-key": entry("one weight is 1, the others are 0", 2, dense(8), change=one_dominant_key),
    "softcap-saturated": entry("scores far beyond the softcap", 2, dense(8), softcap=2.0, call={"magnitude": 30.0}),
    "softcap-and-everything": entry(
        "softcap, window, sink and groups", 2, *PADDED, softcap=3.0, window_size=(3, 0), softmax_type="learnable"
    ),
    "sink-huge": entry(
        "a sink that takes all the weight", 2, dense(8), softmax_type="learnable", change=_with_offset(200.0)
    ),
    "sink-tiny": entry("a sink that takes none", 2, dense(8), softmax_type="learnable", change=_with_offset(-200.0)),
    "scale-tiny": entry("softmax_scale 1e-6", 2, dense(8), softmax_scale=1e-6),
    "scale-one": entry("softmax_scale 1", 2, dense(8), softmax_scale=1.0),
    "float16-scores-beyond-its-range": entry(
        "q.k is more than 65,504", 2, dense(8), dtype="float16", change=_constant_scores(120.0, 120.0), tiers=("logic",)
    ),
    "bfloat16-scores-beyond-its-precision": entry(
        "scores that bfloat16 cannot tell apart", 2, dense(8), dtype="bfloat16", change=_constant_scores(40.0, 40.0)
    ),
}


_NONE = [Sequence(0, 0, 0, 0)] * 1000
_BATCH: dict[str, Any] = {"qkv_format": "bshd", "attn_mask_type": "padding_causal"}


LENGTHS: dict[str, TableEntry] = {
    # lengths
    "no-sequence": entry("a batch of none", 2, tails=(4, 2)),
    "no-sequence-no-slot": entry("tensors without a single row", 2),
    "only-empty-sequences": entry("three sequences of length 0", 2, *[Sequence(0, 0, 0, 0)] * 3),
    "empty-sequence-first": entry("nothing, then something", 2, Sequence(0, 0, 0, 0), dense(8)),
    "empty-sequence-between": entry("nothing in the middle", 2, dense(8), Sequence(0, 0, 0, 0), dense(4)),
    "empty-sequence-last": entry("something, then nothing", 2, dense(8), Sequence(0, 0, 0, 0)),
    "no-queries": entry("keys that nobody asks for: their gradients are 0", 2, Sequence(0, 8, 0, 8), dense(4)),
    "no-keys": entry("queries that see nothing: out 0, lse -inf", 2, Sequence(8, 0, 8, 0), dense(4)),
    "no-keys-off-by-one": entry(
        "queries that see the sink alone: out 0, lse 0", 2, Sequence(8, 0, 8, 0), dense(4), softmax_type="off-by-one"
    ),
    "no-keys-learnable": entry(
        "queries that see the sink alone: lse is its logit", 2, Sequence(8, 0, 8, 0), softmax_type="learnable"
    ),
    "one-token": entry("one token in its slots", 2, Sequence(1, 1, 4, 4)),
    "one-query-many-keys": entry("a decoding step", 2, Sequence(1, 16, 4, 16), attn_mask_type="no_mask"),
    "one-query-bottom-right": entry(
        "a decoding step, causal", 2, Sequence(1, 16, 4, 16), attn_mask_type="causal_bottom_right"
    ),
    "many-queries-one-key": entry("every query sees one key, or none", 2, Sequence(16, 1, 16, 4)),
    "one-token-per-rank": entry("contiguous, as many tokens as ranks", 4, dense(4), layout="contiguous"),
    "one-token-per-chunk": entry("dual_chunk, as many tokens as chunks", 4, dense(8)),
    "shorter-than-the-group": entry("fewer tokens than ranks", 4, Sequence(3, 3, 8, 8)),
    "a-rank-of-padding": entry("some ranks hold nothing real", 4, Sequence(5, 5, 32, 32)),
    "all-padding": entry("slots, and not one token", 2, Sequence(0, 0, 16, 16)),
    "one-less-than-a-chunk": entry("the last slot of the first chunk is padding", 2, Sequence(3, 3, 16, 16)),
    "one-more-than-a-chunk": entry("the second chunk has one token", 2, Sequence(5, 5, 16, 16)),
    "one-less-than-all": entry("the very last slot is padding", 4, Sequence(31, 31, 32, 32)),
    "uneven": entry("dual_chunk of lengths that do not divide", 4, dense(13), dense(1), dense(6), layout="dual_chunk"),
    "uneven-contiguous": entry("parts of which the last is shorter", 4, dense(5), dense(4), layout="contiguous"),
    "fewer-tokens-than-ranks": entry("slices of one row, and ranks with tail alone", 4, dense(3)),
    "balanced-one-document": entry("cut for every rank", 4, dense(37), layout="balanced"),
    "balanced-of-length-1": entry("nothing travels", 4, *[dense(1)] * 9, layout="balanced"),
    "balanced-one-is-nearly-all": entry("a long one, and crumbs", 4, dense(61), *[dense(1)] * 3, layout="balanced"),
    "balanced-empty-documents": entry(
        "some have no token", 3, dense(0), dense(11), dense(0), dense(4), dense(0), layout="balanced"
    ),
    "balanced-fewer-tokens-than-ranks": entry("a rank of tail alone", 4, dense(2), dense(1), layout="balanced"),
    "balanced-many-documents": entry(
        "of one and two tokens",
        4,
        *[dense(1), dense(2)] * 300,
        layout="balanced",
        cp_comm_type="p2p",
        heads_q=1,
        heads_kv=1,
        tiers=("logic",),
    ),
    "sequence-inside-a-rank": entry(
        "contiguous: whole sequences on one rank", 2, dense(3), dense(5), dense(8), layout="contiguous"
    ),
    "sequence-across-ranks": entry(
        "contiguous: a sequence that begins and ends inside ranks",
        4,
        dense(1),
        dense(13),
        dense(2),
        layout="contiguous",
    ),
    "hundreds-of-sequences": entry("120 sequences of 4 slots", 2, *[Sequence(3, 3, 4, 4), dense(4)] * 60),
    "thousands-of-empty-sequences": entry(
        "2,003 sequences, three of them with tokens", 2, dense(4), *_NONE, dense(8), *_NONE, dense(4), tiers=("logic",)
    ),
    "tile-borders": entry("63, 64 and 65 tokens", 2, Sequence(63, 63, 64, 64), dense(64), Sequence(65, 65, 68, 68)),
    # padding and tails
    "padding-between": entry("padding after every sequence", 2, *PADDED),
    "padding-of-keys-alone": entry("keys are padded, queries are not", 2, Sequence(8, 5, 8, 8), dense(8)),
    "padding-of-queries-alone": entry("queries are padded, keys are not", 2, Sequence(5, 8, 8, 8), dense(8)),
    "tail": entry("a buffer longer than its sequences", 2, dense(8), tails=(6, 6)),
    "tail-of-queries": entry("a tail of queries, none of keys", 2, dense(8), tails=(10, 0)),
    "tail-of-keys": entry("a tail of keys, none of queries", 2, dense(8), tails=(0, 10)),
    "tail-longer-than-all": entry("more tail than tokens", 2, Sequence(1, 1, 4, 4), tails=(64, 64)),
    "tail-after-padding": entry("padding, then a tail", 4, Sequence(9, 9, 16, 16), tails=(4, 8)),
    "padding-mask-in-a-batch": entry(
        "bshd with lengths of its own for every sequence",
        2,
        *(Sequence(n, n, 8, 8) for n in (8, 5, 1, 0)),
        **_BATCH,
    ),
    "padding-mask-in-sbhd": entry(
        "sbhd with lengths, queries and keys apart",
        2,
        Sequence(8, 3, 8, 12),
        Sequence(2, 12, 8, 12),
        **(_BATCH | {"qkv_format": "sbhd"}),  # pyright: ignore[reportArgumentType]
    ),
    "sbhd-of-equal-lengths": entry(
        "sbhd without padding, a sink per head: a batch that may be folded into the heads",
        2,
        *[dense(8)] * 3,
        qkv_format="sbhd",
        attn_mask_type="causal",
        softmax_type="learnable",
    ),
}


_FEW: dict[str, Any] = {"dtype": "float32", "heads_q": 2, "heads_kv": 1, "d_qk": 1, "d_v": 4}
_FEW_WIDE: dict[str, Any] = _FEW | {"dtype": "float64"}


MASKS: dict[str, TableEntry] = {
    # masks
    "bottom-right-fewer-keys": entry(
        "d < 0: the first queries see nothing", 2, dense(16, 8), attn_mask_type="causal_bottom_right"
    ),
    "bottom-right-more-keys": entry(
        "d > 0: the first query sees many", 2, dense(8, 16), attn_mask_type="causal_bottom_right"
    ),
    "bottom-right-by-real-lengths": entry(
        "d is of tokens, not of slots", 2, Sequence(5, 7, 8, 16), attn_mask_type="padding_causal_bottom_right"
    ),
    "bottom-right-another-d-each": entry(
        "d differs in sign between sequences",
        2,
        dense(12, 4),
        dense(4, 12),
        dense(8),
        attn_mask_type="padding_causal_bottom_right",
    ),
    "bottom-right-empty-rows-and-sink": entry(
        "rows that see the sink alone", 2, dense(16, 4), attn_mask_type="causal_bottom_right", softmax_type="learnable"
    ),
    "bottom-right-window": entry(
        "a window around a shifted diagonal", 2, dense(8, 16), attn_mask_type="causal_bottom_right", window_size=(3, 0)
    ),
    "causal-more-keys": entry("top-left: the last keys are seen by nobody", 2, dense(8, 16)),
    "causal-more-queries": entry("top-left: the last queries see all keys", 2, dense(16, 8)),
    "window-of-itself": entry("window (0, 0): each query sees its own key", 4, dense(16), window_size=(0, 0)),
    "window-of-itself-unmasked": entry(
        "the same without a causal mask", 2, dense(12), window_size=(0, 0), attn_mask_type="no_mask"
    ),
    "window-of-one": entry("window (1, 0)", 4, dense(16), window_size=(1, 0)),
    "window-larger-than-all": entry("a window wider than the sequence", 2, dense(8), window_size=(100, 100)),
    "window-as-long-as-all": entry("left = length - 1 hides nothing", 2, dense(8), window_size=(7, 0)),
    "window-one-short-of-all": entry("left = length - 2 hides one pair", 2, dense(8), window_size=(6, 0)),
    "window-at-a-chunk": entry("left = a chunk", 4, dense(32), window_size=(4, 0)),
    "window-right-alone": entry("keys up to three ahead", 2, dense(16), window_size=(-1, 3), attn_mask_type="no_mask"),
    "window-left-alone": entry("without a causal mask", 2, dense(16), window_size=(2, -1), attn_mask_type="no_mask"),
    "window-in-a-batch": entry(
        "it crosses the corners of tiles in many ways",
        4,
        dense(96),
        window_size=(17, 17),
        qkv_format="bshd",
        attn_mask_type="no_mask",
    ),
    "window-past-the-keys": entry(
        "the last queries see nothing", 2, dense(16, 4), window_size=(2, 2), attn_mask_type="no_mask"
    ),
    "positions-beyond-1024": entry(
        "1,504 tokens: tables of positions that end at a power of two", 2, dense(1504), tiers=("probes",), **_FEW
    ),
    "positions-beyond-4096": entry(  # float32 does not count so far by plain sums
        "4,112 tokens", 2, dense(4112), tiers=("probes",), **_FEW_WIDE
    ),
    "positions-beyond-65536": entry("70,000 tokens, on a GPU", 4, dense(70_000), tiers=("probes",), gpu=True, **_FEW),
    "one-key-too-few": entry("rows of 200 keys: one less changes an error bound by nothing", 2, dense(200)),
    "window-and-sink": entry("both at once", 2, dense(16), window_size=(3, 0), softmax_type="learnable"),
    # areas
    "areas-prompt-and-answers": entry(
        "a prompt that three answers see, which do not see each other",
        2,
        dense(16),
        areas=((0, 4, 0, 4, -1, 0), (4, 16, 0, 4, -1, -1), *((n, n + 4, n, n + 4, -1, 0) for n in (4, 8, 12))),
        attn_mask_type="causal",
    ),
    "areas-before-a-causal-one": entry(
        "keys of three places, the last ones causal, for the same queries",
        2,
        dense(16),
        areas=((0, 8, 0, 8, -1, 0), (8, 16, 0, 2, -1, -1), (8, 16, 5, 8, -1, -1), (8, 16, 8, 16, -1, 0)),
        attn_mask_type="causal",
        layout="contiguous",
    ),
    "areas-of-blocks": entry(
        "each block of four sees all before it and itself: a staircase of rectangles",
        2,
        dense(32),
        areas=tuple((n, n + 4, 0, n + 4, -1, -1) for n in range(0, 32, 4)),
        attn_mask_type="causal",
    ),
    "areas-across-documents": entry(
        "documents see each other, and no area sees padding",
        2,
        *PADDED,
        areas=((0, 24, 0, 24, -1, 0),),
        attn_mask_type="causal",
    ),
}


HEADS: dict[str, TableEntry] = {
    # heads and head dims
    "fewer-kv-heads-than-ranks": entry("2 kv heads on 4 ranks: replicated", 4, dense(16), heads_q=8, heads_kv=2),
    "one-kv-head": entry("multi-query attention on 4 ranks", 4, dense(16), heads_q=4, heads_kv=1),
    "one-query-head-per-rank": entry("8 heads on 8 ranks", 8, dense(16), heads_q=8, heads_kv=8),
    "groups-of-six": entry("12 query heads over 2", 2, dense(8), heads_q=12, heads_kv=2),
    "three-kv-heads": entry("6 query heads over 3, on 3 ranks", 3, dense(12), heads_q=6, heads_kv=3),
    "head-dim-1": entry("d_qk 1, d_v 1", 2, dense(8), d_qk=1, d_v=1),
    "head-dim-odd": entry("d_qk 5, d_v 3", 2, dense(8), d_qk=5, d_v=3),
    "head-dim-192-128": entry("latent attention, grouped", 2, dense(8), d_qk=192, d_v=128),
    "head-dim-128-192": entry("d_v larger than d_qk", 2, dense(8), d_qk=128, d_v=192),
    "head-dim-256": entry("the largest of most kernels", 2, dense(8), d_qk=256, d_v=256),
    "head-dim-264": entry("larger than that of most kernels", 2, dense(8), d_qk=264, d_v=264),
    # groups
    "group-of-one": entry("cp_size 1", 1, dense(8), Sequence(3, 3, 4, 4)),
    "group-of-seven": entry("a prime number of ranks", 7, dense(14), heads_q=7, heads_kv=1),
    "group-of-sixteen": entry(
        "more ranks than any head count here", 16, dense(32), heads_q=16, heads_kv=4, tiers=("logic",)
    ),
    "inner-group-of-one": entry("a2a+p2p that is a ring", 4, dense(16), cp_comm_type="a2a+p2p", a2a_size=1),
    "inner-group-of-all": entry("a2a+p2p that is an a2a", 4, dense(16), cp_comm_type="a2a+p2p", a2a_size=4),
}


def _no_dout(t: GlobalTensors) -> GlobalTensors:
    return replace(t, dout=t.dout * 0)


GRADIENTS: dict[str, TableEntry] = {
    # gradients
    "lse-gradient-of-empty-rows": entry(
        "dlse is -inf where lse is", 2, dense(16, 8), attn_mask_type="causal_bottom_right", call={"loss": "lse"}
    ),
    "lse-gradient-alone": entry("no gradient of out: dv is 0", 2, dense(8), call={"loss": "lse"}),
    "lse-gradient-with-sink": entry(
        "lse counts the sink, and so does its gradient", 2, dense(8), softmax_type="learnable", call={"loss": "lse"}
    ),
    "zero-dout": entry("every gradient is 0", 2, dense(8), change=_no_dout, call={"loss": "out"}),
    "gradients-of-a-ring-of-eight": entry(
        "dk and dv are added up in float32, however long the ring",
        8,
        dense(256),
        attn_mask_type="no_mask",
        dtype="float16",
        heads_q=2,
        heads_kv=1,
        d_qk=32,
        d_v=32,
        tiers=("budget",),
        call={"loss": "out"},
    ),
    "gradient-of-k-alone": entry("only k needs one", 2, dense(8), call={"grads": "k"}),
    "gradient-of-v-alone": entry("only v needs one", 2, dense(8), call={"grads": "v"}),
    "gradient-of-the-sink-alone": entry(
        "only softmax_offset needs one", 2, dense(8), softmax_type="learnable", call={"grads": "o"}
    ),
    "no-gradient": entry("no input needs one", 2, dense(8), call={"grads": ""}),
    # max_logit
    "max-logit-of-nothing": entry("-inf on every rank", 2, dense(8, 0), call={"loss": "out"}),
    "max-logit-on-one-rank": entry(
        "the largest score is on the first rank's first row", 4, dense(16), change=one_dominant_key
    ),
}


_CROSS = (Sequence(5, 8, 8, 8), Sequence(8, 3, 8, 8), Sequence(4, 4, 4, 4))
_LONG = (Sequence(17, 23, 24, 24), Sequence(16, 16, 16, 16), Sequence(8, 3, 8, 8))
_WHOLE = {"d_qk": 64, "d_v": 64, "dropout_p": 0.5, "attn_mask_type": "padding"}  # 64 dims: each pair by itself
_MASKED = ("probes",)

SCORES: dict[str, TableEntry] = {
    "alibi": entry("slopes [h_q], more and fewer keys than queries", 2, *_CROSS, call={"alibi": "head"}),
    "alibi-by-document": entry("slopes [b, h_q]", 2, *_CROSS, call={"alibi": "document"}),
    "alibi-padded": entry(
        "the diagonal is that of real lengths, not of slots", 2, *PADDED, call={"alibi": "head"}, qkv_format="bshd"
    ),
    "alibi-softcap-window": entry(
        "after the softcap, before the mask", 2, *_LONG, call={"alibi": "head"}, softcap=2.0, window_size=(5, 0)
    ),
    **{
        f"score-mod-{name.replace('_', '-')}": entry(f"the score_mod {name}", 2, *_CROSS, score_mod=name)
        for name in SCORE_MODS
    },
    "score-mod-after-alibi": entry(
        "a score_mod gets the score with its bias", 2, *_CROSS, call={"alibi": "head"}, score_mod="capped"
    ),
    "score-mod-hides-all": entry(
        "rows whose only key is hidden by the score_mod", 2, *_LONG, score_mod="hidden", window_size=(0, 0)
    ),
    **{
        f"dropout-mask-on-{size}": entry(
            f"the whole mask on {size} ranks", size, *_LONG, tiers=_MASKED, heads_q=heads, **_WHOLE
        )
        for size, heads in ((1, 4), (2, 4), (3, 6), (4, 4), (8, 8))
    },
    **{
        f"dropout-mask-{layout}": entry(
            f"the whole mask in the layout {layout}", 4, dense(17), dense(24), dense(16), tiers=_MASKED, layout=layout,
            **_WHOLE,
        )
        for layout in ("contiguous", "balanced")
    },
    **{
        f"dropout-mask-{fmt}": entry(
            f"the whole mask in {fmt}", 4, *[Sequence(19, 21, 24, 24)] * 2, tiers=_MASKED, qkv_format=fmt, **_WHOLE
        )
        for fmt in ("bshd", "sbhd")
    },
    "dropout-and-sink": entry(
        "lse and the sink are those without dropout", 2, *_LONG, dropout_p=0.3, softmax_type="learnable"
    ),
    "dropout-of-nearly-all": entry("rows that keep nothing", 2, *_LONG, dropout_p=0.97),
    "dropout-of-nearly-none": entry("p = 2**-32, the smallest", 2, *_LONG, dropout_p=2.0**-32),
    "dropout-and-everything": entry(
        "ALiBi, score_mod, softcap, window, sink and dropout", 2, *_LONG, call={"alibi": "document"}, dropout_p=0.4,
        score_mod="near", softcap=3.0, window_size=(7, 0), softmax_type="off-by-one",
    ),
}  # fmt: skip


SPECIAL: dict[str, TableEntry] = VALUES | LENGTHS | MASKS | HEADS | GRADIENTS | SCORES


class SpecialCase(NamedCases):
    """An edge of what attention means, under every schedule."""

    word = "special"
    table: ClassVar[dict[str, TableEntry]] = SPECIAL
