"""A plan: all host-side work and device tables of one batch, made once and shared by every layer."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan_cache import PlanCache
from cp_fast.backends import KERNEL_FEATURES, Backend, choose
from cp_fast.backends.backend_protocol import StatefulBackend
from cp_fast.backends.required_features import EXECUTOR, required
from cp_fast.compile.executable_plan import ExecutablePlan
from cp_fast.compile.in_place.fixed_tables import Fitted, FixedTables
from cp_fast.compile.in_place.shape import Shape
from cp_fast.compile.instructions import Launch
from cp_fast.compile.message_order import in_order
from cp_fast.compile.pass_table import is_on
from cp_fast.compile.passes.low_precision_grads import low_precision_grads, may_have_low_precision
from cp_fast.compile.pipeline import Schedules, lowered, optimized, upload
from cp_fast.compile.planning.choose_head_chunks import choose_head_chunks
from cp_fast.compile.planning.chosen_schedule import chosen_rank_schedule, chosen_schedule
from cp_fast.dispatch.opaque import OfThisProcess, forget, opaque_for
from cp_fast.linear.linear_plan import LinearPlan
from cp_fast.movers.select_kernels import kernels
from cp_fast.runtime.packed_tensors import Packing
from cp_fast.runtime.row_positions import RowPositions
from cp_fast.runtime.row_selection import Rows, check_row_numbers
from cp_fast.runtime.run import CompiledCall
from cp_fast.transport import messages_for
from cp_ref.common import plan_arguments as plans
from cp_ref.common.declared import bind, implements, same_parameters
from cp_ref.common.plan_arguments import read_plan_arguments
from cp_ref.common.scores.score_mod import ScoreMod, frozen
from cp_ref.common.sharding.cut_tensors import numbers
from cp_ref.spec import (
    Agreement,
    Feature,
    Group,
    Problem,
    Room,
    Schedule,
    Unsupported,
    check_context,
    check_flag,
    check_plan_owner,
    describe,
    next_batch,
    planned_positions,
    read_together,
    saved_kinds,
)

__all__ = ["Made", "Plan", "agree_on_plan", "backend_for", "make_plan", "prepared", "supports"]

Found = TypeVar("Found")
_CALLS = 8  # Shapes of calls that a plan keeps.


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
        positions: the documents and positions of the rows of its launches.
        steps: this rank's part of `schedule`, the source of `instructions`. In a custom one the tags give the order of
            the messages.
        head_chunks: the kv heads of each rank that an a2a schedule exchanges at a time; () for all at once. A plan that
            is updated in place keeps those of its first batch.
        custom: the schedule that `make_plan` was given; None for the planner's.
        score_mod: a frozen copy of the function whose digest the problem has.
        room: the room for `update`; None for a plan that is not updated.
        messages: the transport: the memory of the group's ranks (`cp_fast.transport`), or None for the group itself.
        linear: whether it serves linear layers.
        agreed: see `cp_ref.common.plan_arguments.Plan`.

    A copy, deep or not, and the result of `dataclasses.replace` are separate plans that share the read-only tables. A
    plan updated in place can be neither copied nor replaced, and no plan can be pickled: TypeError.
    """

    problem: Problem
    rank: int
    device: torch.device
    backend: Backend
    packing: Packing
    instructions: ExecutablePlan[Rows]
    positions: RowPositions = field(repr=False)
    steps: Schedules = field(repr=False)
    head_chunks: tuple[int, ...] = ()
    custom: Schedule | None = field(default=None, repr=False)
    score_mod: ScoreMod | None = None
    room: Room | None = None
    fixed: FixedTables | None = field(default=None, repr=False, compare=False)  # Its tables, if there is room.
    messages: Group | None = field(default=None, repr=False)
    linear: bool = False
    agreed: set[bytes] = field(default_factory=set[bytes], repr=False, compare=False)
    handle: torch.Tensor = field(init=False, repr=False, compare=False)  # See `cp_fast.dispatch.opaque`.
    kept: str = field(init=False, repr=False)  # see `RankSchedule.kept`
    needs_inputs: bool = field(init=False, repr=False)  # see `RankSchedule.needs_inputs`
    calls: PlanCache[Any, CompiledCall] = field(init=False, repr=False, compare=False)  # By shape.
    scores: PlanCache[Any, tuple[str, ...]] = field(
        init=False, repr=False, compare=False
    )  # See `ScoreArguments.known`.
    plain: bool = field(init=False, repr=False)  # `Problem.position_free_scores`.

    def __post_init__(self) -> None:
        in_place = self.instructions.spare_rows > 0
        if in_place and self.fixed is not None and self.room is not None:
            self.fixed.take()
        elif in_place or self.fixed is not None or self.room is not None:
            raise TypeError(
                "room, fixed and instructions of a cp_fast.Plan that is updated in place belong together, and to no "
                "other plan; make another one by make_plan"
            )
        object.__setattr__(self, "handle", opaque_for(self))
        object.__setattr__(
            self, "kept", self.instructions.kept_tensors + "s" * _states(self.backend, self.instructions)
        )
        object.__setattr__(self, "needs_inputs", self.instructions.needs_inputs)
        object.__setattr__(self, "calls", PlanCache(_CALLS))
        object.__setattr__(self, "scores", PlanCache(_CALLS))
        object.__setattr__(self, "plain", self.problem.position_free_scores)

    def __copy__(self) -> Plan:
        return replace(self)

    def __deepcopy__(self, memo: Any) -> Plan:
        return self.__copy__()

    @cached_property
    def schedule(self) -> Schedule:
        """The sends, receives and tiles of every rank, step by step; `instructions` comes from this rank's part."""
        return self.custom or chosen_schedule(self.problem, self.head_chunks, {self.rank: self.steps})

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """This rank's query positions inside each sequence, for RoPE: int64 [t/cp] for thd, [s/cp] for bshd and
        sbhd. With `room`, [max_tokens_q / cp], 0 in the tail; `update` writes the new ones to the same memory.
        """
        if self.instructions.position_ids is not None:
            return self.instructions.position_ids
        return numbers(planned_positions(self.problem, self.rank), self.device)

    @cached_property
    def linear_plan(self) -> LinearPlan:
        """The tables of linear layers; `update` makes new ones."""
        return LinearPlan(self.problem, self.rank, self.device)

    @implements(plans.update)
    def update(
        self,
        *,
        cp: ContextParallel,
        **lengths: Any,
    ) -> None:
        def read() -> tuple[Agreement, Schedules, Fitted]:
            given = plans.lengths_of_update(self, cp, lengths)
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ValueError("plan.update is called while a CUDA graph is captured; update before it is replayed")
            check_plan_owner(self.problem, self.rank, cp)
            problem = next_batch(self.problem, self.room, **given)
            assert self.fixed is not None
            steps = chosen_rank_schedule(problem, self.rank, self.head_chunks)
            draft = lowered(Packing(problem), self.rank, steps, saved_kinds(problem))
            extras = plans.read_linear(self.linear, problem)
            return Agreement(problem, self.room, extras), steps, self.fixed.fitted(draft, problem)

        agreement, steps, fitted = _together(cp, read, lambda found: found[0])
        assert self.fixed is not None
        forget(self.handle)
        instructions = self.fixed.overwrite(fitted)
        changed = {
            "problem": agreement.problem,
            "packing": Packing(agreement.problem),
            "steps": steps,
            "instructions": instructions,
            "positions": self.positions.updated(instructions, agreement.problem),
            "handle": opaque_for(self),
            "calls": PlanCache(_CALLS),
            "scores": PlanCache(_CALLS),
        }
        for name, value in changed.items():
            object.__setattr__(self, name, value)
        for name in ("schedule", "position_ids", "linear_plan"):
            self.__dict__.pop(name, None)


