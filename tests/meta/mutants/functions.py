"""What rows of the tables call: changes of schedules and tables that take more than a few lines, and names that a
changed function's module may lack."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch

from cp_fast.compile.program import Accumulate, Launch
from cp_fast.kernels.linear.linear_kernels import Maps
from cp_fast.movers.mover_protocol import RowRule
from cp_ref.problems.cuts import Cut
from cp_ref.schedules.areas import UNBOUNDED, Areas
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Message, Schedule, Step, Tiles

__all__ = [
    "UNBOUNDED",
    "Areas",
    "Maps",
    "RowRule",
    "a2a_rank_first",
    "a_step_late",
    "as_if_contiguous",
    "dkv_stays",
    "documents_joined",
    "drifting",
    "everywhere",
    "exchanged_targets",
    "half_a_seed",
    "halo_one_short",
    "next_slopes",
    "nullcontext",
    "one_key_lost",
    "one_scale",
    "other_seed",
    "own_gradient",
    "peers_by_exclusive_or",
    "pieces_exchanged",
    "pieces_reversed",
    "spoiled",
    "the_first",
    "the_last",
    "threading",
    "tiles_of_the_first_heads",
    "waiting_lost",
    "with_a_tile_twice",
    "with_a_wrong_tag",
    "with_lengths",
    "without_a_tile",
]  # fmt: skip

Tensor = torch.Tensor
RankSchedules = tuple[tuple[Step, ...], ...]

# ---- schedules


def spoiled(
    schedule: Schedule, edit: Callable[[Step], Step | None], *, forward: bool = True, backward: bool = True
) -> Schedule:
    """The schedule with one step edited in each pass: the last one of the last rank for which `edit` gives a step."""

    def edited(ranks: RankSchedules) -> RankSchedules:
        for rank in reversed(range(len(ranks))):
            for number in reversed(range(len(ranks[rank]))):
                if (step := edit(ranks[rank][number])) is not None:
                    steps = (*ranks[rank][:number], step, *ranks[rank][number + 1 :])
                    return (*ranks[:rank], steps, *ranks[rank + 1 :])
        return ranks

    there = edited(schedule.forward) if forward else schedule.forward
    return replace(schedule, forward=there, backward=edited(schedule.backward) if backward else schedule.backward)


def everywhere(schedule: Schedule, edit: Callable[[Step], Step]) -> Schedule:
    """The schedule with all its steps edited."""
    forward, backward = (
        tuple(tuple(map(edit, steps)) for steps in ranks) for ranks in (schedule.forward, schedule.backward)
    )
    return replace(schedule, forward=forward, backward=backward)


def without_a_tile(step: Step) -> Step | None:
    return step._replace(tiles=step.tiles.take(slice(-1))) if len(step.tiles) else None


def with_a_tile_twice(step: Step) -> Step | None:
    last = step.tiles.take(slice(-1, None))
    return step._replace(tiles=Tiles.concat([step.tiles, last])) if len(last) else None


def with_a_wrong_tag(step: Step) -> Step | None:
    return step._replace(recvs=_last_changed(step.recvs, lambda m: replace(m, tag=m.tag + 100))) if step.recvs else None


def _last_changed(messages: tuple[Message, ...], change: Callable[[Message], Message]) -> tuple[Message, ...]:
    return (*messages[:-1], change(messages[-1]))


def dkv_stays(schedule: Schedule) -> Schedule:
    """The last gradients of a rank stay where they are: neither sent nor awaited."""

    def without(step: Step) -> Step:
        sends, recvs = (tuple(m for m in some if m.kind != "dkv") for some in (step.sends, step.recvs))
        return step._replace(sends=sends, recvs=recvs)

    return replace(schedule, backward=tuple((*steps[:-1], *map(without, steps[-1:])) for steps in schedule.backward))


def pieces_reversed(step: Step) -> Step:
    """Senders pack their pieces in the other order than receivers unpack them."""
    return step._replace(sends=tuple(replace(m, pieces=m.pieces.take(slice(None, None, -1))) for m in step.sends))


def halo_one_short(step: Step) -> Step:
    """Of every block of keys that travels, the first row stays at home."""

    def shorter(m: Message) -> Message:
        p = m.pieces
        return replace(m, pieces=replace(p, start=p.start + (p.stop - p.start > 1))) if m.kind == "kv" else m

    return step._replace(sends=tuple(map(shorter, step.sends)), recvs=tuple(map(shorter, step.recvs)))


def peers_by_exclusive_or(step: Step) -> Step:
    return step._replace(sends=tuple(replace(m, peer=m.peer ^ 1) for m in step.sends))


def tiles_of_the_first_heads(step: Step) -> Step:
    t = step.tiles
    return step._replace(tiles=replace(t, head_start=t.head_start * 0, head_stop=t.head_stop - t.head_start))


def a_step_late(schedule: Schedule) -> Schedule:
    """Every message is posted a step later than it was planned."""

    def delayed(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        tiles = [*(s.tiles for s in steps), Step().tiles]
        return tuple(m._replace(tiles=t) for m, t in zip((Step(), *steps), tiles, strict=True))

    forward, backward = (tuple(map(delayed, ranks)) for ranks in (schedule.forward, schedule.backward))
    return replace(schedule, forward=forward, backward=backward)


def a2a_rank_first(problem: Problem, schedule: Schedule) -> Schedule:
    """Ranks counted as a2a_rank * p2p_size + p2p_rank."""
    inner, size = problem.a2a_size, problem.cp_size
    if problem.cp_comm_type != "a2a+p2p" or inner in (1, size):
        return schedule
    order = [(n % inner) * (size // inner) + n // inner for n in range(size)]
    forward, backward = (tuple(ranks[n] for n in order) for ranks in (schedule.forward, schedule.backward))
    return replace(schedule, forward=forward, backward=backward)


# ---- problems, slices, scores


def with_lengths(problem: Problem, change: Callable[[Sequence], Iterable[int]]) -> Problem:
    """Sequences with other (len_q, len_kv)."""

    def changed(s: Sequence) -> Sequence:
        len_q, len_kv = change(s)
        return replace(s, len_q=len_q, len_kv=len_kv)

    return replace(problem, sequences=tuple(map(changed, problem.sequences)))


def documents_joined(problem: Problem) -> Problem:
    """Where there is no padding the packed buffer is taken for one document."""
    full = all(s.len_q == s.slots_q == s.len_kv == s.slots_kv for s in problem.sequences)
    if problem.qkv_format != "thd" or not full or not problem.sequences:
        return problem
    total = problem.starts_q[-1]
    return replace(problem, sequences=(Sequence(total, total, total, total),))


def own_gradient(whole: Tensor, cut: Cut, rank: int) -> None:
    """The other ranks' gradients are left out."""

    def of_own_rows(grad: Tensor) -> Tensor:
        axis, rows = 1 if cut.qkv_format == "bshd" else 0, cut.of(rank)
        index = torch.from_numpy(rows[rows < cut.size])
        return torch.zeros_like(grad).index_copy(axis, index, grad.index_select(axis, index))

    if whole.requires_grad and cut.batch is None:
        whole.register_hook(of_own_rows)


