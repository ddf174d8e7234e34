"""A call of `attention` with a plan: its checks before anything is sent, and the plan compiled for its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cp_fast.api.checked_calls import agree_on_call, checking, describe
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan
from cp_fast.api.score_arguments import ScoreArguments
from cp_fast.runtime.prepared_exchange import prepares
from cp_fast.runtime.run import CompiledCall
from cp_fast.transport import carries
from cp_ref.contract.call_checks import check_global_lengths, check_local_tensors, check_plan_owner
from cp_ref.contract.read_problem import check_offset
from cp_ref.contract.room import check_room_tensors
from cp_ref.contract.score_inputs import ScoreInputs
from cp_ref.contract.tensors import refuse_transforms
from cp_ref.schedules.values import check_flag
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "PLAIN_TENSORS",
    "AttentionCall",
    "CallFlags",
    "agree_on_forward",
    "call_of_kinds",
    "check_planned_call",
    "compiled_call",
    "known_call",
    "requires_grad",
]

PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
Kind = tuple[Sequence[int], torch.dtype, torch.device, torch.layout]  # Of a tensor: all that the checks read.


class CallFlags(NamedTuple):
    """The flags of one call of `attention`, as the caller gave them. `check` raises TypeError unless all are bools."""

    deterministic: bool
    return_max_logit: bool
    return_lse: bool

    def check(self) -> None:
        for name, flag in zip(self._fields, self, strict=True):
            check_flag(name, flag)


class AttentionCall(NamedTuple):
    """All of a call but its tensors."""

    plan: Plan
    compiled: CompiledCall  # for the tensors' shapes
    cp: ContextParallel
    flags: CallFlags
    number: int  # of a checked call, whose backward pass is checked too; 0 for one that is not
    scores: ScoreInputs | None  # what scores depend on besides q and k; None for nothing


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a call of these tensors will have a backward pass."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def agree_on_forward(
    plan: Plan,
    cp: ContextParallel,
    flags: CallFlags,
    look: Callable[[], ScoreInputs | None],
    scores: ScoreArguments,
    *tensors: Any,
) -> tuple[int, ScoreInputs | None]:
    """Look at a call's arguments; under `cp_fast.checked` agree on the call with all ranks.

    Args:
        look: raises what is wrong with the arguments here; returns the inputs of scores.
        scores: the arguments of scores that depend on places.
        tensors: q, k, v, softmax_offset.

    Returns:
        The call's number, 0 where it is not checked; and the inputs of its scores.
    """
    if not checking():
        return 0, look()
    found: list[ScoreInputs | None] = []
    shapes = (describe(name, x) for name, x in zip(("q", "k", "v", "softmax_offset"), tensors, strict=True))
    how = zip(CallFlags._fields, flags, strict=True)
    grads = (x for x in tensors if isinstance(x, torch.Tensor))
    details = (*shapes, *how, *scores.values(), ("requires_grad", requires_grad(*grads)))
    return agree_on_call(cp, plan, "forward", lambda: found.append(look()), *details), found[0]


def check_planned_call(
    plan: Plan, cp: ContextParallel, flags: CallFlags, scores: ScoreArguments, q: Any, k: Any, v: Any, offset: Any
) -> ScoreInputs | None:
    """Check that the tensors fit the plan, lie on its device, and that its kernel library has the features of the call.

    Returns:
        What scores depend on besides q and k; None for nothing.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule. Unsupported: naming what is missing.
    """
    check_plan_owner(plan.problem, plan.rank, cp)
    flags.check()
    if not _are_plain(q, k, v) or plan.calls.get(_key(plan, cp, *_kinds(q, k, v))) is None:
        check_local_tensors(plan.problem, cp.rank, q, k, v)
        check_room_tensors(plan.room, q, k)
        check_global_lengths(plan.problem, plan.room, q, k)
        if q.device.type != plan.device.type or plan.device.index not in (None, q.device.index):
            raise ValueError(f"q is on {q.device}, but the plan was made for {plan.device}")
    check_offset(plan.problem, offset, q)
    if missing := _missing(plan, flags):
        raise Unsupported("this call", {f"the plan's backend {plan.backend.name!r}": missing}, "say so in make_plan")
    return scores.read(plan, q)


def known_call(
    plan: Any, cp: ContextParallel, flags: CallFlags, scores: ScoreArguments, q: Any, k: Any, v: Any
) -> AttentionCall | None:
    """This call as an equal one before, of another layer or step, if it needs no more checks. Only for plain tensors in
    plain eager mode, without an offset.

    Raises:
        ValueError: the plan is another context's. NotImplementedError: inside a transform of torch.func.
    """
    if torch.compiler.is_compiling() or not isinstance(plan, Plan) or checking():
        return None
    if {*map(type, flags)} != {bool} or not _are_plain(q, k, v):
        return None
    if plan.problem.softmax_type == "learnable" or torch.is_autocast_enabled(plan.device.type):
        return None
    found = plan.calls.get(_key(plan, cp, *_kinds(q, k, v)))
    if found is None or ((flags.deterministic or flags.return_max_logit) and _missing(plan, flags)):
        return None
    inputs = None
    if not (scores.empty and plan.plain) and (inputs := scores.known(plan, q)) is None:
        return None
    refuse_transforms()
    check_plan_owner(plan.problem, plan.rank, cp)
    return AttentionCall(plan, found, cp, flags, 0, inputs)


def compiled_call(plan: Plan, cp: ContextParallel, q: Any, k: Any, v: Any) -> CompiledCall:
    """The plan compiled for checked tensors."""
    return call_of_kinds(plan, cp, *_kinds(q, k, v))


def call_of_kinds(plan: Plan, cp: ContextParallel, q: Kind, k: Kind, v: Kind) -> CompiledCall:
    """The plan compiled for checked tensors of these kinds."""
    key = _key(plan, cp, q, k, v)

    def make() -> CompiledCall:
        packing, (_, dtype, device, _) = plan.packing, q
        sizes = packing.rows(q[0]), packing.rows(k[0])
        return CompiledCall(packing, plan.instructions, plan.positions, plan.backend, key[0], sizes, dtype, device)

    return plan.calls.find(key, make)


def _key(plan: Plan, cp: ContextParallel, *kinds: Kind) -> Any:
    """All values that a compiled call depends on. The transport comes first, if it prepares exchanges."""
    comm = cp.comm
    if plan.messages is not None and carries(plan.messages, comm):
        comm = plan.messages
    return comm if prepares(comm) else None, *kinds


def _are_plain(q: Any, k: Any, v: Any) -> bool:
    """Whether the checks of these tensors read their kinds alone."""
    return type(q) in PLAIN_TENSORS and type(k) in PLAIN_TENSORS and type(v) in PLAIN_TENSORS


def _kinds(q: Any, k: Any, v: Any) -> tuple[Kind, Kind, Kind]:
    return (
        (q.shape, q.dtype, q.device, q.layout),
        (k.shape, k.dtype, k.device, k.layout),
        (v.shape, v.dtype, v.device, v.layout),
    )


def _missing(plan: Plan, flags: CallFlags) -> set[Feature]:
    """The features of a call that the plan's kernel library lacks."""
    wanted = (Feature.DETERMINISTIC, flags.deterministic), (Feature.MAX_LOGIT, flags.return_max_logit)
    return {feature for feature, asked in wanted if asked} - plan.backend.features
