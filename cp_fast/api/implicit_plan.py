"""The plan of a call of `attention` without one: that of an equal call before, or a new one on which all ranks agree.

Lengths and attention slices on the CPU are compared by value. On a GPU every call reads them, and waits for the GPU: a
replayed CUDA graph or another library's kernel can change the values without changing the tensor's identity or version.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from cp_fast.api.checked_calls import checking
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.make_plan import Made, backend_for, prepared
from cp_fast.api.plan import Plan, agree_on
from cp_fast.api.plan_cache import Signature
from cp_fast.api.planned_call import PLAIN_TENSORS, CallFlags, requires_grad
from cp_fast.api.score_arguments import ScoreArguments
from cp_fast.backends import Backend
from cp_fast.compile.index_tables import check_row_numbers
from cp_ref.contract.attention_call import refuse_plan, with_digest
from cp_ref.contract.call_checks import check_global_lengths, check_local_tensors, check_placements, check_uneven
from cp_ref.contract.plan_arguments import read_call
from cp_ref.contract.read_problem import check_offset, read_sizes
from cp_ref.contract.room import Agreement
from cp_ref.contract.score_inputs import read_score_inputs

__all__ = ["Call", "on_host", "plan_of_call"]

_PLAIN = {str, int, float, bool, type(None), tuple, list}  # Equal values of one of these types mean the same.


def plan_of_call(call: Call) -> Plan:
    """The plan of a call. Collective under `checked`, and if the agreement is not among the ranks' last ones.

    Raises:
        ValueError, TypeError: an argument is wrong, here or, if the call is collective, on another rank. Unsupported:
        naming what is missing.
    """
    cp = call.cp
    if checking() or (call.on_gpu and torch.cuda.is_current_stream_capturing()):  # A graph keeps its plan.
        return agree_on(cp, lambda: call.made(())).plan
    signature = call.signature()
    kept = cp.agreements
    if (found := kept.plan_of(signature)) is not None:
        return found

    agreement, plan = agree_on(cp, lambda: call.made(kept.plans(signature.stream)), kept.fingerprints)
    kept.keep(agreement.fingerprint, signature, plan)
    return plan


class Call(NamedTuple):
    """A call of `attention` without a plan of this package. Nothing in it has been checked.

    Attributes:
        given: q, k, v, by name, as the caller gave them; DTensors are possible.
        tensors: q, k, v: their local parts.
        offset: softmax_offset, one a head.
        scores: the arguments of scores that depend on places.
        problem: the arguments that make the problem, by name; lengths on the host.
        plan: the caller's argument `plan`.
    """

    cp: ContextParallel
    given: dict[str, Any]
    tensors: tuple[Any, Any, Any]
    offset: Any
    scores: ScoreArguments
    flags: CallFlags
    problem: dict[str, Any]
    plan: Any = None

    @property
    def on_gpu(self) -> bool:
        """Whether q lies on a GPU."""
        return isinstance(self.tensors[0], torch.Tensor) and self.tensors[0].is_cuda

    def read(self) -> tuple[Agreement, Backend, torch.device]:
        """The agreement of all ranks, this rank's kernel library and device; raises this rank's argument errors."""
        cp, q = self.cp, self.tensors[0]
        refuse_plan(self.plan, Plan)
        self.flags.check()
        check_placements(cp, cp.layout, self.problem["qkv_format"], self.offset, **self.given)
        problem = read_call(cp, read_sizes(*self.tensors, self.problem["qkv_format"], cp.size), **self.problem)
        check_row_numbers(problem)
        deterministic, return_max_logit, _ = self.flags
        how = {"deterministic": deterministic, "return_max_logit": return_max_logit}
        backend = backend_for(cp, problem, q.device.type, **how, more=self.scores.features)
        check_local_tensors(problem, cp.rank, *self.tensors)
        check_global_lengths(problem, None, *self.tensors[:2])
        check_uneven(cp, problem, alibi=self.scores.alibi_slopes is not None, max_logit=return_max_logit)
        check_offset(problem, self.offset, q)
        inputs = read_score_inputs(problem, self.problem["score_mod"], q, **self.scores._asdict())
        if inputs.features:
            backend.check_score_inputs(problem.scores, inputs)
        return Agreement(problem, extras=self._extras(), compared=self.scores.seed), backend, q.device

    def made(self, earlier: Iterable[Plan]) -> Made:
        """An earlier plan of the same problem, or a new one."""
        agreement, backend, device = self.read()
        wanted = agreement.problem.fingerprint, backend, device
        equal = (p for p in earlier if (p.problem.fingerprint, p.backend, p.device) == wanted)
        how = agreement, backend, device
        return Made(agreement, next(equal, None) or prepared(self.cp, *how, None, self.problem["score_mod"]))

    def _extras(self) -> tuple[tuple[str, object], ...]:
        """Other values that decide the messages. In the backward pass: whether the sinks' gradients are summed over all
        ranks, and whether heads are exchanged for the gradient of lse too.
        """
        cp = self.cp
        extras: dict[str, object] = {
            "return_max_logit": self.flags.return_max_logit,
            "requires_grad": requires_grad(*self.tensors),
        }
        extras["softmax_offset_grad"] = cp.softmax_offset_grad
        if cp.softmax_offset_grad == "total":
            extras["softmax_offset.requires_grad"] = requires_grad(self.offset)
        if cp.a2a_size > 1:
            extras["return_lse"] = self.flags.return_lse
        return *extras.items(), *self.scores.kinds()

    def signature(self) -> Signature:
        """Everything that determines the agreement and the plan; if it cannot be compared, a signature unlike any
        other.
        """
        (q, k, v), cp = self.tensors, self.cp
        stream = torch.cuda.current_stream(q.device).cuda_stream if self.on_gpu else 0
        try:
            problem = self.problem if self.problem["score_mod"] is None else with_digest(self.problem)
        except (TypeError, ValueError):  # `read` will say what is wrong, to all ranks.
            return Signature((object(),), stream, ())
        lengths = {name: x for name, x in problem.items() if isinstance(x, torch.Tensor)}
        settings = [x for name, x in problem.items() if name not in lengths]
        settings += [self.plan, *self.flags]
        items = (*(item for x in settings for item in (x if type(x) in (tuple, list) else (x,))),)
        types = *map(type, settings), *map(type, items)  # Since True == 1 == 1.0.
        if self.plan is None and _PLAIN.issuperset(types) and {type(q), type(k), type(v)} <= PLAIN_TENSORS:
            try:
                values = tuple((name, tuple(x.shape), x.dtype, x.numpy().tobytes()) for name, x in lengths.items())
                packed = self.problem["qkv_format"] == "thd"  # Then the number of rows may differ by tails.
                sizes = (q.shape[1:], k.shape[1:], v.shape[1:]) if packed else (q.shape, k.shape, v.shape)
            except (RuntimeError, TypeError):  # Without values or without a shape: sparse, nested, on meta.
                return Signature((object(),), stream, ())
            grads = requires_grad(q, k, v), isinstance(self.offset, torch.Tensor) and requires_grad(self.offset)
            context = cp.cp_comm_type, cp.a2a_size, cp.layout, cp.backend, cp.softmax_offset_grad
            context += tuple(rows in cp.uneven for rows in (*q.shape, *k.shape))  # `check_uneven` reads it
            words = types, items, sizes, q.dtype, q.device, grads, context, self.scores.signature(q.device)
            return Signature(words, stream, values)
        return Signature((object(),), stream, ())


def on_host(arguments: dict[str, Any]) -> dict[str, Any]:
    """A problem's arguments with lengths on a GPU copied to the host; a tensor passed twice is copied once."""
    copies = {id(x): x.cpu() for x in arguments.values() if isinstance(x, torch.Tensor) and x.is_cuda}
    return {name: copies.get(id(x), x) for name, x in arguments.items()} if copies else arguments
