"""Plays an implementation on one case: forward and backward on every rank, and the results back in global order."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
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
from cp_ref.schedules.layouts import LAYOUTS_OF_LENGTHS, divisor
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import side_of

__all__ = [
    "Call",
    "Gathered",
    "lengths_to_cut",
    "local_slice",
    "named_results",
    "needs_plan",
    "on_every_rank",
    "play",
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


def _one_rank(impl: Implementation, case: Case, tensors: GlobalTensors, member: Any) -> dict[str, torch.Tensor | None]:
    p, device = case.problem, str(tensors.q.device)
    cp = context_of(impl, p, member)
    supported, reason = impl.supports(cp=cp, **plan_arguments(p, device), **case.wishes)
    if needs_plan(p) and not impl.offers("make_plan"):
        raise UnsupportedCase("there is no make_plan, which this problem needs")
    try:
        inputs = _Inputs(impl, case, tensors, cp, member.rank)
        results = _attend(impl, case, tensors, cp, inputs)
    except impl.Unsupported as refusal:
        if supported:
            raise
        raise UnsupportedCase(reason) from refusal
    if not supported:
        raise AssertionError(f"supports(...) is False ({reason}), but attention did not raise Unsupported")
    _backward(case, tensors, results, inputs, member.rank)
    grads = {f"d{letter}": x.grad for letter, x in inputs.leaves.items() if letter in case.wanted}
    if "o" in case.wanted and inputs.offset is not None:
        grads["d_offset"] = inputs.offset.grad
    for name, buffer, before in inputs.guarded:
        if not torch.equal(buffer.view(torch.uint8), before.view(torch.uint8)):
            raise AssertionError(f"{name}, or the memory around it, was written to")
    return {name: None if x is None else x.detach() for name, x in (results | grads).items()}


class _Inputs:
    """One rank's q, k, v, dout and offset; with `case.strided`, views with odd strides into buffers of NaN."""

    def __init__(self, impl: Implementation, case: Case, tensors: GlobalTensors, cp: Any, rank: int) -> None:
        self.guarded: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.leaves: dict[str, torch.Tensor] = {}
        cut = lengths_to_cut(impl, case.problem, cp, str(tensors.q.device))
        for name in ("q", "k", "v", "dout"):
            local = local_slice(impl, case, tensors, name, cut, cp, rank)
            if case.strided:
                local = self._embed(name, local)
            if name == "dout":
                self.dout = local
            else:
                self.leaves[name] = local.requires_grad_(name in case.wanted)
        self.offset = None
        if tensors.softmax_offset is not None:
            self.offset = tensors.softmax_offset.detach().clone().requires_grad_("o" in case.wanted)

    def _embed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A copy of x inside a larger buffer. Every axis has NaN before and after; the last has stride 1."""
        buffer = torch.full([n + 2 for n in x.shape], float("nan"), dtype=x.dtype, device=x.device)
        inside = buffer[tuple(slice(1, n + 1) for n in x.shape)]
        inside.copy_(x)
        self.guarded.append((name, buffer, buffer.clone()))
        return inside.detach()


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


def local_slice(
    impl: Implementation,
    case: Case,
    tensors: GlobalTensors,
    name: str,
    cut: dict[str, dict[str, Any]],
    cp: Any,
    rank: int,
) -> torch.Tensor:
    """A rank's slice of q, k, v or dout, cut by the implementation's `shard` or, without one, by the suite."""
    whole, side = getattr(tensors, name), side_of(name)
    if not impl.offers("shard"):
        return take_slice(case, whole, side, rank)
    return impl.shard(whole, cp=cp, **cut[side]).detach()


def _attend(
    impl: Implementation, case: Case, tensors: GlobalTensors, cp: Any, inputs: _Inputs
) -> dict[str, torch.Tensor | None]:
    p, device = case.problem, str(tensors.q.device)
    arguments = attention_arguments(p, device)
    if case.use_plan or needs_plan(p):
        arguments = {"plan": impl.make_plan(cp=cp, **plan_arguments(p, device), **case.wishes)}
    results = impl.attention(
        *inputs.leaves.values(),
        cp=cp,
        softmax_offset=inputs.offset,
        **case.wishes,
        **arguments,
        **score_arguments(case, device),
    )
    return dict(named_results(case, results))


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


def _backward(
    case: Case, tensors: GlobalTensors, results: dict[str, torch.Tensor | None], inputs: _Inputs, rank: int
) -> None:
    upstream: list[tuple[torch.Tensor, torch.Tensor]] = []
    if "out" in case.loss and (out := results["out"]) is not None and out.requires_grad:
        upstream.append((out, inputs.dout))
    if "lse" in case.loss and (lse := results["lse"]) is not None and lse.requires_grad:
        upstream.append((lse, take_slice(case, tensors.dlse, "q", rank, lse=True)))
    if case.wanted and upstream:
        torch.autograd.backward([x for x, _ in upstream], [grad for _, grad in upstream])


def _collect(
    case: Case,
    tensors: GlobalTensors,
    ranks: list[dict[str, torch.Tensor | None]],
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
            _collect_heads(case, name, [values[name] for values in ranks], tensors, gathered, shares=shares)
            continue
        side = side_of(name)
        model, token_axis = like[name], -1 if name == "lse" else axis
        parts: list[torch.Tensor] = []
        for rank, values in enumerate(ranks):
            shape = list(model.shape)
            shape[token_axis] = slice_rows_of(case, side)
            part = values[name]
            if part is None:  # Autograd found no path from the loss to this input.
                part = model.new_zeros(shape)
            if list(part.shape) != shape:
                gathered.findings.append(f"{name} of rank {rank} has shape {list(part.shape)}, but should have {shape}")
            if part.dtype != model.dtype:
                gathered.findings.append(f"{name} of rank {rank} has dtype {part.dtype}, but should have {model.dtype}")
            parts.append(part)
        if not gathered.findings:
            gathered.results[name] = assemble(case, parts, side, lse=name == "lse")


def _collect_heads(
    case: Case,
    name: str,
    values: list[torch.Tensor | None],
    tensors: GlobalTensors,
    gathered: Gathered,
    *,
    shares: bool,
) -> None:
    """max_logit and d_offset: [h_q], the same on every rank, or shares of a total."""
    first = values[0] if values[0] is not None else tensors.dlse.new_zeros(case.problem.heads_q)
    for rank, value in enumerate(values):
        value = first.new_zeros(first.shape) if value is None else value
        if list(value.shape) != [case.problem.heads_q]:
            gathered.findings.append(
                f"{name} of rank {rank} has shape {list(value.shape)}, but should be [{case.problem.heads_q}]"
            )
        elif not shares and not torch.equal(value, first):
            gathered.findings.append(
                f"{name} differs between ranks: {first.tolist()} on rank 0, {value.tolist()} on rank {rank}"
            )
    if not gathered.findings:
        given = [value for value in values if value is not None] if shares else []
        gathered.results[name] = torch.stack(given).sum(dim=0) if given else first


# ---- one rank's call by hand
#
# One rank's call by hand, for tiers that want more of it than `conformance.checks.play.play`: other strides, two
# backward passes, autocast around it, the tensors themselves.


@dataclass
class Call:
    """One rank's slices, contiguous, and its ContextParallel; `problem_arguments` may be changed before a call."""

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
        results = self.impl.attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            cp=self.cp,
            **arguments,
            **offset,
            **self.case.wishes,
            **self.score_arguments,
        )
        return named_results(self.case, results)

    def backward(self, results: Tensors, leaves: Tensors, *, dout: torch.Tensor | None = None, **more: Any) -> Tensors:
        """The gradients that the case asks for, by name; `more` goes to `torch.autograd.grad`."""
        upstream = {"out": self.dout if dout is None else dout, "lse": self.dlse}
        pairs = [(results[n], upstream[n]) for n in self.case.loss.split("+") if results[n].requires_grad]
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        if not pairs or not wanted:
            return {}
        grads = torch.autograd.grad(
            [x for x, _ in pairs], list(wanted.values()), [g for _, g in pairs], allow_unused=True, **more
        )
        return {
            f"d_{name}" if name == "offset" else f"d{name}": torch.zeros_like(wanted[name]) if g is None else g
            for name, g in zip(wanted, grads, strict=True)
        }

    def both(self, leaves: Tensors, plan: Any = None, *, dout: torch.Tensor | None = None) -> Tensors:
        """Forward and backward: all results, detached."""
        results = self.attend(leaves, plan)
        return {name: x.detach() for name, x in (results | self.backward(results, leaves, dout=dout)).items()}


