"""Tiers `plan`, `spellings` and `determinism`: what a call means before anything is computed, and that the same call
means the same in other words and at another time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from conformance.case import Case, score_mod_of
from conformance.checks.budgets import Tensors, close, same_bits
from conformance.checks.play import RankCall, lengths_to_cut, needs_plan, on_every_rank, refused_as_said
from conformance.checks.reference import UnsupportedCase, context_of, digest_of, values_of_ranks
from conformance.implementation import Implementation
from conformance.tensors import build, plan_arguments, positions, sequence_axis, take_slice, unsharded
from cp_ref.problems.arguments import SCORE_OPTIONS
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.proof import InvalidSchedule, verify

__all__ = ["SPELLINGS", "check_determinism", "check_plan", "check_spellings"]

# ---- plan


def check_plan(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Findings about the implementation's plan, shard, unshard and position_ids for the case's problem.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    p = case.problem
    if reason := impl.why_not(p):
        raise UnsupportedCase(reason)
    ranks, wrong = values_of_ranks(p.cp_size, lambda member: _one_rank(impl, case, member, device))
    if wrong:
        return wrong
    found = [f"rank {rank}: {finding}" for rank, (_, findings) in enumerate(ranks) for finding in findings]
    return found + (_plans(p, [plan for plan, _ in ranks]) if impl.offers("make_plan") else [])


def _plans(p: Problem, plans: list[tuple[str, str, Schedule]]) -> list[str]:
    """Findings about the ranks' plans: (problem, schedule's text, schedule)."""
    found, texts = [], [text for _, text, _ in plans]
    digested = replace(p, score_mod=digest_of(score_mod_of(p)))
    for rank, (problem_text, text, schedule) in enumerate(plans):
        if problem_text != str(digested):
            found.append(f"rank {rank}: plan.problem is {problem_text}, but should be {digested}")
        if text != texts[0]:
            found.append(f"the schedules of rank 0 and rank {rank} differ: {_first_difference(texts[0], text)}")
        if Schedule.parse(text) != schedule:
            found.append(f"rank {rank}: the schedule's text does not read back to an equal schedule")
    try:
        verify(p, plans[0][2])
    except InvalidSchedule as wrong:
        found += wrong.errors
    return found


def _one_rank(impl: Implementation, case: Case, member: Any, device: str) -> tuple[Any, list[str]]:
    """The plan as texts and schedule, None where there is no `make_plan`; and findings about what this rank has."""
    p = case.problem
    cp = context_of(impl, p, member)
    supported, reason = impl.supports(cp=cp, **plan_arguments(p, device))
    if not impl.offers("make_plan"):
        if not supported or needs_plan(p):
            raise UnsupportedCase(reason or "there is no make_plan, which this problem needs")
        return None, _sharding(impl, case, cp, None, device)
    with refused_as_said(impl, supported, reason, "make_plan"):
        plan = impl.make_plan(cp=cp, **plan_arguments(p, device))
    findings = _sharding(impl, case, cp, plan, device)
    want, got = positions(p, member.rank), plan.position_ids.tolist()
    if got != want:
        findings.append(f"plan.position_ids is {got}, but should be {want}")
    return (str(plan.problem), str(plan.schedule), plan.schedule), findings


def _sharding(impl: Implementation, case: Case, cp: Any, plan: Any, device: str) -> list[str]:
    """Those of shard, unshard and position_ids that are there, on token numbers, against the ownership."""
    p, findings = case.problem, []
    for side in ("q", "kv"):
        tokens = _token_numbers(case, side).to(device)
        axis, packed = sequence_axis(p.qkv_format), p.qkv_format == "thd"
        by_plan = plan is not None and (p.layout == "balanced" or (side == "q" and case.use_plan))
        lengths = {"plan": plan} if by_plan else lengths_to_cut(impl, p, cp, device)[side]
        seqlen = {} if by_plan or packed else {"seqlen": tokens.shape[axis]}
        want = take_slice(case, tokens, side, cp.rank)
        if impl.offers("shard"):
            mine = impl.shard(tokens, cp=cp, **lengths)
            if not torch.equal(mine, want):
                given = mine.tolist()
                findings.append(f"shard of the {side} token numbers gives {given}, but should give {want.tolist()}")
                continue
        if impl.offers("unshard"):
            back, whole = impl.unshard(want, cp=cp, **lengths, **seqlen), unsharded(case, tokens, side)
            if not torch.equal(back, whole):
                given = back.tolist()
                findings.append(f"unshard of the ranks' {side} token numbers gives {given}, not {whole.tolist()}")
        findings += _gradients(impl, case, tokens.double(), side, cp, lengths, seqlen)
        if impl.offers("position_ids") and (side == "q" or p.lengths.slots_q == p.lengths.slots_kv):
            ids, want_ids = impl.position_ids(cp=cp, **lengths, **seqlen, device=device), positions(p, cp.rank)
            if ids.dtype != torch.int64 or ids.tolist() != want_ids:
                findings.append(f"position_ids gives {ids.dtype} {ids.tolist()}, but should give {want_ids}")
    return findings


def _gradients(
    impl: Implementation,
    case: Case,
    x: torch.Tensor,
    side: str,
    cp: Any,
    lengths: dict[str, Any],
    seqlen: dict[str, int],
) -> list[str]:
    """shard's gradient is the slice's, in its place; unshard's is the sum over the ranks' global tensors."""
    findings = []
    if impl.offers("shard"):
        whole, again = x.clone().requires_grad_(), x.clone().requires_grad_()
        slices = impl.shard(whole, cp=cp, **lengths), take_slice(case, again, side, cp.rank)
        grads = [
            torch.autograd.grad(mine, leaf, mine.detach() + 1)[0]
            for mine, leaf in zip(slices, (whole, again), strict=True)
        ]
        if not torch.equal(*grads):
            findings.append(f"the gradient through shard of the {side} tokens is {grads[0]}, not {grads[1]}")
    if not impl.offers("unshard"):
        return findings
    part = take_slice(case, x, side, cp.rank).nan_to_num().requires_grad_()
    back = impl.unshard(part, cp=cp, **lengths, **seqlen)
    back.backward((back.detach() + 1) * (cp.rank + 1))
    want = take_slice(case, unsharded(case, x, side) + 1, side, cp.rank).nan_to_num()
    want = want * (cp.size * (cp.size + 1) // 2)
    if part.grad is None or not torch.equal(part.grad, want):
        findings.append(f"the gradient through unshard of the {side} tokens is {part.grad}, but should be {want}")
    return findings


def _token_numbers(case: Case, side: str) -> torch.Tensor:
    """Numbers from 0, in the format's leading axes: [b, s], [s, b] or [t]."""
    p = case.problem
    if p.qkv_format == "thd":
        return torch.arange(case.rows(side))
    slots, batch = p.lengths.slots(side)[0], len(p.sequences)
    return torch.arange(slots * batch).view((batch, slots) if p.qkv_format == "bshd" else (slots, batch))


