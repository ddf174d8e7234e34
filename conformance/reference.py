"""The one door to `cp_ref`: the oracle and the simulated group. All other modules import `cp_ref.spec` at most."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from conformance.case import Case
from conformance.tensors import GlobalTensors, attention_arguments
from cp_ref import SimGroup, dense_attention

__all__ = ["Hang", "Outcome", "describe_error", "exact_results", "run_ranks"]


class Hang(RuntimeError):
    """The ranks did not finish within the time limit. Their threads are left behind."""


class Outcome(NamedTuple):
    """What one rank's function gave: a value, or the error that it raised."""

    value: Any
    error: Exception | None


def describe_error(error: Exception) -> str:
    """An exception's type and message, and where it was raised: file name and line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" (at {trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{place}"


def run_ranks(cp_size: int, fn: Callable[[Any], Any], limit_s: float = 60.0) -> list[Outcome]:
    """`fn(member)` on every rank of a simulated group, each rank in its thread.

    Returns:
        One outcome per rank; a rank's exception is an outcome. What the group itself finds (an unmatched message) is
        every rank's.

    Raises:
        Hang: after `limit_s` seconds.
    """

    outcomes: list[Outcome | None] = [None] * cp_size

    def guarded(member: Any) -> None:
        try:
            outcomes[member.rank] = Outcome(fn(member), None)
        except Exception as error:  # the caller judges it
            outcomes[member.rank] = Outcome(None, error)

    def play() -> None:
        try:
            SimGroup(cp_size).run(guarded)
        except Exception as error:  # what is left on the wire after a rank's own failure says nothing new
            if not any(o and o.error for o in outcomes):
                outcomes[:] = [Outcome(None, error)] * cp_size

    watched = threading.Thread(target=play, daemon=True)
    watched.start()
    watched.join(limit_s)
    if watched.is_alive():
        raise Hang(f"the ranks did not finish within {limit_s:g} s")
    return [o or Outcome(None, RuntimeError("the rank did not run")) for o in outcomes]


def exact_results(case: Case, tensors: GlobalTensors) -> dict[str, torch.Tensor]:
    """The oracle's results, float64: out, lse, max_logit, dq, dk, dv, and d_offset where there is an offset.

    Gradients are those of sum(out * dout) + sum(lse * dlse), or of the term that `case.loss` names. The oracle gets
    zeros where the tensors have NaN or infinity.
    """
    inputs = {name: _clean(getattr(tensors, name)).double().requires_grad_() for name in ("q", "k", "v")}
    offset = None if tensors.softmax_offset is None else tensors.softmax_offset.double().requires_grad_()
    arguments = attention_arguments(case.problem, str(tensors.q.device))
    with torch.enable_grad():
        out, lse, max_logit = dense_attention(**inputs, softmax_offset=offset, **arguments)
        terms = []
        if "out" in case.loss:
            terms.append((out * _clean(tensors.dout).double()).sum())
        if "lse" in case.loss:  # a row that sees nothing has lse -inf and no gradient
            terms.append((lse.masked_fill(lse == float("-inf"), 0.0) * _clean(tensors.dlse).double()).sum())
        results = {"out": out.detach(), "lse": lse.detach(), "max_logit": max_logit.detach()}
        leaves = {"dq": inputs["q"], "dk": inputs["k"], "dv": inputs["v"]}
        if offset is not None:
            leaves["d_offset"] = offset
        loss = torch.stack(terms).sum()
        grads = [None] * len(leaves)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            results[name] = torch.zeros_like(leaf) if grad is None else grad
    return {name: x.detach() for name, x in results.items()}


def _clean(x: torch.Tensor) -> torch.Tensor:
    return x.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
