"""A plan: all host-side work and device tables of one batch, shared by every layer."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from cp_fast.api.fast_context import ContextParallel, PlanCache
from cp_fast.compile.buffers import in_order
from cp_fast.compile.chosen_schedule import (
    Schedules,
    choose_head_chunks,
    chosen_rank_schedule,
    chosen_schedule,
    own_first,
)
from cp_fast.compile.in_place import Fitted, FixedTables, Shape
from cp_fast.compile.index_tables import check_row_numbers
from cp_fast.compile.instruction_passes import low_precision_grads, may_have_low_precision
from cp_fast.compile.packing import Packing
from cp_fast.compile.pipeline import lowered, optimized, upload
from cp_fast.compile.program import Programs
from cp_fast.compile.same_bits import same_bits
from cp_fast.kernels.attention.backend_protocol import Backend
from cp_fast.kernels.attention.choose_backend import EXECUTOR, KERNEL_FEATURES, choose, required
from cp_fast.movers.mover_protocol import Rows
from cp_fast.movers.select_movers import kernels
from cp_fast.passes import is_on
from cp_fast.runtime.handles import OfThisProcess, forget, new_handle, outside_of_graphs
from cp_fast.runtime.row_positions import RowPositions
from cp_fast.transport.memory_group import carried_by, carries, messages_for
from cp_ref.batches.sharding import numbers
from cp_ref.calls import plan_arguments as plans
from cp_ref.calls.declared import bind, implements, not_a_dataclass, replaced, same_parameters
from cp_ref.calls.plan_arguments import read_plan_arguments
from cp_ref.calls.score_mod import ScoreMod, frozen
from cp_ref.groups.agreement import agreed
from cp_ref.groups.group import Group
from cp_ref.problems.call_checks import check_context, check_plan_owner
from cp_ref.problems.cuts import planned_positions
from cp_ref.problems.room import Agreement, Room, next_batch
from cp_ref.schedules.planners.make_schedule import saved_kinds
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.values import check_flag
from cp_ref.schedules.words import Feature, Unsupported, describe

__all__ = [
    "Made",
    "Plan",
    "backend_for",
    "captured",
    "check_not_captured",
    "check_same_batch",
    "make_plan",
    "messages_of",
    "prepared",
    "supports",
    "tables_of",
]

_CALLS = 16  # Known calls of a plan.


class _HasAgreement(Protocol):
    @property
    def agreement(self) -> Agreement: ...


Tables = TypeVar("Tables")


@not_a_dataclass
@dataclass(frozen=True, eq=False)  # Plans compare by identity: their tables are tensors.
class Plan(OfThisProcess, plans.Plan):
    """Everything about a batch that does not depend on the tensors' values.

    Attributes:
        problem: what is computed.
        rank: this rank.
        device: where the tables lie.
        backend: the kernel library of the tiles.
        packing: how the user's tensors are seen as packed rows.
        instructions: the instructions of this rank's runtime in both passes, in order. Printed, one line an
            instruction.
        positions: the sequences and positions of the rows of its launches.
        steps: this rank's part of `schedule`, the source of `instructions`. In a custom one the tags give the order of
            the messages.
        head_chunks: the kv heads of each rank that are exchanged at a time; () for all at once. A plan that is updated
            in place keeps those of its first batch.
        own_keys_first: the passes of all_gather in which own keys attend while the others travel.
        custom: the schedule that `make_plan` was given; None for the planner's.
        score_mod: a frozen copy of the function whose digest the problem has.
        room: the room for `update`; None for a plan that is not updated.
        messages: the transport: the memory of the group's ranks (`cp_fast.transport`), or None for the group itself.
        linear: whether it serves linear layers.
        sparse: whether it was made for attention to chosen keys.
        deterministic: whether `make_plan` was asked for gradients in a fixed order, which sparse attention then gives.
        chosen_from: the schedules from which "auto" has chosen; () where it had no choice.
        agreed: see `cp_ref.calls.plan_arguments.Plan`.

    A copy, deep or not, and the result of `copy.replace` are separate plans that share the read-only tables. A
    plan updated in place can be neither copied nor replaced, and no plan can be pickled: TypeError.
    """

    problem: Problem
    rank: int
    device: torch.device
    backend: Backend
    packing: Packing
    instructions: Programs[Rows]
    positions: RowPositions = field(repr=False)
    steps: Schedules = field(repr=False)
    head_chunks: tuple[int, ...] = ()
    own_keys_first: tuple[str, ...] = ()
    custom: Schedule | None = field(default=None, repr=False)
    score_mod: ScoreMod | None = None
    room: Room | None = None
    fixed: FixedTables | None = field(default=None, repr=False)  # Its tables, if there is room.
    messages: Group | None = field(default=None, repr=False)
    linear: bool = False
    sparse: bool = False
    deterministic: bool = False
    chosen_from: tuple[str, ...] = ()
    agreed: set[bytes] = field(default_factory=set[bytes], repr=False)
    handle: torch.Tensor = field(init=False, repr=False)  # See `cp_fast.runtime.handles`.
    kept: str = field(init=False, repr=False)  # See `Programs.kept_tensors`.
    needs_inputs: bool = field(init=False, repr=False)  # See `Programs.needs_inputs`.
    plain: bool = field(init=False, repr=False)  # `Problem.position_free_scores`.
    calls: PlanCache[Any, Any] = field(init=False, repr=False)  # The known calls: see `cp_fast.api.calls`.
    others: dict[Any, Any] = field(init=False, repr=False)  # See `tables_of`.

    def __post_init__(self) -> None:
        in_place = self.instructions.spare_rows > 0
        if in_place and self.fixed is not None and self.room is not None:
            self.fixed.take()
        elif in_place or self.fixed is not None or self.room is not None:
            raise TypeError(
                "room, fixed and instructions of a cp_fast.Plan that is updated in place belong together, and to no "
                "other plan; make another one by make_plan"
            )
        vars(self).update(
            kept=self.instructions.kept_tensors,
            needs_inputs=self.instructions.needs_inputs,
            plain=self.problem.position_free_scores,
            calls=PlanCache(_CALLS),
            others={},
        )
        vars(self)["handle"] = new_handle(self)

    def __copy__(self) -> Plan:
        return replaced(self)

    def __deepcopy__(self, memo: Any) -> Plan:
        return self.__copy__()

    @cached_property
    def schedule(self) -> Schedule:
        """The sends, receives and tiles of every rank, step by step; `instructions` comes from this rank's part."""
        return self.custom or chosen_schedule(
            self.problem, self.head_chunks, {self.rank: self.steps}, self.own_keys_first
        )

    @cached_property
    def same_bits(self) -> tuple[str, ...]:
        """Those of "out", "lse", "dq", "dk" and "dv" that have, in every row, the bits of one launch of the kernel
        library over the whole batch on one GPU; see docs/how_to/bits.md. Gradients are among them if the plan was made
        with `deterministic=True`. A plan that is updated in place promises none.
        """
        if self.room is not None or not self.backend.equal_bits:
            return ()
        areas = self.packing.packed_problem.workload.areas
        return same_bits(self.instructions, areas, deterministic=self.deterministic)

    @cached_property
    @torch.inference_mode(False)
    def position_ids(self) -> torch.Tensor:
        """This rank's query positions inside each sequence, for RoPE: int64 [t/cp] for thd, [s/cp] for bshd and
        sbhd. With `room`, [max_tokens_q / cp], 0 in the tail; `update` writes the new ones to the same memory.
        """
        if self.instructions.position_ids is not None:
            return self.instructions.position_ids
        return numbers(planned_positions(self.problem, self.rank), self.device)

    @property
    def exchanges(self) -> dict[str, Programs[Rows]]:
        """What the layers that were called with this plan send and copy, by the name of the exchange: a program that
        gathers rows, and one that gives results for them back. Printed, one line an instruction.
        """
        made = [(name, exchange) for tables in self.others.values() for name, exchange in tables.exchanges.items()]
        return {name: exchange.programs for name, exchange in made}

    @implements(plans.update)
    @torch.inference_mode(False)
    def update(
        self,
        *,
        cp: ContextParallel,
        **lengths: Any,
    ) -> None:
        def read() -> _Batch:
            given = plans.lengths_of_update(self, cp, lengths)
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ValueError("plan.update is called while a CUDA graph is captured; update before it is replayed")
            check_plan_owner(self.problem, self.rank, cp)
            problem = next_batch(self.problem, self.room, given)
            assert self.fixed is not None
            steps = chosen_rank_schedule(problem, self.rank, self.head_chunks, self.own_keys_first)
            draft = lowered(Packing(problem), self.rank, steps, saved_kinds(problem))
            extras = plans.read_linear(self.linear, problem)
            return _Batch(Agreement(problem, self.room, extras), steps, self.fixed.fitted(draft, problem))

        check_context(cp, ContextParallel)
        agreement, steps, fitted = agreed(cp, "an agreement on a plan", read, lambda batch: batch.agreement)
        assert self.fixed is not None
        forget(self.handle)
        instructions = self.fixed.overwrite(fitted)
        vars(self).update(
            problem=agreement.problem,
            packing=Packing(agreement.problem),
            steps=steps,
            instructions=instructions,
            positions=self.positions.updated(instructions, agreement.problem),
            calls=PlanCache(_CALLS),
            others={},
        )
        for name in ("schedule", "position_ids"):
            vars(self).pop(name, None)
        vars(self)["handle"] = new_handle(self)
        _ = self.position_ids  # as `make_plan`