@same_parameters(plans.make_plan)
def make_plan(**arguments: Any) -> Plan:
    cp: Any = arguments.get("cp")
    custom = arguments.get("schedule")

    def make() -> Made:
        given = bind(plans.make_plan, arguments)
        agreement, backend, device = _read_plan_arguments(given)
        how = agreement, backend, device, custom, given["score_mod"]
        return Made(agreement, prepared(cp, *how, linear=given["linear"]))

    plan = agree_on_plan(cp, make).plan
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


def _states(backend: Backend, plan: ExecutablePlan[Any]) -> int:
    """The number of launches' states that are kept between the passes."""
    if not isinstance(backend, StatefulBackend):
        return 0
    if any(one.state is None for one in plan.backward.of(Launch)):
        why = f"each backward launch of {backend.name} needs the state of a forward launch of the same tiles"
        raise Unsupported("a backward pass with other tiles than the forward pass", {}, why)
    return plan.states


class Made(NamedTuple):
    """A plan, and the arguments that must be equal on all ranks."""

    agreement: Agreement
    plan: Plan


def prepared(
    cp: ContextParallel,
    agreement: Agreement,
    backend: Backend,
    device: torch.device,
    custom: Schedule | None = None,
    score_mod: ScoreMod | None = None,
    *,
    linear: bool = False,
) -> Plan:
    """This rank's plan, made before the ranks agree on it. An error on one rank (a failed build, no memory for the
    tables) is then raised on all. Sends nothing, and keeps no reference to the group.
    """
    kernels(device.type)
    problem, room = agreement.problem, agreement.room
    packing = Packing(problem, may_fold=custom is None and is_on("fold_batch"))
    head_chunks = choose_head_chunks(problem) if custom is None else ()
    if custom is None:
        steps, saved = chosen_rank_schedule(problem, cp.rank, head_chunks), saved_kinds(problem)
    else:
        steps, saved = (in_order(custom.forward[cp.rank]), in_order(custom.backward[cp.rank])), custom.saved
    shares_keys = backend.shares_keys if room is None else 0
    draft = lowered(packing, cp.rank, steps, saved, shares_keys=shares_keys)
    fixed = None
    if room is None:
        instructions = upload(optimized(draft), device)
    else:
        fixed = FixedTables(Shape(optimized(draft, in_place=True).plan, draft.tables, problem, cp.rank, room), device)
        instructions = fixed.overwrite(fixed.fitted(draft, problem))
    positions = RowPositions(instructions, packing.packed_problem, device)
    if not problem.position_free_scores:
        positions.make()
    more = {"custom": custom, "score_mod": score_mod and frozen(score_mod), "room": room, "fixed": fixed}
    steps_of = instructions, positions, steps, head_chunks
    return Plan(problem, cp.rank, device, backend, packing, *steps_of, **more, linear=linear)


