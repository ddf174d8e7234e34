"""Plays an implementation on one case: forward and backward on every rank, and the results back in global order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from conformance.case import Case
from conformance.checks.budgets import Tensors
from conformance.checks.reference import UnsupportedCase, context_of, values_of_ranks
from conformance.implementation import Implementation, as_implementation
from conformance.scores import score_arguments
from conformance.tensors import (
    GlobalTensors,
    assemble,
    attention_arguments,
    plan_arguments,
    sequence_axis,
    slice_rows_of,
    take_slice,
)
from cp_ref.schedules.ownership import LAYOUTS_OF_LENGTHS, divisor
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import side_of

__all__ = [
    "Gathered",
    "RankCall",
    "grad_of",
    "lengths_to_cut",
    "named_results",
    "needs_plan",
    "on_every_rank",
    "play",
    "refused_as_said",
]

LIMITS_S = {"cpu": 20.0, "cuda": 55.0}
"""When ranks that do not finish one call are given up, in seconds: on a GPU, libraries compile kernels on first use.
The environment variable CONFORMANCE_LIMIT_S overrides both.
"""


@dataclass
class Gathered:
    """The results of one call, gathered from all ranks.

    `results` holds the names of `case.results`, in global order: out, dq, dk, dv like the case's tensors, lse [b, h_q,
    s_q] or [h_q, t_q], max_logit and d_offset [h_q]. `findings` says, in sentences, what is wrong before any value is
    looked at; when it is not empty, results may be missing.
    """

    results: dict[str, torch.Tensor] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)


def play(impl: Any, case: Case, tensors: GlobalTensors, limit_s: float | None = None) -> Gathered:
    """Run forward and backward on all ranks of a group.

    Args:
        impl: an `Implementation`, or what may become one.
        limit_s: when ranks that have not finished are given up; None for `LIMITS_S`.

    Raises:
        UnsupportedCase: `supports` is false and `attention` raised `Unsupported`, on every rank. (A gradient through
            lse, which `supports` is not told of, may be refused by the backward pass alone, and ALiBi, of which it is
            not told either, by the call; and without a `supports` raising `Unsupported` on every rank is enough.)
    """
    impl = as_implementation(impl)
    if reason := impl.why_not(case.problem, case.alibi):
        raise UnsupportedCase(reason)
    limit = _limit_s(tensors.q.device.type) if limit_s is None else limit_s
    may_refuse = "lse" in case.loss or case.alibi or not impl.offers("supports")
    refusals = [impl.Unsupported] if may_refuse else []
    ranks, findings = values_of_ranks(
        case.problem.cp_size, partial(_one_rank, impl, case, tensors), *refusals, limit_s=limit
    )
    gathered = Gathered(findings=findings)
    if not findings:
        _collect(case, tensors, ranks, gathered, impl.softmax_offset_grad)
    return gathered


def _limit_s(device: str) -> float:
    text = os.environ.get("CONFORMANCE_LIMIT_S") or str(LIMITS_S.get(device, LIMITS_S["cuda"]))
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise ValueError(f"CONFORMANCE_LIMIT_S is {text!r}; it must be a number of seconds above 0")


@contextmanager
def refused_as_said(impl: Implementation, supported: bool, reason: str, what: str) -> Iterator[None]:
    """The call inside, of the function `what`, raises Unsupported where `supports` refused it, and nowhere else.

    Raises:
        UnsupportedCase: both refuse it. AssertionError: `supports` alone does. Unsupported: the call alone does.
    """
    try:
        yield
    except impl.Unsupported as refusal:
        if supported:
            raise
        raise UnsupportedCase(reason) from refusal
    if not supported:
        raise AssertionError(f"supports(...) is False ({reason}), but {what} did not raise Unsupported")


def _one_rank(impl: Implementation, case: Case, tensors: GlobalTensors, member: Any) -> Tensors:
    p, device = case.problem, str(tensors.q.device)
    cp = context_of(impl, p, member)
    supported, reason = impl.supports(cp=cp, **plan_arguments(p, device), **case.wishes)
    if needs_plan(p) and not impl.offers("make_plan"):
        raise UnsupportedCase("there is no make_plan, which this problem needs")
    guarded: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def embedded(name: str, x: torch.Tensor) -> torch.Tensor:
        """A copy of x inside a larger buffer. Every axis has NaN before and after; the last has stride 1."""
        buffer = torch.full([n + 2 for n in x.shape], float("nan"), dtype=x.dtype, device=x.device)
        inside = buffer[tuple(slice(1, n + 1) for n in x.shape)]
        inside.copy_(x)
        guarded.append((name, buffer, buffer.clone()))
        return inside

    with refused_as_said(impl, supported, reason, "attention"):
        call = _call(impl, case, tensors, cp, member.rank, embedded if case.strided else lambda _, x: x)
        leaves = {name: x.detach().requires_grad_(name[0] in case.wanted) for name, x in call.inputs.items()}
        results = call.attend(leaves, call.plan() if case.use_plan else None)
    pairs = call.upstream(results)
    if case.wanted and pairs:
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
    for name, x in leaves.items():
        if name[0] in case.wanted:  # without a gradient autograd found no path from the loss to this input
            results[grad_of(name)] = torch.zeros_like(x) if x.grad is None else x.grad
    for name, buffer, before in guarded:
        if not torch.equal(buffer.view(torch.uint8), before.view(torch.uint8)):
            raise AssertionError(f"{name}, or the memory around it, was written to")
    return {name: x.detach() for name, x in results.items()}


def grad_of(name: str) -> str:
    """The name of an input's gradient.

    >>> grad_of("q"), grad_of("offset")
    ('dq', 'd_offset')
    """
    return f"d_{name}" if name == "offset" else f"d{name}"


def needs_plan(problem: Problem) -> bool:
    """Whether a plan says more than tensors and masks: the rows of each rank, or the end of a bshd or sbhd sequence
    that was lengthened for the cut.
    """
    parts, lengths = divisor(problem.layout, problem.cp_size), problem.lengths
    lengthened = any(n % parts for n in (*lengths.slots_q, *lengths.slots_kv))
    said = problem.qkv_format == "thd" or problem.attn_mask_type.startswith("padding")
    return problem.layout not in LAYOUTS_OF_LENGTHS or (lengthened and not said)


def lengths_to_cut(impl: Implementation, problem: Problem, cp: Any, device: str) -> dict[str, dict[str, Any]]:
    """The other arguments of `shard`, by side: the lengths, or the plan that decides the layout."""
    if problem.layout not in LAYOUTS_OF_LENGTHS:
        plan = impl.make_plan(cp=cp, **plan_arguments(problem, device)) if impl.offers("shard") else None
        return {side: {"plan": plan} for side in ("q", "kv")}
    packed = problem.qkv_format == "thd"

    def words(side: str) -> dict[str, Any]:
        cu = torch.tensor(problem.starts(side), dtype=torch.int32, device=device) if packed else None
        return {"qkv_format": problem.qkv_format, "cu_seqlens_padded": cu}

    return {side: words(side) for side in ("q", "kv")}


def named_results(case: Case, returned: Any) -> dict[str, torch.Tensor]:
    """The results of `attention`, by name. Raises AssertionError where it is not what the case asks for."""
    names = [name for name in ("out", "lse", "max_logit") if name in case.results]
    results = returned if isinstance(returned, tuple) else (returned,)
    if len(results) != len(names):
        raise AssertionError(f"attention returned {len(results)} results; {', '.join(names)} were asked for")
    for name, x in zip(names, results, strict=True):
        if not isinstance(x, torch.Tensor):
            raise AssertionError(f"attention returned {type(x).__name__} for {name}, but should return a tensor")
    return dict(zip(names, results, strict=True))


def _collect(
    case: Case,
    tensors: GlobalTensors,
    ranks: list[Tensors],
    gathered: Gathered,
    offset_grad: str,
) -> None:
    """Fill `gathered` from the ranks' results: shapes and dtypes first, then the global order."""
    p = case.problem
    axis = sequence_axis(p.qkv_format)
    like = {"dq": tensors.q, "dk": tensors.k, "dv": tensors.v, "out": tensors.dout, "lse": tensors.dlse}
    for name in case.results:
        if name in ("max_logit", "d_offset"):
            shares = name == "d_offset" and offset_grad == "share"
            _collect_heads(case, name, [values[name] for values in ranks], gathered, shares=shares)
            continue
        side = side_of(name)
        model, token_axis = like[name], -1 if name == "lse" else axis
        parts: list[torch.Tensor] = []
        for rank, values in enumerate(ranks):
            shape = list(model.shape)
            shape[token_axis] = slice_rows_of(case, side)
            part = values[name]
            if list(part.shape) != shape:
                gathered.findings.append(f"{name} of rank {rank} has shape {list(part.shape)}, but should have {shape}")
            if part.dtype != model.dtype:
                gathered.findings.append(f"{name} of rank {rank} has dtype {part.dtype}, but should have {model.dtype}")
            parts.append(part)
        if not gathered.findings:
            gathered.results[name] = assemble(case, parts, side, lse=name == "lse")