def _first_difference(one: str, other: str) -> str:
    for a, b in zip(one.splitlines(), other.splitlines(), strict=False):
        if a != b:
            return f"{a.strip()!r} and {b.strip()!r}"
    return "one is longer"


# ---- spellings
#
# Tier `spellings`: the same call in other words gives the same results.
#
#     int64           cumulative lengths in int64
#     views           cumulative lengths that are not contiguous in memory
#     kv too          the lengths of keys given, though they are those of the queries; padded ones, though nothing is
#     by name         defaults given by name: softmax_scale, the window's right side under a causal mask, flags
#     left out        defaults left out
#     half            softmax_offset in bfloat16 is what it is in float32
#
# Each with a plan where the case has one. The words are those of the documentation; all but `half`, which may be
# refused with a ValueError or TypeError, have to be understood.


Arguments = dict[str, Any]
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_OPTIONS = {"qkv_format", "attn_mask_type", "window_size", *SCORE_OPTIONS}
_DEFAULTS = {f.name: f.default for f in fields(Problem) if f.name in _OPTIONS}


def _each_length(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Case, Arguments], Arguments]:
    return lambda _, arguments: {name: change(x) for name, x in arguments.items() if name in _LENGTHS}


def _kv_too(case: Case, arguments: Arguments) -> Arguments:
    if "cu_seqlens_q" not in arguments:
        return {}
    given = {"cu_seqlens_kv": arguments.get("cu_seqlens_kv", arguments["cu_seqlens_q"])}
    if case.problem.qkv_format == "thd":
        padded = arguments.get("cu_seqlens_q_padded", arguments["cu_seqlens_q"])
        other = padded if "cu_seqlens_kv" not in arguments else given["cu_seqlens_kv"]
        given |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": arguments.get("cu_seqlens_kv_padded", other)}
    return {name: x.clone() for name, x in given.items()}


