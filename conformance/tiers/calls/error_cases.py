"""The table of the tier `errors`: every change that makes a good call malformed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from conformance.scores.score_mods import SCORE_MODS
from conformance.tiers.calls.small_calls import SmallCall, cu

__all__ = ["ERRORS", "ErrorCase"]


@dataclass(frozen=True)
class ErrorCase:
    """How a good call is changed to a malformed one, and what the message has to name (a regular expression)."""

    base: str
    names: str
    change: Callable[[SmallCall], SmallCall]
    alone: bool = True  # Also change it on one rank alone.
    one_rank_only: bool = False  # Well-formed by itself, but another problem than the other ranks'.
    layout: str = ""  # The only layout in which it is malformed.
    needs: str = ""  # A parameter of `attention` that others need not have.


def _lengths(name: str, *values: int, names: str = "", **more: torch.Tensor) -> ErrorCase:
    return ErrorCase("thd", names or rf"\b{name}\b", lambda call: call.having(**{name: cu(*values)}, **more))


def _with(name: str, value: Any, names: str = "", base: str = "bshd", **more: Any) -> ErrorCase:
    return ErrorCase(base, names or rf"\b{name}\b", lambda call: call.having(**{name: value}, **more))


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor], names: str, base: str = "bshd") -> ErrorCase:
    return ErrorCase(base, names, lambda call: call.having(**{name: change(call.arguments[name])}))


def _context(name: str, value: Any) -> ErrorCase:  # A constructor is no collective: the other ranks cannot know.
    return ErrorCase("bshd", rf"\b{name}\b", lambda call: call.using(**{name: value}), alone=False)


def _different(name: str, value: Any, base: str = "bshd", names: str = "") -> ErrorCase:
    return ErrorCase(base, names or name, lambda call: call.having(**{name: value}), one_rank_only=True)


def _function(what: str, names: str, **arguments: Any) -> ErrorCase:
    return ErrorCase("bshd", names, lambda call: call.calling(what, **arguments), alone=False)


def _other_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(torch.float32 if x.dtype == dtype else dtype)


def _needing(needs: str, case: ErrorCase) -> ErrorCase:
    return replace(case, needs=needs)


_TABLE = torch.ones(4)


def _captures(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * _TABLE[h]


_PADDED = cu(0, 8, 12)

ERRORS: dict[str, ErrorCase] = {
    # lengths
    "lengths-decrease": _lengths("cu_seqlens_q", 0, 7, 5),
    "lengths-negative": _lengths("cu_seqlens_q", 0, -2, 5),
    "lengths-start-late": _lengths("cu_seqlens_q", 1, 5, 9),
    "lengths-kv-decrease": _lengths("cu_seqlens_kv", 0, 7, 5, cu_seqlens_kv_padded=_PADDED),
    "lengths-padded-decrease": _lengths("cu_seqlens_q_padded", 0, 12, 8, cu_seqlens_kv_padded=_PADDED),
    "lengths-kv-padded-negative": _lengths("cu_seqlens_kv_padded", 0, -4, 12),
    "lengths-float": _with("cu_seqlens_q", torch.tensor([0.0, 5.0, 9.0]), base="thd"),
    "lengths-2d": _with("cu_seqlens_q", torch.zeros(2, 3, dtype=torch.int32), base="thd"),
    "lengths-list": _with("cu_seqlens_q", [0, 5, 9], base="thd"),
    "lengths-missing": _with("cu_seqlens_q", None, base="thd"),
    "lengths-counts-differ": _lengths("cu_seqlens_kv", 0, 3, 5, 9),
    "lengths-padded-counts-differ": _lengths("cu_seqlens_q_padded", 0, 12),
    "lengths-over-slots": _lengths(
        "cu_seqlens_q", 0, 9, 12, names=r"cu_seqlens_q(_padded)?\b.*sequence 0|sequence 0.*cu_seqlens_q"
    ),
    "lengths-padded-missing-for-padding": _with("cu_seqlens_q", None, r"\bcu_seqlens_q\b", attn_mask_type="padding"),
    "lengths-beyond-tensor": _with(
        "cu_seqlens_q", cu(0, 5, 14), r"\bcu_seqlens_q\b.*sequence 1", attn_mask_type="padding"
    ),
    "lengths-of-another-batch": _with("cu_seqlens_q", cu(0, 5), attn_mask_type="padding"),
    "lengths-without-padding-mask": _with("cu_seqlens_q", cu(0, 5, 9)),
    "lengths-padded-outside-thd": _with("cu_seqlens_q_padded", cu(0, 8, 16)),
    # totals
    "q-shorter-than-lengths": _tensor("q", lambda x: x[:5], r"\bq\b", "thd"),
    "k-and-v-shorter-than-lengths": ErrorCase(
        "thd", r"\b(k|v|kv)\b", lambda call: call.having(k=call.arguments["k"][:5], v=call.arguments["v"][:5])
    ),
    "k-and-v-differ": _tensor("v", lambda x: x[:, :2], r"\bv\b"),
    # tensors
    "q-no-tensor": _with("q", [[1.0]]),
    "v-none": _with("v", None),
    "q-too-few-dims": _tensor("q", lambda x: x[0], r"\bq\b"),
    "k-dtype": _tensor("k", lambda x: _other_dtype(x, torch.bfloat16), r"\bk\b.*dtype"),
    "v-dtype": _tensor("v", lambda x: _other_dtype(x, torch.float64), r"\bv\b.*dtype"),
    "integer-dtype": ErrorCase(
        "bshd", "dtype", lambda call: call.having(**{name: call.arguments[name].int() for name in ("q", "k", "v")})
    ),
    "v-device": _tensor("v", lambda x: x.to("meta"), r"\bv\b.*meta"),
    "k-head-dim": _tensor("k", lambda x: x[..., :4], r"(?s)\bk\b|d_qk"),
    "k-and-v-heads": _tensor("k", lambda x: x[..., :1, :], r"\bk\b"),
    "k-and-v-batch": ErrorCase(
        "bshd", r"(?i)batch", lambda call: call.having(k=call.arguments["k"][:1], v=call.arguments["v"][:1])
    ),
    "heads-not-a-multiple": _tensor("q", lambda x: x[..., :3, :], r"h_q.*\b3\b.*h_kv.*\b2\b"),
    "no-heads": _tensor("q", lambda x: x[..., :0, :], "h_q|heads"),
    # choices and numbers
    "format-unknown": _with("qkv_format", "bhsd"),
    "mask-unknown": _with("attn_mask_type", "diagonal"),
    "softmax-unknown": _with("softmax_type", "sigmoid"),
    "comm-unknown": _context("cp_comm_type", "carrier_pigeon"),
    "layout-unknown": _context("layout", "striped"),
    "backend-unknown": _context("backend", "abacus"),
    "group-of-another-kind": _context("group", "the whole world"),
    "window-below-minus-one": _with("window_size", (-2, 0)),
    "window-right-below-minus-one": _with("window_size", (3, -5), attn_mask_type="no_mask"),
    "window-three-sides": _with("window_size", (1, 2, 3)),
    "window-float": _with("window_size", (1.5, 0)),
    "window-number": _with("window_size", 4),
    "scale-nan": _with("softmax_scale", float("nan")),
    "scale-infinite": _with("softmax_scale", float("inf")),
    "scale-text": _with("softmax_scale", "0.5"),
    "softcap-nan": _with("softcap", float("nan")),
    "softcap-infinite": _with("softcap", float("inf")),
    "softcap-negative": _with("softcap", -1.0),
    "offset-missing": _with("softmax_offset", None, softmax_type="learnable"),
    "offset-shape": _with("softmax_offset", torch.zeros(3), softmax_type="learnable"),
    "offset-unasked": _with("softmax_offset", torch.zeros(4)),
    # scores of places
    "alibi-shape": _needing("alibi_slopes", _with("alibi_slopes", torch.ones(3))),
    "alibi-dtype": _needing("alibi_slopes", _with("alibi_slopes", torch.ones(4, dtype=torch.float64))),
    "alibi-gradient": _needing("alibi_slopes", _with("alibi_slopes", torch.ones(4, requires_grad=True))),
    "score-mod-no-function": _needing("score_mod", _with("score_mod", "alibi")),
    "score-mod-captures-a-tensor": _needing("score_mod", _with("score_mod", _captures, "score_mod.*_TABLE")),
    "aux-tensors-unasked": _needing("score_mod", _with("aux_tensors", {"bias": torch.ones(4)})),
    "aux-tensors-missing": _needing("score_mod", _with("score_mod", SCORE_MODS["by_key"], "aux_tensors")),
    "dropout-of-everything": _needing("dropout_p", _with("dropout_p", 1.0, base="dropout")),
    "dropout-negative": _needing("dropout_p", _with("dropout_p", -0.5, base="dropout")),
    "dropout-without-a-seed": _needing("dropout_p", _with("dropout_seed", None, base="dropout")),
    "dropout-seed-float": _needing("dropout_p", _with("dropout_seed", 3.0, base="dropout")),
    # plans
    "plan-heads": _with("heads_q", 0, "heads_q|h_q", "plan"),
    "plan-heads-not-a-multiple": _with("heads_q", 3, r"(heads_q|h_q).*\b3\b", "plan"),
    "plan-length-missing": _with("seqlen_q", None, base="plan"),
    "plan-window": _with("window_size", (0, -3), base="plan"),
    "plan-no-plan": _with("plan", "a good plan", "plan"),
    "plan-beside-lengths": ErrorCase(
        "bshd", "cu_seqlens_q", lambda call: call.planned(2).having(cu_seqlens_q=cu(0, 8, 16)), alone=False
    ),
    "plan-contradicted": ErrorCase("bshd", "softcap", lambda call: call.planned(2).having(softcap=1.0), alone=False),
    "plan-of-other-shapes": ErrorCase(
        "bshd", r"\bq\b", lambda call: call.planned(2).having(q=call.arguments["q"][:, :2]), alone=False
    ),
    "plan-of-another-dtype": ErrorCase(
        "bshd",
        "dtype",
        lambda call: call.planned(2).having(
            **{name: _other_dtype(call.arguments[name], torch.float64) for name in ("q", "k", "v")}
        ),
        alone=False,
    ),
    "plan-of-another-group-size": ErrorCase(
        "bshd",
        r"cp_size|size|group|rank",
        # The length of rank 0's slice in the larger group, so that the shapes alone do not show it.
        lambda call: call.planned(4).having(**{name: call.arguments[name][:, :2] for name in ("q", "k", "v")}),
        alone=False,
    ),
    "plan-of-another-layout": ErrorCase(
        "bshd", "layout", lambda call: call.planned(2, layout="contiguous"), alone=False, layout="dual_chunk"
    ),
    # sharding
    "shard-without-lengths": _function("shard", "cu_seqlens_padded", x=torch.zeros(12), qkv_format="thd"),
    "shard-too-short": _function(
        "shard", r"\bx\b|cu_seqlens_padded", x=torch.zeros(10), qkv_format="thd", cu_seqlens_padded=cu(0, 8, 12)
    ),
    "shard-format": _function("shard", "qkv_format", x=torch.zeros(2, 8), qkv_format="hsbd"),
    "unshard-without-lengths": _function("unshard", "cu_seqlens_padded", x=torch.zeros(6), qkv_format="thd"),
    "positions-without-length": _function("position_ids", "seqlen"),
    # Well-formed, but not the other ranks' problem.
    "ranks-differ-in-softcap": _different("softcap", 2.0),
    "ranks-differ-in-window": _different("window_size", (2, 0), names="window"),
    "ranks-differ-in-mask": _different("attn_mask_type", "no_mask", names="mask"),
    "ranks-differ-in-scale": _different("softmax_scale", 0.5, names="scale"),
    "ranks-differ-in-softmax": _different("softmax_type", "off-by-one", names="softmax"),
    "ranks-differ-in-lengths": _different("cu_seqlens_q", cu(0, 4, 8), "thd", names="sequence|cu_seqlens|length"),
    "ranks-differ-in-alibi": _needing("alibi_slopes", _different("alibi_slopes", torch.ones(4))),
    "ranks-differ-in-score-mod": _needing("score_mod", _different("score_mod", SCORE_MODS["capped"])),
    "ranks-differ-in-dropout": _needing("dropout_p", _different("dropout_p", 0.25, "dropout")),
    "ranks-differ-in-seed": _needing("dropout_p", _different("dropout_seed", 4, "dropout")),
    "ranks-differ-in-plans": ErrorCase("plan", "softcap", lambda call: call.having(softcap=3.0), one_rank_only=True),
    "ranks-differ-in-layout": ErrorCase(
        "bshd", "layout", lambda call: call.using(layout="contiguous"), one_rank_only=True, layout="dual_chunk"
    ),
}
