"""A call of `attention`: its checks before anything is sent, its plan, and the plan compiled for its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from cp_fast.api.call_scores import (
    agreed_kinds,
    checked_scores,
    is_empty,
    kinds_and_digests,
    known_scores,
    note_checked,
    scores_key,
    seed_on_host,
)
from cp_fast.api.checked_calls import agree_on_call, checking, describe
from cp_fast.api.compiled_batch import CompiledBatch
from cp_fast.api.fast_context import PLAIN_TENSORS, WORDS, ContextParallel, Signature, call_key
from cp_fast.api.plan import Plan, backend_for, plan_of_rank
from cp_fast.compile.index_tables import check_row_numbers
from cp_fast.compile.own_keys import choose_own_first
from cp_fast.runtime.prepared_exchange import prepares
from cp_fast.runtime.run import CompiledCall
from cp_ref.batches.tensors import needs_grad
from cp_ref.calls.attention_call import AttentionCall, CallFlags
from cp_ref.calls.score_mod import with_digest
from cp_ref.calls.scores import NOT_GIVEN, ScoreTensors, read_scores
from cp_ref.groups.agreement import agreed
from cp_ref.problems.call_checks import check_plan_device
from cp_ref.problems.room import Agreement
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "CheckedCall",
    "Kind",
    "agree_on_forward",
    "check_planned_call",
    "compile_call",
    "known_call",
    "on_host",
    "plan_of_call",
]

# ---- with a plan
#
# A call of `attention` with a plan: its checks before anything is sent, and the plan compiled for its tensors.


_WORDS_AND_PAIRS = {*WORDS, tuple, list}


class Kind(NamedTuple):
    """What the checks read of a tensor."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout


class CheckedCall(NamedTuple):
    """A call with a plan that is checked: all of it but its tensors."""

    plan: Plan
    batch: CompiledBatch  # the plan's, in the forward pass
    compiled_call: CompiledCall  # for the tensors' shapes
    cp: ContextParallel
    flags: CallFlags
    scores: ScoreTensors | None  # Scores depend on these besides q and k. None: on nothing else.
    number: int = 0  # A checked call's: its backward pass is checked too. 0: it is not checked.

    def check_batch(self) -> None:
        """Raise RuntimeError where the plan was updated since."""
        if self.plan.batch is not self.batch:
            raise RuntimeError("the plan was updated between the forward and the backward pass of a call")


def known_call(
    plan: Plan, cp: ContextParallel, flags: CallFlags, scores: ScoreTensors, tensors: Sequence[Any]
) -> CheckedCall | None:
    """A call of local tensors, without other arguments, if `check_planned_call` has seen one like it: of another layer
    or step. tensors: q, k, v and offset.
    """
    batch, inputs = plan.batch, None
    key = call_key(cp, flags, tensors)
    if key is None or (compiled_call := batch.calls.attention.get(key)) is None:
        return None
    if not (compiled_call.position_free and (scores is NOT_GIVEN or is_empty(scores))):
        inputs = known_scores(plan, scores, tensors[0])
        if inputs is None:
            return None
    return CheckedCall(plan, batch, compiled_call, cp, flags, inputs)


def check_planned_call(call: AttentionCall, plan: Plan) -> CheckedCall:
    """Check that the tensors fit the plan, lie on its device, and that its kernel library has the features of the call,
    unless such a call is known.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule. Unsupported: naming what is missing.
    """
    problem, cp, flags, tensors = plan.problem, call.cp, call.flags, (*call.tensors, call.offset)
    if call.plan is plan:
        call.check_plan()
    else:
        call.check_placements(problem)
    if (known := known_call(plan, cp, flags, call.scores, tensors)) is not None:
        return known
    call.check_tensors(problem, plan.room)
    check_plan_device(plan.device, "q", call.tensors[0])
    call.check_offset(problem)
    if missing := _missing(plan, flags):
        raise Unsupported("this call", {f"the plan's backend {plan.backend.name!r}": missing}, "say so in make_plan")
    scores = checked_scores(plan, call.scores, call.tensors[0])
    compiled_call = compile_call(plan, cp, *call.tensors)
    if (key := call_key(cp, flags, tensors)) is not None:
        plan.batch.calls.attention.find(key, lambda: compiled_call)
    return CheckedCall(plan, plan.batch, compiled_call, cp, flags, scores)


