"""Gradients checked numerically, through all ranks: a part of the tier `torch`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance.case import Case
from conformance.implementation import Implementation
from conformance.run.case_tensors import GlobalTensors, build
from conformance.run.play_case import play
from conformance.tiers.calls.one_rank import Tensors

__all__ = ["gradcheck", "result_names"]


def result_names(case: Case) -> list[str]:
    """Of the results of the forward pass."""
    return ["out", "lse"] if case.return_lse else ["out"]


class _Whole(torch.autograd.Function):
    """All ranks' attention as one function of the global tensors: each pass plays the whole group."""

    @staticmethod
    def forward(
        ctx: Any, impl: Implementation, case: Case, tensors: GlobalTensors, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.impl, ctx.case, ctx.tensors, ctx.inputs = impl, case, tensors, inputs
        results = _played(impl, replace(case, grads=""), _with_inputs(tensors, inputs))
        return tuple(results[name] for name in result_names(case))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        upstream = {f"d{name}": grad.contiguous() for name, grad in zip(result_names(ctx.case), grads, strict=True)}
        tensors = replace(_with_inputs(ctx.tensors, ctx.inputs), **upstream)
        results = _played(ctx.impl, ctx.case, tensors)
        names = ["dq", "dk", "dv", "d_offset"][: len(ctx.inputs)]
        return None, None, None, *(results[name] for name in names)


def _with_inputs(tensors: GlobalTensors, inputs: tuple[torch.Tensor, ...]) -> GlobalTensors:
    q, k, v, *offset = (x.detach() for x in inputs)
    return replace(tensors, q=q, k=k, v=v, softmax_offset=offset[0] if offset else None)


def _played(impl: Implementation, case: Case, tensors: GlobalTensors) -> Tensors:
    played = play(impl, case, tensors)
    if played.findings:
        raise AssertionError("; ".join(played.findings))
    return played.results


def gradcheck(impl: Implementation, case: Case, device: str) -> list[str]:
    """Findings of `torch.autograd.gradcheck`, through the ranks of the whole group."""
    tensors = build(case, device)
    inputs = [
        x.clone().requires_grad_() for x in (tensors.q, tensors.k, tensors.v, tensors.softmax_offset) if x is not None
    ]
    try:
        torch.autograd.gradcheck(
            lambda *x: _Whole.apply(impl, case, tensors, *x), inputs, fast_mode=True, nondet_tol=1e-12
        )
    except (AssertionError, RuntimeError) as wrong:
        return [f"gradcheck: {' '.join(str(wrong).split())[:400]}"]
    return []
