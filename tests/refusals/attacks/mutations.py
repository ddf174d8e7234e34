"""Random changes of a schedule, as a careless or a clever user makes them: of its objects, and of its text.

Some are of one line, so that nothing fits any more. Others are of both ends of a message, or of all messages, or leave
what is computed as it is; many of these are right, and have to run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from cp_ref.schedules.schedule import KINDS, Message, Pieces, RankSchedule, Schedule, Step, Tiles

__all__ = [
    "CHANGES",
    "OF_MESSAGES",
    "at_both_ends",
    "at_one_end",
    "changed_objects",
    "changed_text",
    "of_all_messages",
]

# ---- parts of a schedule by their places, and schedules with some of them changed

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


# ---- changes


def _rows(rng: Random, message: Message, schedule: Schedule) -> tuple[Message, ...]:
    return (replace(message, pieces=other_table(rng, message.pieces, ("start", "stop"))),)


def _heads(rng: Random, message: Message, schedule: Schedule) -> tuple[Message, ...]:
    return (replace(message, pieces=other_table(rng, message.pieces, ("head_start", "head_stop"))),)


def _peer(rng: Random, message: Message, schedule: Schedule) -> tuple[Message, ...]:
    return (replace(message, peer=rng.randrange(-1, schedule.cp_size + 1)),)


def _tag(rng: Random, message: Message, schedule: Schedule) -> tuple[Message, ...]:
    return (replace(message, tag=other_number(rng, message.tag)),)


def _kind(rng: Random, message: Message, schedule: Schedule) -> tuple[Message, ...]:
    return (replace(message, kind=rng.choice((*KINDS, "v"))),)


def _mark(rng: Random, message: Message, schedule: Schedule) -> tuple[Message, ...]:
    return (replace(message, complete=not message.complete),)


def _dropped(rng: Random, message: Message, schedule: Schedule) -> tuple[Message, ...]:
    return ()


def _twice(rng: Random, message: Message, schedule: Schedule) -> tuple[Message, ...]:
    return message, message


def _pieces_shuffled(rng: Random, message: Message, schedule: Schedule) -> tuple[Message, ...]:
    rows = list(message.pieces.rows())
    rng.shuffle(rows)
    return (replace(message, pieces=Pieces.of_rows(rows)),)


def _pieces_cut(rng: Random, message: Message, schedule: Schedule) -> tuple[Message, ...]:
    """A piece as two, by rows or by heads."""
    rows, n = list(message.pieces.rows()), rng.randrange(len(message.pieces))
    rows[n : n + 1] = halves(rng, rows[n], (0, 2))
    return (replace(message, pieces=Pieces.of_rows(rows)),)


def _in_two(rng: Random, message: Message, schedule: Schedule) -> tuple[Message, ...]:
    """A message as two, with tags of any order."""
    (whole,) = _pieces_cut(rng, message, schedule)
    cut = rng.randrange(1, max(2, len(whole.pieces)))
    parts = whole.pieces.take(slice(cut)), whole.pieces.take(slice(cut, None))
    tags = message.tag, message.tag + rng.choice((-1, 0, 1, 50))
    return tuple(replace(message, pieces=some, tag=t) for some, t in zip(parts, tags, strict=True) if len(some))


OfMessage = Callable[[Random, Message, Schedule], tuple[Message, ...]]
OF_MESSAGES: dict[str, OfMessage] = {
    "rows": _rows, "heads": _heads, "ranks": _peer, "tags": _tag, "kinds": _kind, "marks": _mark, "dropped": _dropped,
    "twice": _twice, "pieces shuffled": _pieces_shuffled, "pieces cut": _pieces_cut, "in two": _in_two,
}  # fmt: skip


def at_one_end(change: OfMessage) -> Callable[[Random, Schedule], Schedule]:
    def changed(rng: Random, schedule: Schedule) -> Schedule:
        line, message = rng.choice(all_messages(schedule))
        return with_messages(schedule, {line: change(rng, message, schedule)})

    return changed


def at_both_ends(change: OfMessage) -> Callable[[Random, Schedule], Schedule]:
    def changed(rng: Random, schedule: Schedule) -> Schedule:
        sent, received, message = rng.choice(all_pairs(schedule))
        new = change(rng, message, schedule)
        changes: Messages = {sent: new, received: [replace(m, peer=sent[1]) for m in new]}
        return with_messages(schedule, changes)

    return changed


def of_all_messages(change: OfMessage) -> Callable[[Random, Schedule], Schedule]:
    """The same change of all messages, or of all of one kind, at both ends."""

    def changed(rng: Random, schedule: Schedule) -> Schedule:
        seed, kinds = rng.random(), rng.sample(KINDS, rng.randrange(1, len(KINDS) + 1))
        some = [(line, m) for line, m in all_messages(schedule) if m.kind in kinds]
        # each message gets a generator of its own, which both its ends have
        changes: Messages = {
            line: change(Random(f"{seed} {m.kind} {m.tag} {list(m.pieces.rows())}"), m, schedule) for line, m in some
        }
        return with_messages(schedule, changes)

    return changed


def _moved_message(rng: Random, schedule: Schedule) -> Schedule:
    """A message to the step before or behind its own, or to a step of its own there."""
    (name, rank, number, verb, n), message = rng.choice(all_messages(schedule))
    steps = list(getattr(schedule, name)[rank])
    left = getattr(steps[number], verb)
    steps[number] = steps[number]._replace(**{verb: (*left[:n], *left[n + 1 :])})
    if rng.random() < 0.5:
        alone: dict[str, Any] = {verb: (message,)}
        steps.insert(number + rng.choice((0, 1)), Step(**alone))
    else:
        to = min(max(0, number + rng.choice((-1, 1))), len(steps) - 1)
        steps[to] = steps[to]._replace(**{verb: (*getattr(steps[to], verb), message)})
    programs = list(getattr(schedule, name))
    programs[rank] = tuple(steps)
    return replace(schedule, **{name: tuple(programs)})


def _messages_shuffled(rng: Random, schedule: Schedule) -> Schedule:
    """The order of messages inside a step; sometimes on all ranks, by kind, which both ends see alike."""
    if rng.random() < 0.5:
        order = {kind: rng.random() for kind in KINDS}

        def key(message: Message) -> tuple[float, int]:
            return order.get(message.kind, 0.0), message.tag

        new = {
            place: (step._replace(sends=tuple(sorted(step.sends, key=key)), recvs=tuple(sorted(step.recvs, key=key))),)
            for place, step in all_steps(schedule)
        }
        return with_steps(schedule, new)
    place, step = rng.choice(all_steps(schedule))
    sends, recvs = (tuple(rng.sample(some, len(some))) for some in (step.sends, step.recvs))
    return with_steps(schedule, {place: (step._replace(sends=sends, recvs=recvs),)})


def _of_steps(rng: Random, schedule: Schedule) -> Schedule:
    """A step dropped, twice, exchanged with another, one with the next, or its parts as steps."""
    place, step = rng.choice(all_steps(schedule))
    name, rank, number = place
    program = getattr(schedule, name)[rank]
    other = (name, rank, rng.randrange(len(program)))
    following = program[min(number + 1, len(program) - 1)]
    parts = [step._replace(sends=(), recvs=()), Step(sends=step.sends), Step(recvs=step.recvs)]
    one = Step(step.sends + following.sends, step.recvs + following.recvs, Tiles.concat([step.tiles, following.tiles]))
    return with_steps(
        schedule,
        rng.choice(
            [
                {place: ()},
                {place: (step, step)},
                {place: (program[other[2]],), other: (step,)},
                {place: (one,), (name, rank, number + 1): ()},
                {place: rng.sample(parts, 3)},
                {place: (step, Step())},
            ]
        ),
    )


def _of_tiles(rng: Random, schedule: Schedule) -> Schedule:
    """A tile dropped, twice, cut, moved, or with another number; or all tiles of a step in another order."""
    some = [(place, step) for place, step in all_steps(schedule) if len(step.tiles)]
    place, step = rng.choice(some)
    rows, n = list(step.tiles.rows()), rng.randrange(len(step.tiles))

    def of(rows: list[Any]) -> Iterable[Step]:
        return (step._replace(tiles=Tiles.of_rows(rows)),)

    def moved() -> Mapping[Place, Iterable[Step]]:
        there, other = rng.choice(all_steps(schedule))
        tiles = Tiles.concat([other.tiles, step.tiles.take(slice(n, n + 1))])
        return {place: of(rows[:n] + rows[n + 1 :]), there: (other._replace(tiles=tiles),)}

    changes: list[Callable[[], Mapping[Place, Iterable[Step]]]] = [
        lambda: {place: of(rows[:n] + rows[n + 1 :])},
        lambda: {place: of([*rows, rows[n]])},
        lambda: {place: of(rows[:n] + halves(rng, rows[n], (1, 3, 5)) + rows[n + 1 :])},
        lambda: {place: of(rng.sample(rows, len(rows)))},
        lambda: {place: (step._replace(tiles=other_table(rng, step.tiles, vars(step.tiles))),)},
        moved,
    ]
    return with_steps(schedule, rng.choice(changes)())


def _of_header(rng: Random, schedule: Schedule) -> Schedule:
    """What is saved, how many heads there are, or whose program it is."""
    swapped = list(range(schedule.cp_size))
    rng.shuffle(swapped)
    return rng.choice(
        [
            replace(schedule, saved=tuple(rng.sample((*KINDS, "v"), rng.randrange(3)))),
            replace(schedule, saved=tuple(rng.sample(("q", "kv"), rng.randrange(3)))),
            replace(schedule, heads=(schedule.heads[0], other_number(rng, schedule.heads[1]))),
            replace(schedule, forward=tuple(schedule.forward[r] for r in swapped)),
            replace(schedule, backward=schedule.backward[: rng.randrange(schedule.cp_size + 1)]),
        ]
    )


CHANGES: dict[str, Callable[[Random, Schedule], Schedule]] = {
    **{f"{name}, at one end": at_one_end(change) for name, change in OF_MESSAGES.items()},
    **{f"{name}, at both ends": at_both_ends(change) for name, change in OF_MESSAGES.items()},
    **{f"{name}, of all": of_all_messages(OF_MESSAGES[name]) for name in ("tags", "marks", "in two", "pieces cut")},
    "message moved": _moved_message,
    "messages shuffled": _messages_shuffled,
    "steps": _of_steps,
    "tiles": _of_tiles,
    "header": _of_header,
}


def changed_objects(rng: Random, schedule: Schedule) -> tuple[str, Schedule]:
    """One to three changes, and their names."""
    names: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(list(CHANGES))
        try:
            schedule = CHANGES[name](rng, schedule)
        except IndexError:  # nothing is left to change
            continue
        names.append(name)
    return " + ".join(names), schedule


def changed_text(rng: Random, text: str) -> tuple[str, str]:
    """A line dropped, twice, exchanged with another one, or with a number or a word changed."""
    lines = text.splitlines()
    n, m = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.choice(["line dropped", "line twice", "lines exchanged", "number", "number", "word", "line moved"])
    if how == "line dropped":
        lines[n : n + 1] = []
    elif how == "line twice":
        lines.insert(n, lines[n])
    elif how == "lines exchanged":
        lines[n], lines[m] = lines[m], lines[n]
    elif how == "line moved":
        lines.insert(m, lines.pop(n))
    elif how == "number" and (found := list(re.finditer(r"\d+", lines[n]))):
        at = rng.choice(found)
        new = rng.choice([str(other_number(rng, int(at[0]))), str(10 ** rng.randrange(40)), "", "x", "-1", "1.5"])
        lines[n] = lines[n][: at.start()] + new + lines[n][at.end() :]
    else:
        words = lines[n].split(" ")
        words[rng.randrange(len(words))] = rng.choice([*KINDS, "complete", "send", "recv", "step", "to", "from", ""])
        lines[n] = " ".join(words)
    return how, "\n".join(lines) + "\n"
