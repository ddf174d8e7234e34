"""Deliberately wrong variants of the reference implementation, each by one patched spot. A suite that misses one is no
suite.

Every mutant names the tier that has to see it within the quick profile. Run one by hand:

    with MUTANTS["lse-in-base-2"].planted():
        ...
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from cp_ref.spec import Band, Message, Problem, Schedule, Step

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """`spoil` makes the wrong variant of what `target` (a dotted name) is; `tier` is the one that has to see it."""

    target: str
    spoil: Callable[[Any], Any]
    tier: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The reference is wrong inside this context."""
        with mock.patch(self.target, self.spoil(pkgutil.resolve_name(self.target))):
            yield


def _planner(spoil: Callable[[Schedule], Schedule]) -> Callable[[Any], Any]:
    """Every schedule spoiled."""

    def wrap(make_schedule: Callable[[Problem], Schedule]) -> Callable[[Problem], Schedule]:
        return lambda problem: spoil(make_schedule(problem))

    return wrap


def _edit(programs: tuple[tuple[Step, ...], ...], edit: Callable[[Step], Step | None]) -> tuple[tuple[Step, ...], ...]:
    """The programs with one step edited: the last one of the last rank for which `edit` gives a step."""
    for rank in reversed(range(len(programs))):
        for number in reversed(range(len(programs[rank]))):
            if (step := edit(programs[rank][number])) is not None:
                program = (*programs[rank][:number], step, *programs[rank][number + 1 :])
                return (*programs[:rank], program, *programs[rank + 1 :])
    return programs


def _without_a_tile(schedule: Schedule) -> Schedule:
    return replace(
        schedule, forward=_edit(schedule.forward, lambda s: replace(s, tiles=s.tiles[:-1]) if s.tiles else None)
    )


def _with_a_tile_twice(schedule: Schedule) -> Schedule:
    def edit(step: Step) -> Step | None:
        return replace(step, tiles=(*step.tiles, step.tiles[-1])) if step.tiles else None

    return replace(schedule, forward=_edit(schedule.forward, edit), backward=_edit(schedule.backward, edit))


def _with_a_wrong_tag(schedule: Schedule) -> Schedule:
    def edit(step: Step) -> Step | None:
        if not step.recvs:
            return None
        return replace(step, recvs=(*step.recvs[:-1], replace(step.recvs[-1], tag=step.recvs[-1].tag + 100)))

    return replace(schedule, forward=_edit(schedule.forward, edit))