def tables_of(plan: Plan, kind: Callable[[Problem, int, torch.device], Tables]) -> Tables:
    """Another layer's tables of a plan's batch: `kind(problem, rank, device)`, made once. After `update`, new ones."""
    if (found := plan.others.get(kind)) is None:
        found = plan.others.setdefault(kind, kind(plan.problem, plan.rank, plan.device))
    return found


def check_same_batch(plan: Plan, tables: Any) -> None:
    """Raise where a plan was updated since it gave its tables (`tables_of`)."""
    if tables_of(plan, type(tables)) is not tables:
        raise RuntimeError("the plan was updated between the forward and the backward pass of a call")


def captured(plan: Any) -> bool:
    """Whether a CUDA graph is captured with a plan that can be updated."""
    updated = getattr(plan, "room", None) is not None and torch.cuda.is_available()
    return updated and torch.cuda.is_current_stream_capturing()


def check_not_captured(plan: Any) -> None:
    """Raise where a CUDA graph would keep the sizes of this batch's tables (`tables_of`)."""
    if captured(plan):
        raise ValueError(
            "a linear or sparse layer is captured in a CUDA graph with a plan that can be updated, but its launches "
            "have sizes of this batch; make a plan for each batch, without max_sequences"
        )


def messages_of(plan: Plan, comm: Group) -> Group:
    """The group that carries a plan's messages: its transport, if that is of this group, else the group itself."""
    return plan.messages if plan.messages is not None and carries(plan.messages, comm) else comm