def next_slopes(inputs: Any) -> Any:
    """Every head has another's slope."""
    return inputs if inputs.alibi_slopes is None else inputs._replace(alibi_slopes=inputs.alibi_slopes.roll(1, -1))


def half_a_seed(inputs: Any) -> Any:
    """The seed's high half is left out."""
    seed = inputs.dropout_seed
    return inputs if seed is None else inputs._replace(dropout_seed=seed & 0xFFFFFFFF)


def other_seed(inputs: Any) -> Any:
    """Other pairs are dropped."""
    return inputs if inputs.dropout_seed is None else inputs._replace(dropout_seed=inputs.dropout_seed + 1)


# ---- tensors

_calls = count()
_kept: dict[Any, tuple[Any, Tensor]] = {}


def drifting(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A few units in the last place more, with every call."""
    return x * (1.0 + 4 * torch.finfo(dtype).eps * (next(_calls) % 3))


def the_first(owner: Any, rank: int, x: Tensor) -> Tensor:
    """The tensor that the owner was first called with on this rank, where it has the same shape."""
    _, first = _kept.setdefault((id(owner), rank), (owner, x.detach().clone()))
    return first if first.shape == x.shape else x


def the_last(owner: Any, x: Tensor | None = None) -> Tensor:
    """The tensor that the owner has kept last. x: one to keep."""
    if x is not None:
        _kept[id(owner), -1] = owner, x.detach()
    return _kept[id(owner), -1][1]


def one_scale(x: Tensor) -> Tensor:
    """Quantised by one scale for all rows, NaN in padding aside."""
    real = x.nan_to_num(0.0).abs()
    if not real.numel() or not real.max():
        return x
    step = real.max() * 2.0**-16
    return (x / step).round() * step


def as_if_contiguous(x: Tensor) -> Tensor:
    """Memory read without its strides."""
    return x if x.is_contiguous() else torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())


# ---- what cp_fast compiles and computes


def pieces_exchanged(found: Any) -> Any:
    """Of a message that is received in pieces the first and the last change places, where they have as many rows."""
    return found and [
        (some[-1], *some[1:-1], some[0])
        if len(some) > 1 and some[0].stop - some[0].start == some[-1].stop - some[-1].start
        else some
        for some in found
    ]


def exchanged_targets(tables: Any, copies: Any) -> Any:
    """Rows that are put together from several buffers lie in each other's places, where they are as many."""
    rows = [tables.count(c.source.rows) for c in copies]
    same = len(copies) > 1 and len(set(rows)) == 1 and len({c.target.heads for c in copies}) == 1
    turned = [*copies[1:], *copies[:1]] if same else copies
    return [replace(c, target=other.target) for c, other in zip(copies, turned, strict=True)]


def waiting_lost(plan: Any) -> Any:
    """Partial results that wait for the next step are forgotten."""
    made = {result: launch.step for launch in plan.of(Launch) for result in launch.results}

    def waits(one: Any) -> bool:
        return isinstance(one, Accumulate) and one.step != made.get(one.source.buffer, one.step)

    return replace(plan, instructions=tuple(one for one in plan.instructions if not waits(one)))


def one_key_lost(blocks: Any, rows: int) -> Any:
    """The first column of the last row of a block with some columns is hidden."""
    if blocks and blocks[0].stop - blocks[0].start > 4:
        first = blocks[0]
        hidden = torch.zeros(rows, first.stop - first.start, dtype=torch.bool) if first.hidden is None else first.hidden
        hidden = hidden.clone()
        hidden[-1, int((~hidden[-1]).int().argmax())] = True
        blocks[0] = first._replace(hidden=hidden)
    return blocks


assert np  # rows use it
