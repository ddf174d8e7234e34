"""Tier `errors`: malformed calls. Every rank has to raise, with a message that names the argument; none may hang or
compute.

Each entry of `ERRORS` is a good call with one thing changed. An entry is played twice: changed on every rank, and
changed on the last rank alone, where every other rank has to raise as well, or it would wait for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from conformance.case import SCORE_MODS, Case
from conformance.checks.calls import check_plan
from conformance.checks.play import play
from conformance.checks.reference import Hang, Outcome, UnsupportedCase, describe_error, run_ranks
from conformance.implementation import Implementation
from conformance.problems.capabilities import Capabilities, capabilities_of, first_of, variants
from conformance.problems.problem import NamedProblem
from conformance.record import Judged
from conformance.tensors import build
from cp_ref.schedules.problem import Problem, Sequence

__all__ = ["ERRORS", "ErrorCase", "MalformedCall", "SmallCall", "call_of", "cu", "good_call"]

# ---- good calls
#
# Small good calls on two ranks, which the tier `errors` changes to malformed ones.


_PLAIN = {"cp_comm_type": "p2p", "layout": "dual_chunk"}


@dataclass(frozen=True)
class SmallCall:
    """One rank's call: of `attention`, or of what `what` names. cp_size 2, h_q 4, h_kv 2, d 8.

    bshd: [2, 4, h, 8] per rank, so 2 sequences of 8. thd: 6 tokens per rank; lengths 5 and 4 in 8 and 4 slots.
    """

    arguments: dict[str, Any]
    context: dict[str, Any] = field(default_factory=dict)
    what: str = "attention"
    plan_of: int = 0  # Make a plan first, with the good call's arguments, in a group of this size.
    plan_context: dict[str, Any] = field(default_factory=dict)
    plan_dtype: torch.dtype = torch.float32

    def run(self, impl: Implementation, member: Any) -> Any:
        """Make the ContextParallel and the call."""
        arguments = dict(self.arguments)
        if self.plan_of:
            plan_call = replace(good_call("plan", "cpu", self.plan_dtype), context=self.context | self.plan_context)
            arguments["plan"] = _plan(impl, member, self.plan_of, plan_call)
        cp = impl.ContextParallel(**{"group": member, **self.context})
        if self.what == "attention":
            return impl.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), cp=cp, **arguments)
        if self.what in ("shard", "unshard"):
            return getattr(impl, self.what)(arguments.pop("x"), cp=cp, **arguments)
        return getattr(impl, self.what)(cp=cp, **arguments)

    def having(self, **arguments: Any) -> SmallCall:
        """The call with some arguments exchanged."""
        return replace(self, arguments=self.arguments | arguments)

    def calling(self, what: str, **arguments: Any) -> SmallCall:
        """Another function's call."""
        return replace(self, what=what, arguments=arguments)

    def using(self, **context: Any) -> SmallCall:
        """The call with another ContextParallel."""
        return replace(self, context=self.context | context)

    def planned(self, size: int, **context: Any) -> SmallCall:
        """The bshd call with tensors and a plan alone. The plan is of a group of `size` with this ContextParallel."""
        tensors = {name: x for name, x in self.arguments.items() if name in ("q", "k", "v")}
        dtype = tensors["q"].dtype
        return replace(self, arguments=tensors, plan_of=size, plan_context=context, plan_dtype=dtype)


def _plan(impl: Implementation, member: Any, size: int, call: SmallCall) -> Any:
    if size == member.size:
        return call.run(impl, member)
    plans = run_ranks(size, lambda other: call.run(impl, other))
    if plans[0].error is not None:
        raise RuntimeError(f"no plan to change: {plans[0].error}") from plans[0].error
    return plans[member.rank % size].value


def call_of(impl: Implementation, base: str, device: str = "cpu") -> SmallCall:
    """`good_call`, with a schedule, a layout and a dtype that the implementation has."""
    capabilities = capabilities_of(impl, device)
    dtype = getattr(torch, first_of(capabilities, "dtype", "float32"))
    context = {axis: first_of(capabilities, axis, plain) for axis, plain in _PLAIN.items()}
    return replace(good_call(base, device, dtype), context={k: v for k, v in context.items() if v != _PLAIN[k]})


def good_call(base: str, device: str, dtype: torch.dtype) -> SmallCall:
    """A well-formed call: "bshd" or "thd" (attention), "dropout" (the first with dropout), "plan" (make_plan, bshd)."""
    if base == "plan":
        sizes = {
            "heads_q": 4,
            "heads_kv": 2,
            "d_qk": 8,
            "d_v": 8,
            "dtype": dtype,
            "device": torch.device(device),
        }
        return SmallCall({"batch_size": 2, "seqlen_q": 8, "seqlen_kv": 8, **sizes}, what="make_plan")
    shape = [6] if base == "thd" else [2, 4]
    tensors = {
        name: torch.ones(*shape, 4 if name == "q" else 2, 8, dtype=dtype, device=device) for name in ("q", "k", "v")
    }
    if base in ("bshd", "dropout"):
        return SmallCall(tensors | ({"dropout_p": 0.5, "dropout_seed": 3} if base == "dropout" else {}))
    lengths = {"cu_seqlens_q": cu(0, 5, 9, device=device), "cu_seqlens_q_padded": cu(0, 8, 12, device=device)}
    return SmallCall({**tensors, "qkv_format": "thd", **lengths})


