"""Small good calls on two ranks, which the tier `errors` changes to malformed ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from conformance.draw.adapted import first_of
from conformance.draw.capabilities import capabilities_of
from conformance.implementation import Implementation
from conformance.judge.reference import run_ranks

__all__ = ["SmallCall", "call_of", "cu", "good_call"]

_PLAIN = {"cp_comm_type": "p2p", "layout": "dual_chunk"}


@dataclass(frozen=True)
class SmallCall:
    """One rank's call: of `attention`, or of what `what` names. cp_size 2, h_q 4, h_kv 2, d 8.

    bshd: [2, 4, h, 8] per rank, so 2 sequences of 8. thd: 6 tokens per rank; lengths 5 and 4 in 8 and 4 slots.
    """

    arguments: dict[str, Any]
    context: dict[str, Any] = field(default_factory=dict)
    what: str = "attention"
    plan_of: int = 0  # Make a plan first, with the good call's arguments, in a group of this size.
    plan_context: dict[str, Any] = field(default_factory=dict)
    plan_dtype: torch.dtype = torch.float32

    def run(self, impl: Implementation, member: Any) -> Any:
        """Make the ContextParallel and the call."""
        arguments = dict(self.arguments)
        if self.plan_of:
            plan_call = replace(good_call("plan", dtype=self.plan_dtype), context=self.context | self.plan_context)
            arguments["plan"] = _plan(impl, member, self.plan_of, plan_call)
        cp = impl.ContextParallel(**{"group": member, **self.context})
        if self.what == "attention":
            return impl.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), cp=cp, **arguments)
        if self.what in ("shard", "unshard"):
            return getattr(impl, self.what)(arguments.pop("x"), cp=cp, **arguments)
        return getattr(impl, self.what)(cp=cp, **arguments)

    def having(self, **arguments: Any) -> SmallCall:
        """The call with some arguments exchanged."""
        return replace(self, arguments=self.arguments | arguments)

    def calling(self, what: str, **arguments: Any) -> SmallCall:
        """Another function's call."""
        return replace(self, what=what, arguments=arguments)

    def using(self, **context: Any) -> SmallCall:
        """The call with another ContextParallel."""
        return replace(self, context=self.context | context)

    def planned(self, size: int, **context: Any) -> SmallCall:
        """The bshd call with tensors and a plan alone. The plan is of a group of `size` with this ContextParallel."""
        tensors = {name: x for name, x in self.arguments.items() if name in ("q", "k", "v")}
        dtype = tensors["q"].dtype
        return replace(self, arguments=tensors, plan_of=size, plan_context=context, plan_dtype=dtype)


def _plan(impl: Implementation, member: Any, size: int, call: SmallCall) -> Any:
    if size == member.size:
        return call.run(impl, member)
    plans = run_ranks(size, lambda other: call.run(impl, other))
    if plans[0].error is not None:
        raise RuntimeError(f"no plan to change: {plans[0].error}") from plans[0].error
    return plans[member.rank % size].value


def call_of(impl: Implementation, base: str, device: str = "cpu") -> SmallCall:
    """`good_call`, with a schedule, a layout and a dtype that the implementation has."""
    capabilities = capabilities_of(impl, device)
    dtype = getattr(torch, first_of(capabilities, "dtype", "float32"))
    context = {axis: first_of(capabilities, axis, plain) for axis, plain in _PLAIN.items()}
    return replace(good_call(base, device, dtype), context={k: v for k, v in context.items() if v != _PLAIN[k]})


def good_call(base: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> SmallCall:
    """A well-formed call: "bshd" or "thd" (attention), "dropout" (the first with dropout), "plan" (make_plan, bshd)."""
    if base == "plan":
        sizes = {
            "heads_q": 4,
            "heads_kv": 2,
            "d_qk": 8,
            "d_v": 8,
            "dtype": dtype,
            "device": torch.device(device),
        }
        return SmallCall({"batch_size": 2, "seqlen_q": 8, "seqlen_kv": 8, **sizes}, what="make_plan")
    shape = [6] if base == "thd" else [2, 4]
    tensors = {
        name: torch.ones(*shape, 4 if name == "q" else 2, 8, dtype=dtype, device=device) for name in ("q", "k", "v")
    }
    if base in ("bshd", "dropout"):
        return SmallCall(tensors | ({"dropout_p": 0.5, "dropout_seed": 3} if base == "dropout" else {}))
    lengths = {"cu_seqlens_q": cu(0, 5, 9, device=device), "cu_seqlens_q_padded": cu(0, 8, 12, device=device)}
    return SmallCall({**tensors, "qkv_format": "thd", **lengths})


def cu(*values: int, device: str = "cpu", dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Cumulative lengths."""
    return torch.tensor(values, dtype=dtype, device=device)