def _collect_heads(case: Case, name: str, values: list[torch.Tensor], gathered: Gathered, *, shares: bool) -> None:
    """max_logit and d_offset: [h_q], the same on every rank, or shares of a total."""
    first = values[0]
    for rank, value in enumerate(values):
        if list(value.shape) != [case.problem.heads_q]:
            gathered.findings.append(
                f"{name} of rank {rank} has shape {list(value.shape)}, but should be [{case.problem.heads_q}]"
            )
        elif not shares and not torch.equal(value, first):
            gathered.findings.append(
                f"{name} differs between ranks: {first.tolist()} on rank 0, {value.tolist()} on rank {rank}"
            )
    if not gathered.findings:
        gathered.results[name] = torch.stack(values).sum(dim=0) if shares else first


# ---- one rank's call by hand
#
# One rank's call by hand, for tiers that want more of it than `conformance.checks.play.play`: other strides, two
# backward passes, autocast around it, the tensors themselves.


@dataclass
class RankCall:
    """One rank's slices, and its ContextParallel; `problem_arguments` may be changed before a call."""

    impl: Implementation
    case: Case
    cp: Any
    rank: int
    inputs: Tensors  # q, k, v, and offset where there is one
    dout: torch.Tensor
    dlse: torch.Tensor
    problem_arguments: dict[str, Any]
    score_arguments: dict[str, Any]

    def plan(self, other: dict[str, Any] | None = None) -> Any:
        """`make_plan` for the case's problem, or for `other` words for it in place of `problem_arguments`."""
        arguments = plan_arguments(self.case.problem, str(self.dout.device))
        if other is not None:
            arguments = {name: x for name, x in arguments.items() if name not in self.problem_arguments} | other
        return self.impl.make_plan(cp=self.cp, **arguments, **self.case.wishes)

    def leaves(self, wanted: str | None = None) -> Tensors:
        """Fresh copies of the inputs; those whose letters are in `wanted` (the case's, by default) need gradients."""
        wanted = self.case.wanted if wanted is None else wanted
        return {name: x.detach().clone().requires_grad_(name[0] in wanted) for name, x in self.inputs.items()}

    def attend(self, leaves: Tensors, plan: Any = None) -> Tensors:
        """The results that the case asks for, by name."""
        plan = self.plan() if plan is None and needs_plan(self.case.problem) else plan
        arguments = self.problem_arguments if plan is None else {"plan": plan}
        offset = {"softmax_offset": leaves["offset"]} if "offset" in leaves else {}
        tensors, asked = [leaves[name] for name in ("q", "k", "v")], self.case.wishes | self.score_arguments
        results = self.impl.attention(*tensors, cp=self.cp, **arguments, **offset, **asked)
        return named_results(self.case, results)

    def upstream(self, results: Tensors, dout: torch.Tensor | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The results that the case's loss is of, if they have gradients, and the gradients that come from it."""
        given = {"out": self.dout if dout is None else dout, "lse": self.dlse}
        return [(results[n], given[n]) for n in self.case.loss.split("+") if results[n].requires_grad]

    def backward(self, results: Tensors, leaves: Tensors, *, dout: torch.Tensor | None = None, **more: Any) -> Tensors:
        """The gradients that the case asks for, by name; `more` goes to `torch.autograd.grad`."""
        pairs = self.upstream(results, dout)
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        if not pairs or not wanted:
            return {}
        grads = torch.autograd.grad(
            [x for x, _ in pairs], list(wanted.values()), [g for _, g in pairs], materialize_grads=True, **more
        )
        return {grad_of(name): grad for name, grad in zip(wanted, grads, strict=True)}

    def both(self, leaves: Tensors, plan: Any = None, *, dout: torch.Tensor | None = None) -> Tensors:
        """Forward and backward: all results, detached."""
        results = self.attend(leaves, plan)
        return {name: x.detach() for name, x in (results | self.backward(results, leaves, dout=dout)).items()}


def on_every_rank(
    impl: Implementation, case: Case, tensors: GlobalTensors, body: Callable[[RankCall], list[str]]
) -> list[str]:
    """`body(call)` on every rank of a simulated group; its findings, each with the rank.

    Raises:
        UnsupportedCase: `supports` is false on every rank; `body` is then not called. Or, without a `supports`,
            `body` raised `Unsupported` on every rank.
    """
    impl = as_implementation(impl)
    if reason := impl.why_not(case.problem, case.alibi):
        raise UnsupportedCase(reason)

    def one_rank(member: Any) -> list[str]:
        p, device = case.problem, str(tensors.q.device)
        cp = context_of(impl, p, member)
        supported, reason = impl.supports(cp=cp, **plan_arguments(p, device), **case.wishes)
        if not supported:
            raise UnsupportedCase(reason)
        return body(_call(impl, case, tensors, cp, member.rank, _copied))

    refusals = [] if impl.offers("supports") and not case.alibi else [impl.Unsupported]
    ranks, found = values_of_ranks(case.problem.cp_size, one_rank, *refusals)
    return found + [f"rank {rank}: {finding}" for rank, findings in enumerate(ranks) for finding in findings]


def _call(
    impl: Implementation,
    case: Case,
    tensors: GlobalTensors,
    cp: Any,
    rank: int,
    placed: Callable[[str, torch.Tensor], torch.Tensor],
) -> RankCall:
    """One rank's call. Slices are cut by the implementation's `shard` or, without one, by the suite; `placed` puts each
    of them, by name, where it shall lie.
    """
    p, device = case.problem, tensors.q.device
    local: Tensors = {}
    cut = lengths_to_cut(impl, p, cp, str(device))
    for name in ("q", "k", "v", "dout"):
        whole, side = getattr(tensors, name), side_of(name)
        shards = impl.offers("shard")
        x = impl.shard(whole, cp=cp, **cut[side]) if shards else take_slice(case, whole, side, rank)
        local[name] = placed(name, x.detach())
    dout = local.pop("dout")
    if tensors.softmax_offset is not None:
        local["offset"] = tensors.softmax_offset.detach().clone()
    dlse = take_slice(case, tensors.dlse, "q", rank, lse=True)
    arguments = attention_arguments(p, str(device)), score_arguments(case, device)
    return RankCall(impl, case, cp, rank, local, dout, dlse, *arguments)


def _copied(name: str, x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)