def cu(*values: int, device: str = "cpu", dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Cumulative lengths."""
    return torch.tensor(values, dtype=dtype, device=device)


# ---- the table
#
# The table of the tier `errors`: every change that makes a good call malformed.


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


_NEEDS = {"alibi_slopes": "alibi_slopes", "score_mod": "score_mod", "aux_tensors": "score_mod"}
_NEEDS |= {"dropout_p": "dropout_p", "dropout_seed": "dropout_p"}  # an argument -> what it belongs to


def _lengths(name: str, *values: int, names: str = "", **more: torch.Tensor) -> ErrorCase:
    return ErrorCase("thd", names or rf"\b{name}\b", lambda call: call.having(**{name: cu(*values)}, **more))


def _with(name: str, value: Any, names: str = "", base: str = "bshd", **more: Any) -> ErrorCase:
    named, needs = names or rf"\b{name}\b", _NEEDS.get(name, "")
    return ErrorCase(base, named, lambda call: call.having(**{name: value}, **more), needs=needs)


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor], names: str, base: str = "bshd") -> ErrorCase:
    return ErrorCase(base, names, lambda call: call.having(**{name: change(call.arguments[name])}))


def _context(name: str, value: Any) -> ErrorCase:  # A constructor is no collective: the other ranks cannot know.
    return ErrorCase("bshd", rf"\b{name}\b", lambda call: call.using(**{name: value}), alone=False)


def _different(name: str, value: Any, base: str = "bshd", names: str = "") -> ErrorCase:
    return replace(_with(name, value, names or name, base), one_rank_only=True)


def _function(what: str, names: str, **arguments: Any) -> ErrorCase:
    return ErrorCase("bshd", names, lambda call: call.calling(what, **arguments), alone=False)


def _other_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(torch.float32 if x.dtype == dtype else dtype)


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
    "alibi-shape": _with("alibi_slopes", torch.ones(3)),
    "alibi-dtype": _with("alibi_slopes", torch.ones(4, dtype=torch.float64)),
    "alibi-gradient": _with("alibi_slopes", torch.ones(4, requires_grad=True)),
    "score-mod-no-function": _with("score_mod", "alibi"),
    "score-mod-captures-a-tensor": _with("score_mod", _captures, "score_mod.*_TABLE"),
    "aux-tensors-unasked": _with("aux_tensors", {"bias": torch.ones(4)}),
    "aux-tensors-missing": _with("score_mod", SCORE_MODS["by_key"], "aux_tensors"),
    "dropout-of-everything": _with("dropout_p", 1.0, base="dropout"),
    "dropout-negative": _with("dropout_p", -0.5, base="dropout"),
    "dropout-without-a-seed": _with("dropout_seed", None, base="dropout"),
    "dropout-seed-float": _with("dropout_seed", 3.0, base="dropout"),
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
    "ranks-differ-in-alibi": _different("alibi_slopes", torch.ones(4)),
    "ranks-differ-in-score-mod": _different("score_mod", SCORE_MODS["capped"]),
    "ranks-differ-in-dropout": _different("dropout_p", 0.25, "dropout"),
    "ranks-differ-in-seed": _different("dropout_seed", 4, "dropout"),
    "ranks-differ-in-plans": ErrorCase("plan", "softcap", lambda call: call.having(softcap=3.0), one_rank_only=True),
    "ranks-differ-in-layout": ErrorCase(
        "bshd", "layout", lambda call: call.using(layout="contiguous"), one_rank_only=True, layout="dual_chunk"
    ),
}


# ---- the tier


_LIMIT_S = 20.0
_HAS: dict[str, Callable[[Capabilities], bool]] = {
    "alibi_slopes": lambda has: "alibi" in has.wishes,
    "score_mod": lambda has: has.has("score_mod", "some"),
    "dropout_p": lambda has: has.has("dropout_p", "some"),
}


class MalformedCall(NamedProblem):
    """A call that every rank has to refuse; or the well-formed ones, since the table means nothing if they are refused
    unchanged; or a choice that `supports` refuses: "unsupported AXIS CHOICE".
    """

    word = "error"

    @classmethod
    def names(cls) -> list[str]:
        """All there may be."""
        return ["well-formed", *ERRORS, *(f"unsupported {choice}" for choice in _refusable())]

    @classmethod
    def items(cls, capabilities: Capabilities) -> list[str]:
        """The entries of the table, and every choice that the implementation refuses."""
        return ["well-formed", *ERRORS, *(f"unsupported {choice}" for choice in capabilities.refused)]

    @property
    def cases(self) -> tuple[Case, ...]:
        """The problem that has to be refused; none for a malformed call, which is no problem."""
        word, _, choice = self.name.partition(" ")
        return (Case(_refusable()[choice]),) if word == "unsupported" else ()

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings. Raises UnsupportedCase where every rank refuses it, for what the implementation does not have."""
        if self.name == "well-formed":
            return _well_formed(impl, device)
        if self.name.startswith("unsupported "):
            return _check_refusal(impl, self.name.removeprefix("unsupported "), device)
        entry = ERRORS[self.name]
        if entry.needs and not _HAS[entry.needs](capabilities_of(impl, device)):
            raise UnsupportedCase(f"{entry.needs} is unsupported")
        layout = call_of(impl, entry.base, device).context.get("layout", "dual_chunk")
        if entry.layout not in ("", layout):
            raise UnsupportedCase(f"it is malformed in the layout {entry.layout} alone, which is unsupported")
        found = [] if entry.one_rank_only else _check_everywhere(impl, entry, device)
        return found + (_check_alone(impl, entry, device) if entry.alone else [])

    def refused_anyway(self, impl: Implementation, device: str) -> str:
        """Why the well-formed call that the entry changes is itself unsupported; empty when it is not."""
        entry = ERRORS.get(self.name)
        for base in ("bshd", "thd") if entry is None else (entry.base,):
            call = call_of(impl, base, device)
            try:
                errors = [outcome.error for outcome in _run(impl, [call, call], 60.0)]
            except Hang:
                return ""
            if all(isinstance(error, impl.Unsupported | NotImplementedError) for error in errors):
                return f"the well-formed call ({base}) is unsupported: {errors[0]}"
        return ""


@cache
def _refusable() -> dict[str, Problem]:
    base = Problem(2, (Sequence(16, 16, 16, 16),))
    return {f"{axis} {name}": problem for axis, name, problem in variants(base)}


def _well_formed(impl: Implementation, device: str) -> list[str]:
    """Findings about the calls in bshd and thd, of those formats that are supported."""
    bases = [base for base in ("bshd", "thd") if capabilities_of(impl, device).has("qkv_format", base)]
    if not bases:
        raise UnsupportedCase("neither bshd nor thd is supported")
    runs = [_run(impl, [call_of(impl, base, device)] * 2) for base in bases]
    return [f"{_who(n)} raised {describe_error(o.error)}" for run in runs for n, o in enumerate(run) if o.error]


def _check_everywhere(impl: Implementation, entry: ErrorCase, device: str) -> list[str]:
    try:
        outcomes = _run(impl, [entry.change(call_of(impl, entry.base, device)) for _ in range(2)])
    except Hang as hang:
        return [f"wrong on every rank: {hang}"]
    if all(isinstance(o.error, impl.Unsupported) for o in outcomes):  # It need not know more of missing features.
        raise UnsupportedCase(str(outcomes[0].error))
    return [
        f"wrong on every rank: {finding}"
        for n, o in enumerate(outcomes)
        if (finding := _judge(_who(n), o, entry.names))
    ]


def _check_alone(impl: Implementation, entry: ErrorCase, device: str) -> list[str]:
    try:
        good = call_of(impl, entry.base, device)
        outcomes = _run(impl, [good, entry.change(good)])
    except Hang as hang:
        return [f"wrong on rank 1 alone: {hang}"]
    right, wrong = outcomes  # the rank that is right need not repeat the error
    findings = [_judge(_who(0), right, entry.names if entry.one_rank_only else ""), _judge(_who(1), wrong, entry.names)]
    return [f"wrong on rank 1 alone: {finding}" for finding in findings if finding]


def _run(impl: Implementation, calls: list[SmallCall], limit_s: float = _LIMIT_S) -> list[Outcome]:
    return run_ranks(2, lambda member: calls[member.rank].run(impl, member), limit_s)


def _who(rank: int) -> str:
    return f"rank {rank}"


def _judge(who: str, outcome: Outcome, names: str) -> str:
    """Findings about the refusals of the ranks."""
    if outcome.error is None:
        return f"{who} returned, but should have raised a ValueError or TypeError that names {names or 'what is wrong'}"
    if not isinstance(outcome.error, ValueError | TypeError):
        return f"{who} raised {describe_error(outcome.error)}, but should have raised a ValueError or TypeError"
    if not re.search(names, str(outcome.error)):
        return f"{who}'s message does not match /{names}/: {describe_error(outcome.error)}"
    return ""


def _check_refusal(impl: Implementation, choice: str, device: str) -> Judged:
    """A choice outside `supports`: make_plan and attention raise `Unsupported` on every rank, with the reason."""
    case, found = Case(_refusable()[choice]), []
    attempts: dict[str, Callable[[], Any]] = {
        "make_plan": lambda: check_plan(impl, case, device),
        "attention": lambda: play(impl, case, build(case, device), _LIMIT_S).findings,
    }
    for name, attempt in attempts.items():
        try:
            findings = attempt() or [f"{name} computed, but supports(...) is False"]
            found += [f"{name}: {finding}" for finding in findings]
        except UnsupportedCase as refusal:
            if choice.startswith("cp_comm_type") and choice.split()[1] not in str(refusal):
                found.append(f"{name}: the refusal does not name {choice.split()[1]!r}: {refusal}")
    return Judged(found, cases={str(case): "wrong" if found else "unsupported"})
