"""Random changes of one message: of its rows, heads, ranks, tag, kind and mark, and of how it is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from cp_ref.schedules.schedule import KINDS, Message, Pieces, Schedule
from tests.faults.attacks.parts import (
    Messages,
    all_messages,
    all_pairs,
    halves,
    other_number,
    other_table,
    with_messages,
)

__all__ = ["OF_MESSAGES", "at_both_ends", "at_one_end", "of_all_messages"]


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
