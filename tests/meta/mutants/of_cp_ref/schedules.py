"""Bugs in plans, in who sends what to whom and when, and in who owns which tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Message, Schedule, Step, Tiles
from tests.meta.mutants.model import Mutant, wrap
from tests.meta.mutants.slices import from_zero, own_gradient, reversed_slice

__all__ = ["MUTANTS"]

Edit = Callable[[Step], Step | None]


def _planner(spoil: Callable[[Problem, Schedule], Schedule]) -> Callable[[Any], Any]:
    """Every schedule spoiled."""

    def wrapped(make_schedule: Callable[[Problem], Schedule]) -> Callable[[Problem], Schedule]:
        return lambda problem: spoil(problem, make_schedule(problem))

    return wrapped


def _edit(programs: tuple[tuple[Step, ...], ...], edit: Edit) -> tuple[tuple[Step, ...], ...]:
    """The programs with one step edited: the last one of the last rank for which `edit` gives a step."""
    for rank in reversed(range(len(programs))):
        for number in reversed(range(len(programs[rank]))):
            if (step := edit(programs[rank][number])) is not None:
                program = (*programs[rank][:number], step, *programs[rank][number + 1 :])
                return (*programs[:rank], program, *programs[rank + 1 :])
    return programs


def _everywhere(schedule: Schedule, edit: Callable[[Step], Step]) -> Schedule:
    forward, backward = (
        tuple(tuple(edit(step) for step in program) for program in programs)
        for programs in (schedule.forward, schedule.backward)
    )
    return replace(schedule, forward=forward, backward=backward)


def _without_a_tile(_: Problem, schedule: Schedule) -> Schedule:
    def edit(step: Step) -> Step | None:
        return step._replace(tiles=step.tiles.take(slice(-1))) if len(step.tiles) else None

    return replace(schedule, forward=_edit(schedule.forward, edit))


def _without_a_backward_tile(_: Problem, schedule: Schedule) -> Schedule:
    def edit(step: Step) -> Step | None:
        return step._replace(tiles=step.tiles.take(slice(-1))) if len(step.tiles) else None

    return replace(schedule, backward=_edit(schedule.backward, edit))


def _with_a_tile_twice(_: Problem, schedule: Schedule) -> Schedule:
    def edit(step: Step) -> Step | None:
        last = step.tiles.take(slice(-1, None))
        return step._replace(tiles=Tiles.concat([step.tiles, last])) if len(last) else None

    return replace(schedule, forward=_edit(schedule.forward, edit), backward=_edit(schedule.backward, edit))


def _with_a_wrong_tag(_: Problem, schedule: Schedule) -> Schedule:
    def edit(step: Step) -> Step | None:
        if not step.recvs:
            return None
        last = step.recvs[-1]
        return step._replace(recvs=(*step.recvs[:-1], replace(last, tag=last.tag + 100)))

    return replace(schedule, forward=_edit(schedule.forward, edit))


def _dkv_to_the_wrong_owner(_: Problem, schedule: Schedule) -> Schedule:
    """The last gradients of a rank stay where they are: neither sent nor awaited."""

    def without(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(m for m in messages if m.kind != "dkv")

    last = tuple(
        (*program[:-1], *(s._replace(sends=without(s.sends), recvs=without(s.recvs)) for s in program[-1:]))
        for program in schedule.backward
    )
    return replace(schedule, backward=last)


def _pieces_reversed(_: Problem, schedule: Schedule) -> Schedule:
    """Senders pack their pieces in the other order than receivers unpack them."""

    def edit(step: Step) -> Step:
        return step._replace(sends=tuple(replace(m, pieces=m.pieces.take(slice(None, None, -1))) for m in step.sends))

    return _everywhere(schedule, edit)


def _halo_one_short(_: Problem, schedule: Schedule) -> Schedule:
    """Of every block of keys that travels, the first row stays at home."""

    def shorter(m: Message) -> Message:
        if m.kind != "kv":
            return m
        p = m.pieces
        return replace(m, pieces=replace(p, start=p.start + (p.stop - p.start > 1)))

    def edit(step: Step) -> Step:
        return step._replace(sends=tuple(map(shorter, step.sends)), recvs=tuple(map(shorter, step.recvs)))

    return _everywhere(schedule, edit)


def _a_step_late(_: Problem, schedule: Schedule) -> Schedule:
    """Every message is posted a step later than it was planned."""

    def delayed(program: tuple[Step, ...]) -> tuple[Step, ...]:
        tiles = [*(s.tiles for s in program), Step().tiles]
        return tuple(m._replace(tiles=t) for m, t in zip((Step(), *program), tiles, strict=True))

    forward, backward = (tuple(map(delayed, programs)) for programs in (schedule.forward, schedule.backward))
    return replace(schedule, forward=forward, backward=backward)


def _a2a_rank_first(problem: Problem, schedule: Schedule) -> Schedule:
    """Ranks counted as a2a_rank * p2p_size + p2p_rank."""
    inner, size = problem.a2a_size, problem.cp_size
    if problem.cp_comm_type != "a2a+p2p" or inner in (1, size):
        return schedule
    order = [(n % inner) * (size // inner) + n // inner for n in range(size)]
    forward, backward = (
        tuple(programs[order[n]] for n in range(size)) for programs in (schedule.forward, schedule.backward)
    )
    return replace(schedule, forward=forward, backward=backward)


def _sends_to_itself_in_a_ring_of_odd_size(problem: Problem, schedule: Schedule) -> Schedule:
    """The neighbour's number without the modulo that an odd group needs."""

    def edit(step: Step) -> Step:
        return step._replace(sends=tuple(replace(m, peer=m.peer ^ 1) for m in step.sends))

    return _everywhere(schedule, edit) if problem.cp_size % 2 else schedule


