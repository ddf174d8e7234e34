"""The one door to `cp_ref`: the oracle and the simulated group. All other modules import `cp_ref.spec` at most."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from conformance.case import Case
from conformance.tensors import GlobalTensors, attention_arguments
from cp_ref import SimGroup, dense_attention

__all__ = ["Hang", "Outcome", "exact_results", "run_ranks"]


class Hang(RuntimeError):
    """The ranks did not finish within the time limit. Their threads are left behind."""


class Outcome(NamedTuple):
    """What one rank's function gave: a value, or the error that it raised."""

    value: Any
    error: Exception | None


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
    """The oracle's results, float64, under the names that `case.results` lists, and always lse and max_logit.

    Gradients are those of sum(out * dout) + sum(lse * dlse), or of the term that `case.loss` names. The oracle gets
    zeros where the tensors have NaN.
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
        leaves = {"dq": inputs["q"], "dk": inputs["k"], "dv": inputs["v"]} | (
            {} if offset is None else {"d_offset": offset}
        )
        wanted = {name: leaf for name, leaf in leaves.items() if name in case.results}
        if wanted:
            loss = torch.stack(terms).sum()
            if loss.requires_grad:
                grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
            else:
                grads = (None,) * len(wanted)
            for (name, leaf), grad in zip(wanted.items(), grads, strict=True):
                results[name] = torch.zeros_like(leaf) if grad is None else grad
    return {name: x.detach() for name, x in results.items()}


def _clean(x: torch.Tensor) -> torch.Tensor:
    return x.detach().masked_fill(x.isnan(), 0.0)