def agree_on_forward(call: AttentionCall, plan: Plan) -> CheckedCall:
    """Check a call against its plan, which the user gave or `plan_of_call` made. Under `cp_fast.checked` agree on the
    call with all ranks.
    """
    if not checking():
        return check_planned_call(call, plan)

    def read() -> tuple[CheckedCall, list[tuple[str, object]]]:
        found, grads = check_planned_call(call, plan), needs_grad(*call.tensors, call.offset)
        tensors = dict(zip(("q", "k", "v", "softmax_offset"), (*call.tensors, call.offset), strict=True))
        shapes = [describe(*one) for one in tensors.items()]
        how = zip(CallFlags._fields, call.flags, strict=True)
        return found, [*shapes, *how, *kinds_and_digests(call.scores), ("requires_grad", grads)]

    found, number = agree_on_call(call.cp, plan, "forward", read)
    return found._replace(number=number)


def compile_call(plan: Plan, cp: ContextParallel, q: Any, k: Any, v: Any) -> CompiledCall:
    """Compile the plan once for the kinds of checked tensors (which may be `Kind`s), and for the transport, if it
    prepares exchanges.
    """
    batch = plan.batch
    comm = batch.group(cp.comm)
    transport = comm if prepares(comm) else None
    key = transport, *((x.shape, x.dtype, x.device, x.layout) for x in (q, k, v))

    def make() -> CompiledCall:
        packing, sizes = batch.packing, (batch.packing.rows(q.shape), batch.packing.rows(k.shape))
        how = packing, batch.programs, batch.positions, batch.backend
        return CompiledCall(*how, transport, sizes, q.dtype, q.device)

    return batch.calls.compiled.find(key, make)


def _missing(plan: Plan, flags: CallFlags) -> set[Feature]:
    """The features of a call that the plan's kernel library lacks."""
    wanted = (Feature.DETERMINISTIC, flags.deterministic), (Feature.MAX_LOGIT, flags.return_max_logit)
    return {feature for feature, asked in wanted if asked} - plan.backend.features


# ---- without a plan
#
# The plan of a call of `attention` without one: that of an equal call before, or a new one on which all ranks agree.
#
# Lengths and areas on the CPU are compared by value. On a GPU every call reads them, and waits for the GPU: a replayed
# CUDA graph or another library's kernel can change the values without changing the tensor's identity or version.


def plan_of_call(call: AttentionCall) -> Plan:
    """The plan of a call. Collective under `checked`, and if the agreement is not among the ranks' last ones.

    Raises:
        ValueError, TypeError: an argument is wrong, here or, if the call is collective, on another rank. Unsupported:
        naming what is missing.
    """
    cp, what = call.cp, "an agreement on a plan"
    if checking() or (_on_gpu(call) and torch.cuda.is_current_stream_capturing()):  # A graph keeps its plan.
        return agreed(cp, what, lambda: _plan_of_problem(call, ()), lambda made: made[0])[1]
    signature = _signature_of_call(call)
    agreements = cp.agreements
    if (found := agreements.plan_of(signature)) is not None:
        return found

    def read() -> tuple[Agreement, Plan]:
        return _plan_of_problem(call, agreements.plans(signature.stream))

    agreement, plan = agreed(cp, what, read, lambda made: made[0], agreements.fingerprints)
    agreements.keep(agreement.fingerprint, signature, plan)
    return plan


def _plan_of_problem(call: AttentionCall, earlier: Iterable[Plan]) -> tuple[Agreement, Plan]:
    """An earlier plan of the same problem, or a new one; raises this rank's argument errors."""
    problem, q, score_mod = call.read_problem(Plan), call.tensors[0], call.arguments["score_mod"]
    check_row_numbers(problem)
    deterministic, return_max_logit, _ = call.flags
    how = {"deterministic": deterministic, "return_max_logit": return_max_logit}
    backend = backend_for(call.cp, problem, q.device.type, **how, more=call.scores.features)
    call.check_tensors(problem)
    call.check_offset(problem)
    scores = read_scores(problem, score_mod, q, call.scores)
    if scores.features:
        backend.check_score_inputs(problem.scores, scores)
    agreement = Agreement(problem, extras=_extras(call, problem), compared=seed_on_host(call.scores))
    wanted = problem.fingerprint, backend, q.device, choose_own_first(problem, deterministic=deterministic)
    for plan in earlier:
        batch = plan.batch
        if (batch.problem.fingerprint, batch.backend, batch.device, batch.choices.own_first) == wanted:
            break
    else:
        plan = plan_of_rank(call.cp, agreement, backend, q.device, None, score_mod, deterministic=deterministic)
    if scores.features:
        note_checked(plan, call.scores, scores, q)
    return agreement, plan