def _dkv_to_the_wrong_owner(schedule: Schedule) -> Schedule:
    """The last gradients of a rank stay where they are: neither sent nor awaited."""

    def without(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(m for m in messages if m.what != "dkv")

    last = tuple(
        (*program[:-1], *(replace(s, sends=without(s.sends), recvs=without(s.recvs)) for s in program[-1:]))
        for program in schedule.backward
    )
    return replace(schedule, backward=last)


def _window_off_by_one(visible_pairs: Any) -> Any:
    def wider(band: Band, *rest: Any) -> torch.Tensor:
        return visible_pairs(band if band.lo is None else replace(band, lo=band.lo - 1), *rest)

    return wider


def _bottom_right_off_by_one(band: Any) -> Any:
    """In the specification itself, which plan, `verify` and probes believe: only the oracle knows better."""

    def shifted(self: Problem, sequence: Any) -> Band:
        right = band(self, sequence)
        return replace(right, hi=right.hi + 1) if self.bottom_right and right.hi is not None else right

    return shifted


def _base_2(merge: Any) -> Any:
    def merged(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> Any:
        with mock.patch("torch.logaddexp", torch.logaddexp2):
            return merge(out_a, lse_a, out_b, lse_b)

    return merged


def _halves_swapped(put_own: Any) -> Any:
    def swapped(self: Any, what: str, *local: torch.Tensor) -> None:
        if what == "kv":
            half = local[0].shape[0] // 2
            local = tuple(torch.cat([x[half : 2 * half], x[:half], x[2 * half :]]) for x in local)
        put_own(self, what, *local)

    return swapped


def _dkv_twice(unpack: Any) -> Any:
    def twice(self: Any, message: Message, parcels: Any) -> None:
        unpack(self, message, parcels)
        if message.what == "dkv":
            unpack(self, message, parcels)

    return twice


def _sink_on_every_rank(add_sink: Any) -> Any:
    def again(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> Any:
        return add_sink(*add_sink(out, lse, sink), sink)

    return again


def _wrong_kv_head(slices: Any) -> Any:
    def wrong(world: Any, tile: Any) -> Any:
        rows, columns, heads, kv_heads = slices(world, tile)
        return rows, columns, heads, kv_heads.flip(0)

    return wrong


def _no_slope(scores: Any) -> Any:
    return lambda *arguments: (scores(*arguments)[0], 1.0)


def _lse_in_bfloat16(lse_from_packed: Any) -> Any:
    def rounded(lse: torch.Tensor, *rest: Any) -> torch.Tensor:
        return lse_from_packed(lse if lse.dtype == torch.float64 else lse.bfloat16().to(lse.dtype), *rest)

    return rounded


def _only_own_error(agree: Any) -> Any:
    def silent(group: Any, problem: object, error: Exception | None) -> None:
        if error is not None:
            raise error

    return silent


MUTANTS: dict[str, Mutant] = {
    "window-off-by-one": Mutant("cp_ref.execute.visible_pairs", _window_off_by_one, "probes"),
    "diagonal-off-by-one-in-the-spec": Mutant("cp_ref.spec.problem.Problem.band", _bottom_right_off_by_one, "logic"),
    "lse-in-base-2": Mutant("cp_ref.world.merge", _base_2, "probes"),
    "wrong-half-of-a-block": Mutant("cp_ref.world.World.put_own", _halves_swapped, "logic"),
    "lost-tile": Mutant("cp_ref.plan.make_schedule", _planner(_without_a_tile), "plan"),
    "lost-tile-in-the-result": Mutant("cp_ref.plan.make_schedule", _planner(_without_a_tile), "probes"),
    "tile-twice": Mutant("cp_ref.plan.make_schedule", _planner(_with_a_tile_twice), "plan"),
    "wrong-tag": Mutant("cp_ref.plan.make_schedule", _planner(_with_a_wrong_tag), "plan"),
    "wrong-tag-on-the-wire": Mutant("cp_ref.plan.make_schedule", _planner(_with_a_wrong_tag), "logic"),
    "dkv-added-twice": Mutant("cp_ref.world.World.unpack", _dkv_twice, "logic"),
    "dkv-not-home": Mutant("cp_ref.plan.make_schedule", _planner(_dkv_to_the_wrong_owner), "plan"),
    "dkv-not-home-in-the-result": Mutant("cp_ref.plan.make_schedule", _planner(_dkv_to_the_wrong_owner), "probes"),
    "sink-on-every-rank": Mutant("cp_ref.api.add_sink", _sink_on_every_rank, "logic"),
    "sink-gradient-of-one-rank": Mutant("cp_ref.api.all_reduce_sum", lambda _: lambda group, x: x, "logic"),
    "max-logit-of-one-rank": Mutant("cp_ref.api.all_reduce_max", lambda _: lambda group, x: x, "logic"),
    "lse-gradient-lost": Mutant("cp_ref.api.lse_to_packed", lambda f: lambda *a: 0.0 * f(*a).nan_to_num(), "logic"),
    "softcap-slope-lost": Mutant("cp_ref.tile._scores", _no_slope, "logic"),
    "wrong-kv-head": Mutant("cp_ref.execute._slices", _wrong_kv_head, "probes"),
    "lse-in-bfloat16": Mutant("cp_ref.api.lse_from_packed", _lse_in_bfloat16, "budget"),
    "ranks-do-not-agree": Mutant("cp_ref.plan.agree", _only_own_error, "errors"),
}
