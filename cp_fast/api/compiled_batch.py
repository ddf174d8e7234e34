"""A batch, compiled for one rank: what a plan holds, and replaces by the next batch in `update`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from cp_fast.api.fast_context import PlanCache
from cp_fast.compile.buffers import in_order
from cp_fast.compile.chosen_schedule import Choices, choose, chosen_rank_schedule, chosen_schedule
from cp_fast.compile.in_place import FixedTables, Shape
from cp_fast.compile.packing import Packing
from cp_fast.compile.pipeline import drafted, lowered, optimized, upload
from cp_fast.compile.program import Programs
from cp_fast.kernels.attention.backend_protocol import Backend
from cp_fast.movers.mover_protocol import Rows
from cp_fast.movers.select_movers import movers_for
from cp_fast.passes import is_on
from cp_fast.runtime.row_positions import RowPositions
from cp_fast.runtime.run import CompiledCall
from cp_fast.transport.memory_group import carried_by, carries
from cp_ref.calls.layer import LayerCall
from cp_ref.groups.group import Group
from cp_ref.problems.room import Room
from cp_ref.schedules.planners.make_schedule import saved_kinds
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import RankPasses, Schedule

__all__ = ["CompiledBatch", "KnownCalls", "compile_batch"]

_CALLS = 32  # of each kind that a batch knows
Tables = TypeVar("Tables")


class KnownCalls:
    """The last calls of one batch: a call like one of them is not checked and not compiled again.

    Attributes:
        attention: compiled for its tensors, by all that the checks of a call read (`call_key`).
        layers: the calls of other layers, by all that their checks read.
        compiled: attention compiled, by the kinds of q, k and v, and by the transport.
        scores: the names of `aux_tensors`, by all that the checks of the tensors of scores read.
    """

    def __init__(self) -> None:
        self.attention = PlanCache[Hashable, CompiledCall](_CALLS)
        self.layers = PlanCache[Hashable, LayerCall](_CALLS)
        self.compiled = PlanCache[Hashable, CompiledCall](_CALLS)
        self.scores = PlanCache[Hashable, tuple[str, ...]](_CALLS)


@dataclass(frozen=True, eq=False)
class CompiledBatch:
    """One batch on one rank: its programs, with their tables on the device, and what is known of its calls.

    Attributes:
        problem: the problem to compute.
        rank: this rank.
        device: where the tensors, and all tables, lie.
        backend: the kernel library of the tiles.
        packing: how the user's tensors are seen as packed rows.
        programs: the programs of both passes.
        positions: the sequences and positions of the rows of its launches.
        steps: this rank's part of `schedule`, the source of `programs`.
        choices: how `schedule` was made; the next batches keep them.
        custom: the user's schedule; None for the planner's.
        room: the room for the next batches; None for a plan that is not updated.
        fixed: the tables that all batches share, if there is room.
        messages: the transport: the memory of the group's ranks (`cp_fast.transport`), or None for the group itself.
        kept_kinds, needs_inputs: see `Programs.kept_kinds` and `Programs.needs_inputs`.
        calls: what is known of its calls.
        tables: the tables of other layers, by their kind.
    """

    problem: Problem
    rank: int
    device: torch.device
    backend: Backend
    packing: Packing
    programs: Programs[Rows]
    positions: RowPositions = field(repr=False)
    steps: RankPasses = field(repr=False)
    choices: Choices
    custom: Schedule | None = field(default=None, repr=False)
    room: Room | None = None
    fixed: FixedTables | None = field(default=None, repr=False)
    messages: Group | None = field(default=None, repr=False)
    kept_kinds: str = field(init=False, repr=False)
    needs_inputs: bool = field(init=False, repr=False)
    calls: KnownCalls = field(init=False, repr=False, default_factory=KnownCalls)
    tables: dict[Any, Any] = field(init=False, repr=False, default_factory=dict[Any, Any])

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept_kinds", self.programs.kept_kinds)
        object.__setattr__(self, "needs_inputs", self.programs.needs_inputs)

    @cached_property
    def schedule(self) -> Schedule:
        """The sends, receives and tiles of every rank, step by step; `programs` comes from this rank's part."""
        return self.custom or chosen_schedule(self.problem, self.choices, {self.rank: self.steps})

    def group(self, comm: Group) -> Group:
        """The group that carries the messages: the transport, if it is of this group, else the group itself."""
        return self.messages if self.messages is not None and carries(self.messages, comm) else comm

    def tables_of(self, kind: Callable[[Problem, int, torch.device], Tables]) -> Tables:
        """Another layer's tables of this batch: `kind(problem, rank, device)`, made once."""
        if (found := self.tables.get(kind)) is None:
            found = self.tables.setdefault(kind, kind(self.problem, self.rank, self.device))
        return found

    def next(self, problem: Problem) -> Callable[[], CompiledBatch]:
        """The next batch, in the room of this one: a function that writes its tables over those of this batch.

        Raises:
            ValueError: there is no room for its messages or launches.
        """
        fixed = self.fixed
        assert fixed is not None
        packing = Packing(problem, self.packing.may_fold)
        steps = chosen_rank_schedule(problem, self.rank, self.choices)
        fitted = fixed.fitted(lowered(packing, self.rank, steps, saved_kinds(problem)), problem)

        def overwrite() -> CompiledBatch:
            programs = fixed.overwrite(fitted)
            positions = self.positions.updated(programs, problem)
            how = {"problem": problem, "packing": packing, "steps": steps}
            return replace(self, programs=programs, positions=positions, **how)

        return overwrite


@torch.inference_mode(False)  # Training may use the plan, or the tables, of an evaluation.
def compile_batch(
    problem: Problem,
    rank: int,
    device: torch.device,
    backend: Backend,
    *,
    room: Room | None = None,
    custom: Schedule | None = None,
    deterministic: bool = False,
) -> CompiledBatch:
    """A batch, compiled on this rank before the ranks agree on it: an error on one rank (a failed build, no memory for
    the tables) is then raised on all. Sends nothing.
    """
    movers_for(device.type)
    carried_by()  # A wrong word in the environment raises, on a CPU too.
    if custom is None:
        in_place = room is not None
        choices = choose(problem, deterministic=deterministic, in_place=in_place, key_block=backend.key_block)
        steps, saved = chosen_rank_schedule(problem, rank, choices), saved_kinds(problem)
    else:
        choices = Choices()
        steps, saved = (in_order(custom.forward[rank]), in_order(custom.backward[rank])), custom.saved
    packing = Packing(problem, may_fold=custom is None and is_on("fold_batch"))
    if room is None:
        fixed, programs = None, upload(drafted(packing, rank, steps, saved, backend), device)
    else:
        draft = lowered(packing, rank, steps, saved)
        fixed = FixedTables(Shape(optimized(draft, in_place=True).programs, draft.tables, problem, rank, room), device)
        programs = fixed.overwrite(fixed.fitted(draft, problem))
    positions = RowPositions(programs, packing.packed_problem, device)
    if not problem.position_free_scores:
        positions.make()
    made = steps, choices, custom, room, fixed
    return CompiledBatch(problem, rank, device, backend, packing, programs, positions, *made)
