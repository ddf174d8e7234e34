"""Tier `determinism`: with deterministic=True the same call gives the same bits, however often and whatever ran
between.

Each rank plays the case three times: plainly, again after another call has shuffled the memory, and with a plan; and
once more with that plan, which a second layer would use too. A plan holds no state of a call.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from conformance.case import Case
from conformance.implementation import Implementation
from conformance.run.case_tensors import build
from conformance.tiers.calls.one_rank import Call, Tensors, on_every_rank, same_bits

__all__ = ["check"]


def check(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Results that are not the same to the last bit.

    Raises:
        UnsupportedCase: the implementation does not have this, or has no deterministic way to it, and says so.
    """
    case = replace(case, deterministic=True, strided=False)
    return on_every_rank(impl, case, build(case, device), _check_rank)


def _check_rank(call: Call) -> list[str]:
    first = call.both(call.leaves())
    other = _other_values(call)
    found = same_bits("of a second call", first, call.both(call.leaves()))
    if not call.impl.offers("make_plan"):
        return found + same_bits("of other values after these", other, _other_values(call))
    plan = call.plan()
    planned = call.both(call.leaves(), plan)
    found += same_bits("of a call with a plan", first, planned)
    found += same_bits("of other values with the same plan", other, _other_values(call, plan))
    return found + same_bits("of a second call with the same plan", planned, call.both(call.leaves(), plan))


def _other_values(call: Call, plan: object = None) -> Tensors:
    """The same problem with other values: what it leaves behind in memory is not what the next call needs."""
    leaves = {name: (x.detach() * -0.5 + 1.0).requires_grad_(x.requires_grad) for name, x in call.leaves().items()}
    results = call.both(leaves, plan)
    torch.empty(257, dtype=call.dout.dtype, device=call.dout.device).fill_(float("nan"))
    return results
