"""A plan: all host-side work and device tables of one batch, shared by every layer."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan_cache import PlanCache
from cp_fast.backends import Backend
from cp_fast.compile.chosen_schedule import Schedules, chosen_rank_schedule, chosen_schedule
from cp_fast.compile.in_place import Fitted, FixedTables
from cp_fast.compile.pipeline import lowered
from cp_fast.compile.program import Programs
from cp_fast.dispatch.opaque import OfThisProcess, forget, opaque_for
from cp_fast.linear.linear_plan import LinearPlan
from cp_fast.movers.mover_protocol import Rows
from cp_fast.runtime.packed_tensors import Packing
from cp_fast.runtime.row_positions import RowPositions
from cp_fast.runtime.run import CompiledCall
from cp_ref.contract import plan_arguments as plans
from cp_ref.contract.call_checks import check_context, check_plan_owner
from cp_ref.contract.cuts import planned_positions
from cp_ref.contract.declared import implements, replaced, undivided
from cp_ref.contract.group import Group, read_together
from cp_ref.contract.room import Agreement, Room, next_batch
from cp_ref.contract.score_mod import ScoreMod
from cp_ref.contract.sharding import numbers
from cp_ref.schedules.planners.make_schedule import saved_kinds
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule

__all__ = ["Plan", "agree_on"]

_CALLS = 8  # Shapes of calls that a plan keeps.


class _HasAgreement(Protocol):
    @property
    def agreement(self) -> Agreement: ...


Found = TypeVar("Found", bound=_HasAgreement)


@undivided
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
        agreed: see `cp_ref.contract.plan_arguments.Plan`.

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
    custom: Schedule | None = field(default=None, repr=False)
    score_mod: ScoreMod | None = None
    room: Room | None = None
    fixed: FixedTables | None = field(default=None, repr=False)  # Its tables, if there is room.
    messages: Group | None = field(default=None, repr=False)
    linear: bool = False
    agreed: set[bytes] = field(default_factory=set[bytes], repr=False)
    handle: torch.Tensor = field(init=False, repr=False)  # See `cp_fast.dispatch.opaque`.
    kept: str = field(init=False, repr=False)  # See `Programs.kept_tensors`.
    needs_inputs: bool = field(init=False, repr=False)  # See `Programs.needs_inputs`.
    plain: bool = field(init=False, repr=False)  # `Problem.position_free_scores`.
    calls: PlanCache[Any, CompiledCall] = field(init=False, repr=False)  # By shape.
    scores: PlanCache[Any, tuple[str, ...]] = field(init=False, repr=False)  # See `ScoreArguments.known`.

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
            scores=PlanCache(_CALLS),
        )
        vars(self)["handle"] = opaque_for(self)

    def __copy__(self) -> Plan:
        return replaced(self)

    def __deepcopy__(self, memo: Any) -> Plan:
        return self.__copy__()

    @cached_property
    def schedule(self) -> Schedule:
        """The sends, receives and tiles of every rank, step by step; `instructions` comes from this rank's part."""
        return self.custom or chosen_schedule(self.problem, self.head_chunks, {self.rank: self.steps})

    @cached_property
    @torch.inference_mode(False)
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
            steps = chosen_rank_schedule(problem, self.rank, self.head_chunks)
            draft = lowered(Packing(problem), self.rank, steps, saved_kinds(problem))
            extras = plans.read_linear(self.linear, problem)
            return _Batch(Agreement(problem, self.room, extras), steps, self.fixed.fitted(draft, problem))

        agreement, steps, fitted = agree_on(cp, read)
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
            scores=PlanCache(_CALLS),
        )
        for name in ("schedule", "position_ids", "linear_plan"):
            vars(self).pop(name, None)
        vars(self)["handle"] = opaque_for(self)
        _ = self.position_ids  # as `make_plan`


class _Batch(NamedTuple):
    """The next batch of a plan that is updated in place."""

    agreement: Agreement
    steps: Schedules
    fitted: Fitted


def agree_on(cp: ContextParallel, read: Callable[[], Found], known: Set[bytes] = frozenset()) -> Found:
    """This rank's reading of its arguments, once all ranks have read theirs and agree; else all raise. Nothing is sent
    if the agreement is known.
    """
    check_context(cp, ContextParallel)
    with cp.alone("an agreement on a plan"):
        return read_together(cp.comm, read, lambda found: found.agreement, known)
