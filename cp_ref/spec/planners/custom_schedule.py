"""A schedule of the user's own, which no planner has: `make_plan(..., schedule=schedule)`."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from cp_ref.spec.arguments.room import Room
from cp_ref.spec.groups.group import Group
from cp_ref.spec.groups.pair_group import PairGroup
from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.schedule import Schedule
from cp_ref.spec.verify.proof import verify

__all__ = ["check_schedule"]


def check_schedule(schedule: Any, problem: Problem, room: Room | None, group: Group) -> tuple[tuple[str, str], ...]:
    """Check that a schedule computes the problem and that its messages can be sent.

    Args:
        schedule: for all ranks, as the user gave it; None for the planner's.
        room: the plan's room.
        group: of the ranks that will play it.

    Returns:
        The values that the ranks have to agree on, for the `extras` of their `Agreement`: a hash of the schedule's
        text; nothing for None.

    Raises:
        TypeError: it is no Schedule. InvalidSchedule: with every finding. ValueError: the plan is to be updated, or a
        message goes to a rank that the group does not reach.
    """
    if schedule is None:
        return ()
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule is a {type(schedule).__name__}; it must be a cp_ref.spec.Schedule, such as Schedule.parse(text)"
        )
    if room is not None:
        raise ValueError(
            f"schedule is given, but max_sequences is {room.max_sequences}; a schedule is for one batch, a plan with "
            "max_sequences is for several"
        )
    verify(problem, schedule)
    if isinstance(group, PairGroup):
        _check_reach(schedule, group)
    return (("schedule", blake2b(str(schedule).encode(), digest_size=16).hexdigest()),)


def _check_reach(schedule: Schedule, group: PairGroup) -> None:
    for direction, rank, number, step in schedule.steps():
        for message in step.sends:
            if not group.joins(rank, message.peer):
                raise ValueError(
                    f"schedule has {schedule.message_text(message, 'send')!r} in {direction} step {number} of rank "
                    f"{rank}, but the two ranks have neither their a2a group nor their p2p group in common"
                )
