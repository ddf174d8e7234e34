"""A plan: all host-side work and device tables of one batch, shared by every layer."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch

from cp_fast.api.compiled_batch import CompiledBatch, compile_batch
from cp_fast.api.fast_context import ContextParallel
from cp_fast.compile.index_tables import check_row_numbers
from cp_fast.compile.instruction_passes import low_precision_grads, may_have_low_precision
from cp_fast.compile.program import Programs
from cp_fast.compile.same_bits import same_bits
from cp_fast.kernels.attention.backend_protocol import Backend
from cp_fast.kernels.attention.choose_backend import EXECUTOR, KERNEL_FEATURES, choose, required
from cp_fast.movers.mover_protocol import Rows
from cp_fast.runtime.handles import OfThisProcess, forget, new_handle, outside_of_graphs
from cp_fast.transport.memory_group import messages_for
from cp_ref.batches.sharding import numbers
from cp_ref.calls import plan_arguments as plans
from cp_ref.calls.declared import bind, implements, not_a_dataclass, replaced, same_parameters
from cp_ref.calls.plan_arguments import read_plan_arguments
from cp_ref.calls.score_mod import ScoreMod, frozen
from cp_ref.groups.agreement import agreed
from cp_ref.problems.call_checks import check_context, check_plan_owner
from cp_ref.problems.cuts import planned_positions
from cp_ref.problems.room import Agreement, next_batch
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.values import check_flag
from cp_ref.schedules.words import Feature, Unsupported, describe

__all__ = ["Plan", "backend_for", "make_plan", "plan_of_rank", "supports"]

T = TypeVar("T")


def _of_batch(read: Callable[[CompiledBatch], T]) -> T:
    """An attribute of a plan that is one of its batch."""
    return cast(Any, property(lambda plan: read(plan.batch)))


@not_a_dataclass
@dataclass(frozen=True, eq=False)  # Plans compare by identity: their tables are tensors.
class Plan(OfThisProcess, plans.Plan):
    """Everything about a batch that does not depend on the tensors' values.

    Attributes:
        batch: the batch, compiled for this rank; `update` gives the plan the next one. The attributes problem, rank,
            device, room, custom, head_chunks, backend, messages, programs and schedule are those of the batch.
        score_mod: a frozen copy of the function whose digest the problem has.
        linear: whether it serves linear layers.
        sparse: whether it was made for attention to chosen keys.
        deterministic: whether `make_plan` was asked for gradients in a fixed order, which sparse attention then gives.
        chosen_from: the schedules from which "auto" has chosen; () where it had no choice.
        agreed: see `cp_ref.calls.plan_arguments.Plan`.
        handle: what torch.compile knows this batch's plan by (`cp_fast.runtime.handles`).

    A copy, deep or not, and the result of `copy.replace` are separate plans that share the read-only tables. A
    plan updated in place can be neither copied nor replaced, and no plan can be pickled: TypeError.
    """

    batch: CompiledBatch
    score_mod: ScoreMod | None = None
    linear: bool = False
    sparse: bool = False
    deterministic: bool = False
    chosen_from: tuple[str, ...] = ()
    agreed: set[bytes] = field(default_factory=set[bytes], repr=False)
    handle: torch.Tensor = field(init=False, repr=False)

    problem = _of_batch(lambda batch: batch.problem)
    rank = _of_batch(lambda batch: batch.rank)
    device = _of_batch(lambda batch: batch.device)
    room = _of_batch(lambda batch: batch.room)
    custom = _of_batch(lambda batch: batch.custom)
    head_chunks = _of_batch(lambda batch: batch.choices.head_chunks)
    backend = _of_batch(lambda batch: batch.backend)
    messages = _of_batch(lambda batch: batch.messages)
    programs = _of_batch(lambda batch: batch.programs)

    def __post_init__(self) -> None:
        if self.batch.fixed is not None:
            self.batch.fixed.take()
        self._hold(self.batch)

    def _hold(self, batch: CompiledBatch) -> None:
        """Make this the plan's batch."""
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "handle", new_handle(self))

    def __copy__(self) -> Plan:
        return replaced(self)

    def __deepcopy__(self, memo: Any) -> Plan:
        return self.__copy__()

    @property
    def schedule(self) -> Schedule:
        """The sends, receives and tiles of every rank, step by step; `programs` comes from this rank's part."""
        return self.batch.schedule

    @property
    def same_bits(self) -> tuple[str, ...]:
        """Those of "out", "lse", "dq", "dk" and "dv" that have, in every row, the bits of one launch of the kernel
        library over the whole batch on one GPU; see docs/how_to/bits.md. Gradients are among them if the plan was made
        with `deterministic=True`. A plan that is updated in place promises none.
        """
        block, problem = self.backend.key_block, self.batch.packing.packed_problem
        if self.room is not None or not block:
            return ()
        found = same_bits(self.programs, problem, deterministic=self.deterministic, key_block=block)
        return tuple(name for name in found if name in self.backend.bits_of)

    @property
    def position_ids(self) -> torch.Tensor:
        """This rank's query positions inside each sequence, for RoPE: int64 [t/cp] for thd, [s/cp] for bshd and
        sbhd. With `room`, [max_tokens_q / cp], 0 in the tail; `update` writes the new ones to the same memory.
        """
        of_room = self.programs.position_ids
        return self._position_ids if of_room is None else of_room

    @cached_property
    @torch.inference_mode(False)
    def _position_ids(self) -> torch.Tensor:
        return numbers(planned_positions(self.problem, self.rank), self.device)

    @property
    def exchanges(self) -> dict[str, Programs[Rows]]:
        """What the layers that were called with this plan send and copy, by the name of the exchange: a program that
        gathers rows, and one that gives results for them back. Printed, one line an instruction.
        """
        made = [
            (name, exchange) for tables in self.batch.tables.values() for name, exchange in tables.exchanges.items()
        ]
        return {name: exchange.programs for name, exchange in made}

    @implements(plans.update)
    @torch.inference_mode(False)
    def update(
        self,
        *,
        cp: ContextParallel,
        **lengths: Any,
    ) -> None:
        def read() -> tuple[Agreement, Callable[[], CompiledBatch]]:
            given = plans.lengths_of_update(self, cp, lengths)
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ValueError("plan.update is called while a CUDA graph is captured; update before it is replayed")
            check_plan_owner(self.problem, self.rank, cp)
            problem = next_batch(self.problem, self.room, given)
            overwrite = self.batch.next(problem)
            return Agreement(problem, self.room, plans.read_linear(self.linear, problem)), overwrite

        check_context(cp, ContextParallel)
        _, overwrite = agreed(cp, "an agreement on a plan", read, lambda found: found[0])
        forget(self.handle)
        self._hold(overwrite())


