"""Special gradients: of lse, of some inputs alone; and max_logit."""

from __future__ import annotations

from dataclasses import replace

from conformance.judge.named_entries import TableEntry, dense
from conformance.run.case_tensors import GlobalTensors
from conformance.special.entry import entry, one_dominant_key

__all__ = ["GRADIENTS"]


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
