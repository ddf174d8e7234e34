"""Playing a problem of linear layers on every rank, and judging the results.

In float64 and float32 each value is judged. In low precision the root of the mean square of a result's error is, in
units of the result's own and of the typical result's: a chunked kernel rounds what it multiplies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from conformance.implementation import Implementation, context
from conformance.judge.compare_tensors import worst
from conformance.judge.ranks import values_of_ranks
from conformance.levels.level_calls import shape_findings
from conformance.levels.linear.linear_case import LinearAttention, LinearCase
from conformance.levels.linear.linear_tensors import (
    LinearTensors,
    build_linear,
    exact_linear,
    judged_documents,
    judged_rows,
)
from conformance.run.case_tensors import plan_arguments, real_tokens
from conformance.run.placement import assemble, take_slice

__all__ = ["Results", "check", "compare_linear", "judged_results", "play_layer"]

LIMITS = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
Results = dict[str, torch.Tensor]  # One rank's local results and gradients.
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]  # Found values, and exact values.


def check(impl: Implementation, case: LinearCase, device: str = "cpu") -> list[str]:
    """Findings about the layer's results and gradients on all ranks, against the recurrence."""
    tensors = build_linear(case, device)

    def one_rank(member: Any) -> Results:
        return play_layer(impl, case, tensors, context(impl, case.problem, member), member.rank)

    ranks, found = values_of_ranks(case.cp_size, one_rank, impl.Unsupported, NotImplementedError)
    return found or compare_linear(case, tensors, ranks)


def play_layer(impl: Implementation, case: LinearCase, tensors: LinearTensors, cp: Any, rank: int) -> Results:
    """One rank's forward and backward pass. cp: the implementation's `ContextParallel`."""
    plan = impl.make_plan(cp=cp, **plan_arguments(case.problem, str(tensors.dout.device)), linear=True)
    local = partial(_slice, case, rank=rank)
    leaves = {name: local(x).requires_grad_() for name, x in tensors.rows.items()}
    for name, x in tensors.alike.items():
        leaves[name] = x.clone()
        if name == "initial_state" and case.spoiled >= 0:
            leaves[name][case.spoiled] = torch.nan
        leaves[name].requires_grad_()
    roots, seeds = [], [local(tensors.dout)]
    with torch.enable_grad():
        if isinstance(case, LinearAttention):
            final = {"output_final_state": tensors.dfinal is not None}
            got = impl.linear_attention(**leaves, cp=cp, plan=plan, **case.options, **final)
            roots += got if tensors.dfinal is not None else [got]
        else:
            roots.append(impl.causal_conv1d(**leaves, cp=cp, plan=plan, **case.options))
    if tensors.dfinal is not None:
        seeds.append(tensors.dfinal[rank].clone())
        if case.spoiled >= 0:
            seeds[1][case.spoiled] = torch.nan
    seeds = [seed.to(root.dtype) for seed, root in zip(seeds, roots, strict=True)]
    grads = torch.autograd.grad(roots, list(leaves.values()), seeds, allow_unused=True)
    found: Results = dict(zip(("out", "final_state"), (root.detach() for root in roots), strict=False))
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        if grad is None and leaf.numel():
            raise AssertionError(f"{name} has no gradient")
        found[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def _slice(case: LinearCase, x: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's slice, with NaN wherever nobody may read."""
    hidden = ~(real_tokens(case.case, "q") & judged_rows(case)).to(x.device)
    hidden = hidden[(..., *[None] * (x.dim() - hidden.dim()))]
    return take_slice(case.case, x.masked_fill(hidden, torch.nan), "q", rank)


def compare_linear(case: LinearCase, tensors: LinearTensors, ranks: list[Results]) -> list[str]:
    """Findings: the form of each rank's results, zeros where there is no token, and values against exact ones."""
    found = [f"rank {n}: {finding}" for n, results in enumerate(ranks) for finding in _form(case, tensors, results, n)]
    if found:
        return found
    return _findings(case, judged_results(case, tensors, ranks))


def judged_results(case: LinearCase, tensors: LinearTensors, ranks: list[Results]) -> Pairs:
    """The ranks' results together, by name, with the exact values. A spoiled document's rows are left out."""
    exact, keep, documents = exact_linear(case, tensors), judged_rows(case), judged_documents(case)
    judged: Pairs = {}
    for name in ranks[0]:
        local = [results[name] for results in ranks]
        if name.removeprefix("d") in tensors.alike:
            if name != "dinitial_state" and case.spoiled >= 0:
                continue  # the spoiled document is part of the sum
            total = torch.stack([x.double() for x in local]).sum(dim=0)
            pair = (total[documents], exact[name][documents]) if name == "dinitial_state" else (total, exact[name])
            judged[name] = pair
        elif name == "final_state":
            judged |= {f"{name} of rank {n}": (x[documents], exact[name][documents]) for n, x in enumerate(local)}
        else:
            judged[name] = assemble(case.case, local, "q")[keep], exact[name][keep]
    return judged


def _findings(case: LinearCase, judged: Pairs) -> list[str]:
    limit = LIMITS[case.dtype]
    sizes = {name: _size(exact) for name, (_, exact) in judged.items()}
    typical = sum(sizes.values()) / max(len(sizes), 1)
    found: list[str] = []
    for name, (got, exact) in judged.items():
        if case.dtype in ("float64", "float32"):
            found += worst(name, got, exact, limit * (1 + exact.abs()))
        elif not (error := _size(got.double() - exact)) <= (bound := limit * max(sizes[name], typical)):
            found.append(f"{name} has errors of {error:.2g} (root of the mean square), allowed {bound:.2g}")
    return found


def _size(x: torch.Tensor) -> float:
    """The root of the mean square."""
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def _form(case: LinearCase, tensors: LinearTensors, results: Results, rank: int) -> list[str]:
    """Findings about shapes, dtypes, and rows that are no token of any document."""
    found: list[str] = []
    real = real_tokens(case.case, "q").to(tensors.dout.device, torch.int64)
    empty = take_slice(case.case, real, "q", rank) == 0
    inputs = {f"d{name}": x for name, x in (tensors.rows | tensors.alike).items()} | {"out": tensors.dout}
    for name, x in results.items():
        if name == "final_state":
            assert tensors.dfinal is not None
            found += shape_findings(name, x, tensors.dfinal.shape[1:], [tensors.dfinal.dtype])
            continue
        like, alike = inputs[name], name.removeprefix("d") in tensors.alike
        shape = like.shape if alike else (*empty.shape, *like.shape[empty.dim() :])
        wrong = shape_findings(name, x, shape, [like.dtype])
        if not wrong and not alike and not (x[empty] == 0).all():
            wrong = [f"{name} is not zero where there is no token"]
        found += wrong
    return found