class _Batch(NamedTuple):
    """The next batch of a plan that is updated in place."""

    agreement: Agreement
    steps: Schedules
    fitted: Fitted


# ---- from arguments to a plan
#
# `make_plan`: from arguments to a plan on which all ranks agree.


@same_parameters(plans.make_plan)
def make_plan(**arguments: Any) -> Plan:
    if torch.compiler.is_compiling():
        return outside_of_graphs(make_plan, **arguments)
    cp: Any = arguments.get("cp")
    custom = arguments.get("schedule")

    def make() -> Made:
        given = bind(plans.make_plan, arguments)
        agreement, backend, device = _read_plan_arguments(given)
        how = agreement, backend, device, custom, given["score_mod"]
        kept = {name: given[name] for name in ("linear", "sparse", "deterministic")}
        plan = prepared(cp, *how, **kept)
        _ = plan.position_ids  # Made now: a compiled layer could not make them.
        return Made(agreement, plan)

    check_context(cp, ContextParallel)
    plan = agreed(cp, "an agreement on a plan", make, lambda made: made.agreement).plan
    if custom is None:
        _choose_messages(cp, plan)
    return plan


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


class Made(NamedTuple):
    """A plan, and the arguments that must be equal on all ranks."""

    agreement: Agreement
    plan: Plan


