"""One rank's call by hand, for tiers that want more of it than `conformance.run.play_case.play`: other strides, two
backward passes, autocast around it, the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from conformance.case import Case
from conformance.implementation import Implementation, as_implementation
from conformance.judge.compare_tensors import same_bytes
from conformance.judge.ranks import UnsupportedCase, context_of, values_of_ranks
from conformance.run.case_tensors import GlobalTensors, attention_arguments, plan_arguments
from conformance.run.placement import take_slice
from conformance.run.play_case import lengths_to_cut, local_slice, named_results, needs_plan
from conformance.scores.score_arguments import score_arguments
from conformance.tiers.logic import tolerance

__all__ = ["Call", "close", "on_every_rank", "same_bits"]

Tensors = dict[str, torch.Tensor]


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


def same_bits(what: str, one: Tensors, other: Tensors) -> list[str]:
    """Which results are not the same to the last bit (NaN and signs included)."""
    found = []
    for name, x in one.items():
        y = other.get(name)
        if y is None or x.shape != y.shape or x.dtype != y.dtype:
            found.append(f"{name} {what} has another shape or dtype")
        elif not same_bytes(x, y):
            worst = (x.double() - y.double()).abs().nan_to_num(torch.inf).max().item()
            found.append(f"{name} {what} differs, by up to {worst:.3g}")
    return found


def close(what: str, case: Case, one: Tensors, other: Tensors) -> list[str]:
    """Which results differ by more than sums in another order may."""
    found = []
    for name, x in one.items():
        a, b = x.double(), other[name].double()
        if a.shape != b.shape:
            found.append(f"{name} {what} has shape {list(b.shape)}, not {list(a.shape)}")
            continue
        error = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(torch.inf)
        limit = tolerance(case, a)
        if error.numel() and error.max().item() > limit:
            found.append(f"{name} {what} differs by up to {error.max().item():.3g}, more than {limit:.2g}")
    return found
