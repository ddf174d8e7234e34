"""Special lengths: sequences of none and of one token, uneven ones, padding and tails."""

from __future__ import annotations

from typing import Any

from conformance.judge.named_entries import TableEntry, dense
from conformance.special.entry import PADDED, entry
from cp_ref.schedules.problem import Sequence

__all__ = ["LENGTHS"]

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