def _extras(call: AttentionCall, problem: Problem) -> tuple[tuple[str, object], ...]:
    """Other values that decide the messages. In the backward pass: whether the sinks' gradients are summed over all
    ranks, and whether heads are exchanged for the gradient of lse too.
    """
    cp = call.cp
    extras: dict[str, object] = {
        "return_max_logit": call.flags.return_max_logit,
        "requires_grad": needs_grad(*call.tensors),
    }
    extras["softmax_offset_grad"] = cp.softmax_offset_grad
    if problem.cp_comm_type == "all_gather":
        extras["deterministic"] = call.flags.deterministic
    if cp.softmax_offset_grad == "total":
        extras["softmax_offset.requires_grad"] = needs_grad(call.offset)
    if problem.a2a_size > 1:
        extras["return_lse"] = call.flags.return_lse
    return *extras.items(), *agreed_kinds(call.scores)


def _signature_of_call(call: AttentionCall) -> Signature:
    """Everything that determines the agreement and the plan; if it cannot be compared, a signature unlike any other."""
    (q, k, v), cp = call.tensors, call.cp
    stream = torch.cuda.current_stream(q.device).cuda_stream if _on_gpu(call) else 0
    try:
        problem = call.arguments if call.arguments["score_mod"] is None else with_digest(call.arguments)
    except (TypeError, ValueError):  # `read_problem` will say what is wrong, to all ranks.
        return _unlike_any(stream)
    lengths = {name: x for name, x in problem.items() if isinstance(x, torch.Tensor)}
    settings = [x for name, x in problem.items() if name not in lengths]
    settings += [call.plan, *call.flags]
    items = (*(item for x in settings for item in (x if type(x) in (tuple, list) else (x,))),)
    types = *map(type, settings), *map(type, items)  # Since True == 1 == 1.0.
    if call.plan is None and _WORDS_AND_PAIRS.issuperset(types) and PLAIN_TENSORS.issuperset(map(type, (q, k, v))):
        try:
            values = tuple((name, tuple(x.shape), x.dtype, x.numpy().tobytes()) for name, x in lengths.items())
            packed = problem["qkv_format"] == "thd"  # Then the number of rows may differ by tails.
            sizes = (q.shape[1:], k.shape[1:], v.shape[1:]) if packed else (q.shape, k.shape, v.shape)
        except (RuntimeError, TypeError):  # Without values or without a shape: sparse, nested, on meta.
            return _unlike_any(stream)
        grads = needs_grad(q, k, v), needs_grad(call.offset)
        context = cp.cp_comm_type, cp.a2a_size, cp.layout, cp.backend, cp.softmax_offset_grad
        context += tuple(rows in cp.uneven for rows in (*q.shape, *k.shape))  # `check_uneven` reads it
        words = types, items, sizes, q.dtype, q.device, grads, context, scores_key(call.scores, q.device)
        return Signature(words, stream, values)
    return _unlike_any(stream)


def _unlike_any(stream: int) -> Signature:
    return Signature((object(),), stream, ())


def _on_gpu(call: AttentionCall) -> bool:
    """Whether q lies on a GPU."""
    return isinstance(call.tensors[0], torch.Tensor) and call.tensors[0].is_cuda


def on_host(arguments: dict[str, Any]) -> dict[str, Any]:
    """A problem's arguments with lengths on a GPU copied to the host; a tensor passed twice is copied once."""
    copies = {id(x): x.cpu() for x in arguments.values() if isinstance(x, torch.Tensor) and x.is_cuda}
    return {name: copies.get(id(x), x) for name, x in arguments.items()} if copies else arguments