def _by_name(case: Case, arguments: Arguments) -> Arguments:
    p = case.problem
    window = {"window_size": (p.window_size[0], 0)} if p.causal and "window_size" in arguments else {}
    return {"softmax_scale": p.scale, **window}


SPELLINGS: dict[str, Callable[[Case, Arguments], Arguments]] = {
    "int64": _each_length(lambda x: x.to(torch.int64)),
    "views": _each_length(lambda x: torch.stack([x, x - 1], dim=1)[:, 0]),
    "kv too": _kv_too,
    "by name": _by_name,
}


def check_spellings(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Spellings that give other results, or raise.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    return on_every_rank(impl, case, build(case, device), _spelled)


def _spelled(call: RankCall) -> list[str]:
    plain, found = call.problem_arguments, []
    want = _both(call, call.leaves())
    for name, spelling in SPELLINGS.items():
        call.problem_arguments = plain | (changed := spelling(call.case, plain))
        if changed:
            found += close(f"({name})", call.case, want, _both(call, call.leaves()))
    call.problem_arguments = {n: x for n, x in plain.items() if n not in _DEFAULTS or x != _DEFAULTS[n]}
    found += close("(left out)", call.case, want, _both(call, call.leaves()))
    call.problem_arguments = plain
    return found + (_half(call) if "offset" in call.inputs else [])


def _both(call: RankCall, leaves: Tensors) -> Tensors:
    return call.both(leaves, call.plan(call.problem_arguments) if call.case.use_plan else None)


def _half(call: RankCall) -> list[str]:
    """The values of bfloat16 are values of float32; only the gradient is rounded."""
    rounded = call.inputs["offset"].bfloat16()
    wide = call.inputs["offset"].dtype
    call = replace(call, inputs=call.inputs | {"offset": rounded.to(wide)})
    want = _both(call, call.leaves())
    try:
        got = _both(call, call.leaves() | {"offset": rounded.requires_grad_("o" in call.case.wanted)})
    except (ValueError, TypeError):
        return []
    if "d_offset" in want:
        want["d_offset"] = want["d_offset"].to(got["d_offset"].dtype)
    return close("(half)", call.case, want, got)


# ---- determinism
#
# Tier `determinism`: with deterministic=True the same call gives the same bits, however often and whatever ran
# between.
#
# Each rank plays the case three times: plainly, again after another call has shuffled the memory, and with a plan; and
# once more with that plan, which a second layer uses too, before the case and between its passes. A plan holds no state
# of a call.


def check_determinism(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Results that are not the same to the last bit.

    Raises:
        UnsupportedCase: the implementation does not have this, or has no deterministic way to it, and says so.
    """
    case = replace(case, deterministic=True, strided=False)
    return on_every_rank(impl, case, build(case, device), _repeated)


def _repeated(call: RankCall) -> list[str]:
    first = call.both(call.leaves())
    other = _other_values(call)
    found = same_bits("of a second call", first, call.both(call.leaves()))
    if not call.impl.offers("make_plan"):
        return found + same_bits("of other values after these", other, _other_values(call))
    plan = call.plan()
    planned = call.both(call.leaves(), plan)
    found += same_bits("of a call with a plan", first, planned)
    found += same_bits("of other values with the same plan", other, _other_values(call, plan))
    leaves = call.leaves()
    results = call.attend(leaves, plan)
    _other_values(call, plan)
    again = {name: x.detach() for name, x in (results | call.backward(results, leaves)).items()}
    return found + same_bits("of a second call with the same plan", planned, again)


def _other_values(call: RankCall, plan: object = None) -> Tensors:
    """The same problem with other values: what it leaves behind in memory is not what the next call needs."""
    leaves = {name: (x.detach() * -0.5 + 1.0).requires_grad_(x.requires_grad) for name, x in call.leaves().items()}
    results = call.both(leaves, plan)
    torch.empty(257, dtype=call.dout.dtype, device=call.dout.device).fill_(float("nan"))
    return results