def on_every_rank(
    impl: Implementation, case: Case, tensors: GlobalTensors, body: Callable[[Call], list[str]]
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
        return body(_call(impl, case, tensors, cp, member.rank))

    refusals = [] if impl.offers("supports") and not case.alibi else [impl.Unsupported]
    ranks, found = values_of_ranks(case.problem.cp_size, one_rank, *refusals)
    return found + [f"rank {rank}: {finding}" for rank, findings in enumerate(ranks) for finding in findings]


def _call(impl: Implementation, case: Case, tensors: GlobalTensors, cp: Any, rank: int) -> Call:
    p, device = case.problem, tensors.q.device
    local: Tensors = {}
    cut = lengths_to_cut(impl, p, cp, str(device))
    for name in ("q", "k", "v", "dout"):
        x = local_slice(impl, case, tensors, name, cut, cp, rank)
        local[name] = x.detach().clone(memory_format=torch.contiguous_format)
    dout = local.pop("dout")
    if tensors.softmax_offset is not None:
        local["offset"] = tensors.softmax_offset.detach().clone()
    dlse = take_slice(case, tensors.dlse, "q", rank, lse=True)
    arguments = attention_arguments(p, str(device)), score_arguments(case, device)
    return Call(impl, case, cp, rank, local, dout, dlse, *arguments)