def _tiles_of_the_wrong_heads(_: Problem, schedule: Schedule) -> Schedule:
    """Every tile that has heads of its own is computed for the first heads."""

    def edit(step: Step) -> Step:
        t = step.tiles
        return step._replace(tiles=replace(t, head_start=t.head_start * 0, head_stop=t.head_stop - t.head_start))

    return _everywhere(schedule, edit)


def _without_problem(spoil: Callable[[Schedule], Schedule]) -> Callable[[Problem, Schedule], Schedule]:
    return lambda _, schedule: spoil(schedule)


def _unread(schedule: Schedule) -> Schedule:
    """A message that nobody takes."""

    def edit(step: Step) -> Step | None:
        return step._replace(recvs=step.recvs[:-1]) if step.recvs else None

    return replace(schedule, forward=_edit(schedule.forward, edit))


_PLAN = "cp_ref.reference_plan.make_schedule"

MUTANTS: dict[str, Mutant] = {
    "lost-tile": Mutant("one tile is not computed", _PLAN, _planner(_without_a_tile), "plan"),
    "lost-tile-in-the-result": Mutant("the same, seen in results", _PLAN, _planner(_without_a_tile), "probes"),
    "lost-backward-tile": Mutant("one tile has no gradients", _PLAN, _planner(_without_a_backward_tile), "logic"),
    "tile-twice": Mutant("one tile is computed twice", _PLAN, _planner(_with_a_tile_twice), "plan"),
    "tile-twice-in-the-result": Mutant("the same, seen in results", _PLAN, _planner(_with_a_tile_twice), "probes"),
    "wrong-tag": Mutant("a receive with another tag than its send", _PLAN, _planner(_with_a_wrong_tag), "plan"),
    "wrong-tag-on-the-wire": Mutant("the same, played", _PLAN, _planner(_with_a_wrong_tag), "logic"),
    "unread-message": Mutant("a send without a receive", _PLAN, _planner(_without_problem(_unread)), "plan"),
    "dkv-not-home": Mutant("dK and dV end beside their owner", _PLAN, _planner(_dkv_to_the_wrong_owner), "plan"),
    "dkv-not-home-in-the-result": Mutant(
        "the same, seen in results", _PLAN, _planner(_dkv_to_the_wrong_owner), "probes"
    ),
    "pieces-in-another-order": Mutant(
        "packed in another order than unpacked", _PLAN, _planner(_pieces_reversed), "plan"
    ),
    "pieces-in-another-order-in-the-result": Mutant(
        "the same, seen in results", _PLAN, _planner(_pieces_reversed), "probes"
    ),
    "halo-one-short": Mutant("the first key of each message is missing", _PLAN, _planner(_halo_one_short), "plan"),
    "halo-one-short-in-the-result": Mutant("the same, seen in results", _PLAN, _planner(_halo_one_short), "hygiene"),
    "messages-a-step-late": Mutant("operands arrive after their tiles", _PLAN, _planner(_a_step_late), "plan"),
    "a2a-rank-before-p2p-rank": Mutant(
        "a2a+p2p ranks counted the other way", _PLAN, _planner(_a2a_rank_first), "special", where="window-of-one"
    ),
    "odd-rings-miss-a-neighbour": Mutant(
        "peers computed by exclusive or", _PLAN, _planner(_sends_to_itself_in_a_ring_of_odd_size), "plan"
    ),
    "tiles-of-the-wrong-heads": Mutant(
        "every rank has the first heads", _PLAN, _planner(_tiles_of_the_wrong_heads), "plan"
    ),
    "chunks-in-another-order": Mutant(
        "shard reverses the rows of a slice", "cp_ref.contract.sharding.slice_of", wrap(reversed_slice), "plan"
    ),
    "positions-counted-on-the-rank": Mutant(
        "position_ids of a plan run from 0", "cp_ref.reference_plan.planned_positions", wrap(from_zero), "plan"
    ),
    "positions-from-zero": Mutant(
        "position_ids run from 0 on every rank", "cp_ref.contract.sharding.positions_on", wrap(from_zero), "plan"
    ),
    "unshard-gradient-not-summed": Mutant(
        "the other ranks' gradients are left out", "cp_ref.contract.sharding.gathered", wrap(own_gradient), "plan"
    ),
}
