"""Tier `plan`: integers only. The schedule computes the problem, and sharding puts every token where the layout says.

`cp_ref.schedules.verify` plays the schedule without a tensor: every visible pair once, every receive with its send, no
deadlock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance.case import Case
from conformance.implementation import Implementation
from conformance.judge.ranks import UnsupportedCase, context_of, values_of_ranks
from conformance.judge.reference import digest_of
from conformance.run.case_tensors import plan_arguments, sequence_axis
from conformance.run.placement import positions, take_slice, unsharded
from conformance.run.play_case import lengths_to_cut, needs_plan
from conformance.scores.score_mods import score_mod_of
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.proof import InvalidSchedule, verify

__all__ = ["check"]


def check(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
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
    try:
        plan = impl.make_plan(cp=cp, **plan_arguments(p, device))
    except impl.Unsupported as refusal:
        if supported:
            raise
        raise UnsupportedCase(reason) from refusal
    if not supported:
        raise AssertionError(f"supports(...) is False ({reason}), but make_plan did not raise Unsupported")
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
