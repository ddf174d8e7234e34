"""The parts of a schedule by their places, and schedules with some of them changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from cp_ref.schedules.schedule import Message, RankSchedule, Schedule, Step

__all__ = ["PASSES", "Line", "Messages", "Place", "all_messages", "all_pairs", "all_steps", "halves", "other_number"]
__all__ += ["other_table", "with_messages", "with_steps"]

PASSES = ("forward", "backward")
EXTREMES = (0, 1, -1, 2, 7, 63, 2**21 - 1, 2**21, 2**31, 2**62)
Place = tuple[str, int, int]  # pass, rank, step
Line = tuple[str, int, int, str, int]  # pass, rank, step, "sends" or "recvs", which of them
Messages = Mapping[Line, Iterable[Message]]


def all_steps(schedule: Schedule) -> list[tuple[Place, Step]]:
    """Steps of both passes and all ranks, and where they are."""
    return [
        ((name, rank, number), step)
        for name in PASSES
        for rank, program in enumerate(getattr(schedule, name))
        for number, step in enumerate(program)
    ]


def with_steps(schedule: Schedule, changes: Mapping[Place, Iterable[Step]]) -> Schedule:
    """The schedule with any number of steps for each of these."""

    def program(name: str, rank: int, steps: RankSchedule) -> RankSchedule:
        return tuple(new for number, step in enumerate(steps) for new in changes.get((name, rank, number), (step,)))

    found = {name: tuple(program(name, rank, p) for rank, p in enumerate(getattr(schedule, name))) for name in PASSES}
    return replace(schedule, **found)


def all_messages(schedule: Schedule) -> list[tuple[Line, Message]]:
    """Sends and receives of all steps, and where they are."""
    return [
        ((*place, verb, n), message)
        for place, step in all_steps(schedule)
        for verb in ("sends", "recvs")
        for n, message in enumerate(getattr(step, verb))
    ]


def with_messages(schedule: Schedule, changes: Messages) -> Schedule:
    """The schedule with any number of messages for each of these."""
    changed: dict[Place, Iterable[Step]] = {}
    for place, step in all_steps(schedule):
        both = {
            verb: tuple(new for n, m in enumerate(getattr(step, verb)) for new in changes.get((*place, verb, n), (m,)))
            for verb in ("sends", "recvs")
        }
        changed[place] = (step._replace(**both),)
    return with_steps(schedule, changed)


def all_pairs(schedule: Schedule) -> list[tuple[Line, Line, Message]]:
    """Sends and the receives that they meet: between two ranks the n-th meets the n-th."""
    ends: dict[tuple[str, int, int], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for line, message in all_messages(schedule):
        name, rank, _, verb, _ = line
        if verb == "sends":
            ends[name, rank, message.peer][0].append((line, message))
        else:
            ends[name, message.peer, rank][1].append(line)
    return [(a, b, m) for sent, received in ends.values() for (a, m), b in zip(sent, received, strict=False)]


def other_number(rng: Random, old: int) -> int:
    """A number near this one, or an extreme one."""
    return rng.choice(EXTREMES) if rng.random() < 0.2 else old + rng.choice((-2, -1, 1, 2))


def other_table(rng: Random, table: Any, columns: Iterable[str]) -> Any:
    """A table with one number changed."""
    name, row = rng.choice(list(columns)), rng.randrange(len(table))
    column = getattr(table, name).copy()
    column[row] = other_number(rng, int(column[row]))
    return replace(table, **{name: column})


def halves(rng: Random, box: tuple[int, ...], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A box (start, stop, ...) as two along one axis, or as it is where that is one wide."""
    axis = rng.choice(axes)
    if box[axis + 1] - box[axis] < 2:
        return [box]
    at = rng.randrange(box[axis] + 1, box[axis + 1])
    return [(*box[: axis + 1], at, *box[axis + 2 :]), (*box[:axis], at, *box[axis + 1 :])]
