"""Special values: scores, sinks, scales and softcaps at their edges."""

from __future__ import annotations

from dataclasses import replace

import torch

from conformance.judge.named_entries import Change, TableEntry, dense
from conformance.run.case_tensors import GlobalTensors
from conformance.special.entry import PADDED, entry, one_dominant_key

__all__ = ["VALUES"]


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