def agree_on_plan(cp: ContextParallel, make: Callable[[], Made], known: Set[bytes] = frozenset()) -> Made:
    """Make this rank's plan and agree on it with the other ranks, unless the agreement is known. All ranks get their
    plans, or all raise.
    """
    return _together(cp, make, lambda made: made.agreement, known)


def _with_messages(cp: ContextParallel, plan: Plan) -> Plan:
    """A plan with the transport and message sizes that the ranks choose together. Collective."""
    problem, room, instructions = plan.problem, plan.room, plan.instructions
    tokens = (problem.starts_q[-1], problem.starts_kv[-1]) if room is None else (room.max_tokens_q, room.max_tokens_kv)
    rows = -(-tokens[0] // cp.size), -(-tokens[1] // cp.size)
    with cp.alone("an agreement on the messages of a plan"):
        carried = messages_for(cp.comm, problem, rows, plan.device)
        if "low_precision_grads" not in instructions.skipped and may_have_low_precision(problem):
            instructions = low_precision_grads(instructions, cp.comm, rounded=plan.backend.rounded_gradients)
    messages = None if carried is cp.comm else carried
    object.__setattr__(plan, "messages", messages)  # There is no other reference to the plan yet.
    return plan if instructions is plan.instructions else replace(plan, instructions=instructions)


def _together(
    cp: ContextParallel,
    read: Callable[[], Found],
    agreement: Callable[[Found], Agreement],
    known: Set[bytes] = frozenset(),
) -> Found:
    """This rank's reading of its arguments, once all ranks have read theirs and agree; else all raise."""
    check_context(cp, ContextParallel)
    with cp.alone("an agreement on a plan"):
        return read_together(cp.comm, read, agreement, known)


def _read_plan_arguments(given: dict[str, Any]) -> tuple[Agreement, Backend, torch.device]:
    agreement, device = read_plan_arguments(given, ContextParallel)
    check_row_numbers(agreement.problem, agreement.room)
    how = {name: given[name] for name in ("deterministic", "return_max_logit")}
    in_place = agreement.room is not None
    return agreement, backend_for(given["cp"], agreement.problem, device.type, **how, in_place=in_place), device
