"""Special masks: alignments, windows and attention slices."""

from __future__ import annotations

from typing import Any

from conformance.judge.named_entries import TableEntry, dense
from conformance.special.entry import PADDED, entry
from cp_ref.schedules.problem import Sequence

__all__ = ["MASKS"]

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
    # attention slices
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