# ---- from arguments to a plan
#
# `make_plan`: from arguments to a plan on which all ranks agree.


@same_parameters(plans.make_plan)
def make_plan(**arguments: Any) -> Plan:
    if torch.compiler.is_compiling():
        return outside_of_graphs(make_plan, **arguments)
    cp: Any = arguments.get("cp")
    custom = arguments.get("schedule")

    def read() -> tuple[Agreement, Plan]:
        given = bind(plans.make_plan, arguments)
        agreement, backend, device = _read_plan_arguments(given)
        how = {name: given[name] for name in ("linear", "sparse", "deterministic")}
        plan = plan_of_rank(cp, agreement, backend, device, custom, given["score_mod"], **how)
        _ = plan.position_ids  # Made now: a compiled layer could not make them.
        return agreement, plan

    check_context(cp, ContextParallel)
    _, plan = agreed(cp, "an agreement on a plan", read, lambda found: found[0])
    return plan if custom is not None else _with_messages(cp, plan)


@implements(plans.supports)
def supports(**arguments: Any) -> tuple[bool, str]:
    try:
        _read_plan_arguments(bind(plans.make_plan, arguments))
    except Unsupported as refusal:
        return False, str(refusal)
    return True, ""


def backend_for(
    cp: ContextParallel,
    problem: Problem,
    device: str,
    *,
    deterministic: bool,
    return_max_logit: bool,
    in_place: bool = False,
    more: Set[Feature] = frozenset(),
) -> Backend:
    """The library for the problem by this choice, with the features `more` of a call too; raises ValueError, TypeError
    or Unsupported.
    """
    check_flag("deterministic", deterministic)
    check_flag("return_max_logit", return_max_logit)
    needs = required(problem, device, deterministic=deterministic, max_logit=return_max_logit, in_place=in_place) | more
    if missing := needs - KERNEL_FEATURES - EXECUTOR:
        raise Unsupported("this problem", {"cp_fast": missing}, f"cp_fast has {describe(EXECUTOR)}")
    return choose(needs, cp.backend)


def plan_of_rank(
    cp: ContextParallel,
    agreement: Agreement,
    backend: Backend,
    device: torch.device,
    custom: Schedule | None = None,
    score_mod: ScoreMod | None = None,
    *,
    linear: bool = False,
    sparse: bool = False,
    deterministic: bool = False,
) -> Plan:
    """This rank's plan, made before the ranks agree on it; it sends nothing, and keeps no reference to the group."""
    how = {"room": agreement.room, "custom": custom, "deterministic": deterministic}
    batch = compile_batch(agreement.problem, cp.rank, device, backend, **how)
    chosen = plans.choices(cp, custom, sparse=sparse)
    return Plan(batch, score_mod and frozen(score_mod), linear, sparse, deterministic, chosen)


def _with_messages(cp: ContextParallel, plan: Plan) -> Plan:
    """A new plan with the transport and the sizes of messages that the ranks choose together. Collective."""
    batch, problem, programs = plan.batch, plan.batch.problem, plan.batch.programs
    with cp.naming_errors("an agreement on the messages of a plan"):
        carried = messages_for(cp.comm, problem, batch.room, batch.device)
        if "low_precision_grads" not in programs.skipped and may_have_low_precision(problem):
            programs = low_precision_grads(programs, cp.comm, rounded=batch.backend.rounded_gradients)
    messages = None if carried is cp.comm else carried
    plan._hold(replace(batch, messages=messages, programs=programs))
    return plan


def _read_plan_arguments(given: dict[str, Any]) -> tuple[Agreement, Backend, torch.device]:
    agreement, device = read_plan_arguments(given, ContextParallel)
    check_row_numbers(agreement.problem, agreement.room)
    how = {name: given[name] for name in ("deterministic", "return_max_logit")}
    in_place = agreement.room is not None
    return agreement, backend_for(given["cp"], agreement.problem, device.type, **how, in_place=in_place), device
