"""What stays as it is when a plan gets another batch: which messages and launches there are, and how large they may be.

That is all that a captured CUDA graph has baked in. It is taken from the draft of the batch that the plan is made with;
every later batch has to fit in. A message or a launch that a later batch does not need is left empty; one that the
first batch did not have cannot be added.

Sizes follow from the plan's room and the first batch's lengths, so that ranks agree on them: a launch may have all
queries of the own unit and all keys in hand, a message all keys of a unit. Through a window of a self-attention a unit
sees less of another: of each sequence, `left + right` keys beside each piece of its queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cp_fast.planning.compile import DraftProgram
from cp_fast.planning.drafts import DraftLaunch
from cp_fast.planning.tables import Tables
from cp_ref.spec import Problem, Room

__all__ = ["LaunchShape", "MessageShape", "Shape", "StepShape", "shape_of"]


class MessageShape(NamedTuple):
    """A send or a receive. `own`: of the own K/V rows, or (`home`) for the gradients of the own rows."""

    peer: int
    tag: int
    own: bool


class LaunchShape(NamedTuple):
    """A launch: its window, and how many segments it may have."""

    left: int | None
    right: int | None
    segments: int


class StepShape(NamedTuple):
    """One step of both passes. `keys`: rows of the block in hand. `sums`: whether anything is added to the grads."""

    give_kv: tuple[MessageShape, ...]
    take_kv: tuple[MessageShape, ...]
    give_dkv: tuple[MessageShape, ...]
    take_dkv: tuple[MessageShape, ...]
    launches: tuple[LaunchShape, ...]
    own: bool
    keys: int
    sums: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """`steps` are those of the backward pass; the forward pass has the first `forward` of them, without gradients.
    `unit_q`, `unit_kv`: the most rows that a unit has (see `cp_fast.planning.batch`). `message`: the rows of every
    message.
    """

    room: Room
    steps: tuple[StepShape, ...]
    forward: int
    unit_q: int
    unit_kv: int
    message: int


def shape_of(draft: DraftProgram, room: Room) -> Shape:
    """The shape of a plan that is made with this batch."""
    problem, steps, tables = draft.problem, draft.backward, draft.tables
    assert isinstance(tables, Tables)
    unit_q, unit_kv = room.rows_q * problem.a2a_size, room.rows_kv * problem.a2a_size
    message = _message(problem, room)
    found: list[StepShape] = []
    arriving = 0  # messages that make the block in hand
    for number, step in enumerate(steps):
        leaves = number + 1 < len(steps) and bool(steps[number + 1].give_dkv)
        found.append(
            StepShape(
                give_kv=tuple(MessageShape(g.peer, g.tag, g.own) for g in step.give_kv),
                take_kv=tuple(MessageShape(t.peer, t.tag, t.home) for t in step.take_kv),
                give_dkv=tuple(MessageShape(g.peer, g.tag, g.own) for g in step.give_dkv),
                take_dkv=tuple(MessageShape(t.peer, t.tag, t.home) for t in step.take_dkv),
                launches=tuple(_launch(launch, tables, problem, room) for launch in step.launches),
                own=step.own,
                keys=unit_kv if step.own else message * max(arriving, 1),
                sums=bool(step.launches) or leaves or any(not t.home for t in step.take_dkv),
            )
        )
        arriving = len(step.take_kv) or arriving  # where nothing arrives, the block in hand stays
    return Shape(room, tuple(found), len(draft.forward), unit_q, unit_kv, message)


def _message(problem: Problem, room: Room) -> int:
    """The most keys of one unit that another sees."""
    unit, lengths = room.rows_kv * problem.a2a_size, problem.lengths
    left, right = problem.window_size[0], 0 if problem.causal else problem.window_size[1]
    self_attention = lengths.len_q == lengths.len_kv and lengths.slots_q == lengths.slots_kv
    if left < 0 or right < 0 or not self_attention:
        return unit
    pieces = 2 if problem.layout == "dual_chunk" else 1
    return max(1, min(unit, room.max_sequences * pieces * (left + right)))


def _launch(launch: DraftLaunch, tables: Tables, problem: Problem, room: Room) -> LaunchShape:
    """As many segments a sequence as this batch has on the average, rounded up."""
    segments = len(tables.cumulative(launch.cu_q)) - 1
    sequences = sum(n > 0 for n in problem.lengths.len_q)
    return LaunchShape(launch.left, launch.right, room.max_sequences * -(-segments // sequences))
