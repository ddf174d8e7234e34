"""Scores of places at their edges: ALiBi, score_mod, and the mask of dropout on every schedule, layout and group size.

The masks are seen whole: with q = 0 and v an indicator, out says which keys each query kept, and with dout an indicator
dv says which queries kept each key. Both must be the documented hash, bit for bit, so they are the same everywhere.
"""

from __future__ import annotations

from conformance.judge.named_entries import TableEntry, dense
from conformance.scores.score_mods import SCORE_MODS
from conformance.special.entry import PADDED, entry
from cp_ref.schedules.problem import Sequence

__all__ = ["SCORES"]

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
