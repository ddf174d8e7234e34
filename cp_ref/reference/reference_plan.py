"""A plan: the problem of one batch and the schedule that computes it, made once and used by every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any

import torch

from cp_ref.batches.sharding import numbers
from cp_ref.batches.tensors import check_usable, differentiable_once, no_autocast
from cp_ref.calls import plan_arguments as plans
from cp_ref.calls.declared import bind, implements, not_a_dataclass, same_parameters
from cp_ref.calls.plan_arguments import read_plan_arguments
from cp_ref.calls.score_mod import ScoreMod, frozen
from cp_ref.groups import context
from cp_ref.groups.agreement import agreed
from cp_ref.problems.call_checks import check_context, check_plan_owner
from cp_ref.problems.cuts import planned_positions
from cp_ref.problems.room import Agreement, Room, next_batch
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.words import Unsupported

__all__ = [
    "ContextParallel",
    "Plan",
    "backward_pass",
    "make_plan",
    "supports",
]


class ContextParallel(context.ContextParallel):
    __doc__ = context.ContextParallel.__doc__


@not_a_dataclass
@dataclass(frozen=True)
class Plan(plans.Plan):
    """Everything about a batch that does not depend on the tensors' values.

    Attributes:
        problem: the problem to compute.
        rank: this rank.
        device: where `position_ids` lie.
        room: the largest sizes for `update`; None for a plan that is not updated.
        custom: the schedule that `make_plan` was given; None for the planner's.
        score_mod: the function that `make_plan` was given.
        linear: whether it serves linear layers.
        sparse: whether it was made for attention to chosen keys.
        chosen_from: the schedules from which "auto" has chosen; () where it had no choice.
        agreed: see `cp_ref.calls.plan_arguments.Plan`.
        halos: the results of `halo`, by kernel_size.
    """

    problem: Problem
    rank: int
    device: torch.device
    room: Room | None = None
    custom: Schedule | None = field(default=None, hash=False)  # tables have no hash
    score_mod: ScoreMod | None = None
    linear: bool = False
    sparse: bool = False
    chosen_from: tuple[str, ...] = ()
    agreed: set[bytes] = field(default_factory=set[bytes], init=False, compare=False, repr=False)
    halos: dict[int, Schedule] = field(default_factory=dict[int, Schedule], init=False, compare=False, repr=False)

    @cached_property
    def schedule(self) -> Schedule:  # pyright: ignore[reportIncompatibleMethodOverride]  # a property too, kept
        """The messages and tiles of every rank, step by step."""
        return make_schedule(self.problem) if self.custom is None else self.custom

    @cached_property
    def states(self) -> Schedule:  # pyright: ignore[reportIncompatibleMethodOverride]  # a property too, kept
        """The messages and scans of linear layers, of every rank."""
        return super().states

    def halo(self, kernel_size: int) -> Schedule:
        """The messages and tiles of a causal convolution, of every rank."""
        if kernel_size not in self.halos:
            self.halos[kernel_size] = super().halo(kernel_size)
        return self.halos[kernel_size]

    @cached_property
    @torch.inference_mode(False)  # training may use those that an evaluation made
    def position_ids(self) -> torch.Tensor:
        """This rank's query positions inside each sequence, for RoPE: int64 [t/cp] for thd, [s/cp] for bshd and
        sbhd. With `room`, [max_tokens_q / cp], 0 in the tail.
        """
        ids = numbers(planned_positions(self.problem, self.rank), self.device)
        return ids if self.room is None else torch.nn.functional.pad(ids, (0, self.room.rows_q - len(ids)))

    @implements(plans.update)
    def update(
        self,
        *,
        cp: ContextParallel,
        **lengths: Any,
    ) -> None:
        def read() -> Agreement:
            given = plans.lengths_of_update(self, cp, lengths)
            check_plan_owner(self.problem, self.rank, cp)
            problem = next_batch(self.problem, self.room, given)
            return Agreement(problem, self.room, plans.read_linear(self.linear, problem))

        check_context(cp, ContextParallel)
        made = agreed(cp, "an agreement on a plan", read, lambda found: found)
        object.__setattr__(self, "problem", made.problem)
        for name in ("schedule", "states", "position_ids"):
            self.__dict__.pop(name, None)
        self.halos.clear()


@same_parameters(plans.make_plan)  # documented in calls/plan_arguments, once for both packages, as what follows
def make_plan(**arguments: Any) -> Plan:
    cp: Any = arguments.get("cp")
    check_context(cp, ContextParallel)

    def read() -> tuple[Agreement, torch.device]:
        return _read_plan_arguments(bind(plans.make_plan, arguments))

    agreement, device = agreed(cp, "an agreement on a plan", read, lambda found: found[0])
    score_mod: ScoreMod | None = arguments.get("score_mod")
    custom, sparse = arguments.get("schedule"), arguments.get("sparse", False)
    return Plan(
        agreement.problem,
        cp.rank,
        device,
        agreement.room,
        custom=custom,
        score_mod=score_mod and frozen(score_mod),
        linear=arguments.get("linear", False),
        sparse=sparse,
        chosen_from=plans.choices(cp, custom, sparse=sparse),
    )


@implements(plans.supports)
def supports(**arguments: Any) -> tuple[bool, str]:
    try:
        _read_plan_arguments(bind(plans.make_plan, arguments))
    except Unsupported as refusal:
        return False, str(refusal)
    return True, ""


def _read_plan_arguments(given: dict[str, Any]) -> tuple[Agreement, torch.device]:
    agreement, device = read_plan_arguments(given, ContextParallel)
    check_usable(device)
    return agreement, device


def backward_pass(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd function, whose ctx has the plan and the problem of the forward pass: gradients
    are differentiable once, autocast is off, and the plan may not have been updated.
    """

    @differentiable_once
    @wraps(backward)
    def guarded(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.plan.problem is not ctx.problem:
            raise RuntimeError("the plan was updated between the forward and the backward pass of a call")
        with no_autocast(grads[0].device):
            return backward(ctx, *grads)

    return guarded