@torch.inference_mode(False)  # Training may use the plan, or the tables, of an evaluation.
def prepared(
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
    """This rank's plan, made before the ranks agree on it. An error on one rank (a failed build, no memory for the
    tables) is then raised on all. Sends nothing, and keeps no reference to the group.
    """
    kernels(device.type)
    carried_by()  # A wrong word in the environment raises, on a CPU too.
    problem, room = agreement.problem, agreement.room
    if custom is None:
        first = own_first(problem, deterministic=deterministic, in_place=room is not None)
        head_chunks = () if "forward" in first else choose_head_chunks(problem)
        steps, saved = chosen_rank_schedule(problem, cp.rank, head_chunks, first), saved_kinds(problem)
    else:
        head_chunks = first = ()
        steps, saved = (in_order(custom.forward[cp.rank]), in_order(custom.backward[cp.rank])), custom.saved
    packing = Packing(problem, may_fold=custom is None and is_on("fold_batch"))
    if room is None:
        draft = lowered(packing, cp.rank, steps, saved, shares_keys=backend.shares_keys)
        writes_rows = backend.writes_rows and not backend.pads(problem.d_qk, problem.d_v)
        fixed, instructions = None, upload(optimized(draft, writes_rows=writes_rows), device)
    else:
        draft = lowered(packing, cp.rank, steps, saved)
        fixed = FixedTables(
            Shape(optimized(draft, in_place=True).programs, draft.tables, problem, cp.rank, room), device
        )
        instructions = fixed.overwrite(fixed.fitted(draft, problem))
    positions = RowPositions(instructions, packing.packed_problem, device)
    if not problem.position_free_scores:
        positions.make()
    return Plan(
        problem,
        cp.rank,
        device,
        backend,
        packing,
        instructions,
        positions,
        steps,
        head_chunks,
        first,
        custom=custom,
        score_mod=score_mod and frozen(score_mod),
        room=room,
        fixed=fixed,
        linear=linear,
        sparse=sparse,
        deterministic=deterministic,
        chosen_from=plans.choices(cp, custom, sparse=sparse),
    )


def _choose_messages(cp: ContextParallel, plan: Plan) -> None:
    """Give a new plan the transport and the sizes of messages that the ranks choose together. Collective."""
    problem, instructions = plan.problem, plan.instructions
    with cp.naming_errors("an agreement on the messages of a plan"):
        carried = messages_for(cp.comm, problem, plan.room, plan.device)
        if "low_precision_grads" not in instructions.skipped and may_have_low_precision(problem):
            instructions = low_precision_grads(instructions, cp.comm, rounded=plan.backend.rounded_gradients)
    messages = None if carried is cp.comm else carried
    vars(plan).update(messages=messages, instructions=instructions)  # There is no other reference to the plan yet.


def _read_plan_arguments(given: dict[str, Any]) -> tuple[Agreement, Backend, torch.device]:
    agreement, device = read_plan_arguments(given, ContextParallel)
    check_row_numbers(agreement.problem, agreement.room)
    how = {name: given[name] for name in ("deterministic", "return_max_logit")}
    in_place = agreement.room is not None
    return agreement, backend_for(given["cp"], agreement.problem, device.type, **how, in_place=in_place), device
