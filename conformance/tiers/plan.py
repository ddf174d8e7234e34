"""Tier `plan`: integers only. The schedule computes the problem, and sharding puts every token where the layout says.

`cp_ref.spec.verify` plays the schedule without a tensor: every visible pair once, every receive with its send, no
deadlock.
"""

from __future__ import annotations

from typing import Any

import torch

from conformance.case import Case
from conformance.implementation import Implementation, context
from conformance.placement import global_rows, positions
from conformance.reference import Hang, describe_error, run_ranks
from conformance.run import UnsupportedCase
from conformance.tensors import plan_arguments, sequence_axis
from cp_ref.spec import InvalidSchedule, Problem, Schedule, verify

__all__ = ["check"]


def check(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Findings about the implementation's plan, shard, unshard and position_ids for the case's problem.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    p = case.problem
    try:
        outcomes = run_ranks(p.cp_size, lambda member: _one_rank(impl, case, member, device))
    except Hang as hang:
        return [str(hang)]
    errors = [o.error for o in outcomes]
    if all(isinstance(error, UnsupportedCase) for error in errors):
        raise UnsupportedCase(str(errors[0]))
    found = [f"rank {rank} raised {describe_error(error)}" for rank, error in enumerate(errors) if error is not None]
    if found:
        return found
    for rank, outcome in enumerate(outcomes):
        found += [f"rank {rank}: {finding}" for finding in outcome.value[1]]
    plans = [o.value[0] for o in outcomes]
    return found + (_plans(p, plans) if impl.offers("make_plan") else [])


def _plans(p: Problem, plans: list[tuple[str, str, Schedule]]) -> list[str]:
    """Findings about the ranks' plans: (problem, schedule's text, schedule)."""
    found, texts = [], [text for _, text, _ in plans]
    for rank, (problem_text, text, schedule) in enumerate(plans):
        if problem_text != str(p):
            found.append(f"rank {rank}: plan.problem is {problem_text}, but should be {p}")
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
    try:
        cp = context(impl, p, member)
    except impl.Unsupported as refusal:
        raise UnsupportedCase(str(refusal)) from refusal
    supported, reason = impl.supports(cp=cp, **plan_arguments(p, device))
    if not impl.offers("make_plan"):
        if not supported:
            raise UnsupportedCase(reason)
        return None, _sharding(impl, case, cp, device)
    try:
        plan = impl.make_plan(cp=cp, **plan_arguments(p, device))
    except impl.Unsupported as refusal:
        if supported:
            raise
        raise UnsupportedCase(reason) from refusal
    if not supported:
        raise AssertionError(f"supports(...) is False ({reason}), but make_plan did not raise Unsupported")
    findings = _sharding(impl, case, cp, device)
    want = positions(p, "q", member.rank)
    got = plan.position_ids.tolist()[: len(want)]
    if got != want:
        findings.append(f"plan.position_ids is {got}, but should be {want}")
    return (str(plan.problem), str(plan.schedule), plan.schedule), findings


def _sharding(impl: Implementation, case: Case, cp: Any, device: str) -> list[str]:
    """Those of shard, unshard and position_ids that are there, on token numbers, against the ownership."""
    p, findings = case.problem, []
    for side, tail in (("q", case.tail_q), ("kv", case.tail_kv)):
        starts = p.starts_q if side == "q" else p.starts_kv
        padded = torch.tensor(starts, dtype=torch.int32, device=device) if p.qkv_format == "thd" else None
        tokens = _token_numbers(case, side, tail).to(device)
        axis = sequence_axis(p.qkv_format)
        rows = global_rows(p, side, tail, cp.rank)
        want = tokens.index_select(axis, torch.tensor(rows, dtype=torch.int64, device=device))
        if impl.offers("shard"):
            mine = impl.shard(tokens, cp=cp, qkv_format=p.qkv_format, cu_seqlens_padded=padded)
            if not torch.equal(mine, want):
                given = mine.tolist()
                findings.append(f"shard of the {side} token numbers gives {given}, but should give {want.tolist()}")
                continue
        if impl.offers("unshard"):
            back = impl.unshard(want, cp=cp, qkv_format=p.qkv_format, cu_seqlens_padded=padded)
            if not torch.equal(back, tokens):
                findings.append(f"unshard of the ranks' {side} token numbers gives {back.tolist()}")
        findings += _gradients(impl, tokens.double(), rows, axis, side, cp, p.qkv_format, padded)
        if not impl.offers("position_ids"):
            continue
        seqlen = None if p.qkv_format == "thd" else tokens.shape[axis]
        ids = impl.position_ids(cp=cp, qkv_format=p.qkv_format, seqlen=seqlen, cu_seqlens_padded=padded, device=device)
        if ids.dtype != torch.int64 or ids.tolist() != positions(p, side, cp.rank):
            findings.append(
                f"position_ids gives {ids.dtype} {ids.tolist()}, but should give {positions(p, side, cp.rank)}"
            )
    return findings


def _gradients(
    impl: Implementation,
    x: torch.Tensor,
    rows: tuple[int, ...],
    axis: int,
    side: str,
    cp: Any,
    qkv_format: str,
    padded: torch.Tensor | None,
) -> list[str]:
    """shard's gradient is the slice's, in its place; unshard's is the sum over the ranks' global tensors."""
    findings, index = [], torch.tensor(rows, dtype=torch.int64, device=x.device)
    if impl.offers("shard"):
        whole = x.clone().requires_grad_()
        mine = impl.shard(whole, cp=cp, qkv_format=qkv_format, cu_seqlens_padded=padded)
        mine.backward(mine.detach() + 1)
        want = torch.zeros_like(x).index_copy_(axis, index, (x + 1).index_select(axis, index))
        if whole.grad is None or not torch.equal(whole.grad, want):
            findings.append(f"the gradient through shard of the {side} tokens is {whole.grad}, but should be {want}")
    if not impl.offers("unshard"):
        return findings
    part = x.index_select(axis, index).requires_grad_()
    impl.unshard(part, cp=cp, qkv_format=qkv_format, cu_seqlens_padded=padded).backward((x + 1) * (cp.rank + 1))
    want = (x + 1).index_select(axis, index) * (cp.size * (cp.size + 1) // 2)
    if part.grad is None or not torch.equal(part.grad, want):
        findings.append(f"the gradient through unshard of the {side} tokens is {part.grad}, but should be {want}")
    return findings


def _token_numbers(case: Case, side: str, tail: int) -> torch.Tensor:
    """Numbers from 0, in the format's leading axes: [b, s], [s, b] or [t]."""
    p = case.problem
    if p.qkv_format == "thd":
        return torch.arange((p.starts_q if side == "q" else p.starts_kv)[-1] + tail)
    slots, batch = getattr(p.sequences[0], f"slots_{side}"), len(p.sequences)
    return torch.arange(slots * batch).view((batch, slots) if p.qkv_format == "bshd" else (slots, batch))


def _first_difference(one: str, other: str) -> str:
    for a, b in zip(one.splitlines(), other.splitlines(), strict=False):
        if a != b:
            return f"{a.strip()!r} and {b.strip()!r}"
    return "one is longer"
