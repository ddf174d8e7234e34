"""Schedules that a user wrote: messages travel in the order in which `verify` matched them, and marks are proved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Message, RankSchedule, Schedule, Step
from cp_ref.schedules.verify.proof import InvalidSchedule, verify
from tests.schedules.test_schedules import PACKAGES, check

RING = Problem(
    4,
    (Sequence(11, 11, 12, 12), Sequence(20, 20, 20, 20)),
    qkv_format="thd",
    attn_mask_type="causal",
    heads_q=4,
    heads_kv=2,
    d_qk=4,
    d_v=4,
    dtype="float64",
)
GROUPS = replace(RING, cp_comm_type="a2a+p2p", a2a_size=2)
PASSES = ("forward", "backward")


def changed(
    schedule: Schedule, change: Callable[[RankSchedule], RankSchedule], passes: tuple[str, ...] = PASSES
) -> Schedule:
    """Every rank's program changed."""
    return replace(schedule, **{name: tuple(map(change, getattr(schedule, name))) for name in passes})


def by_message(change: Callable[[Message], Message]) -> Callable[[RankSchedule], RankSchedule]:
    """A change of every message."""
    return lambda rank_schedule: tuple(
        step._replace(sends=tuple(map(change, step.sends)), recvs=tuple(map(change, step.recvs)))
        for step in rank_schedule
    )


def cut_in_two(message: Message) -> tuple[Message, ...]:
    """A message as two; the first one has the higher tag."""
    if len(message.pieces) < 2:
        return (message,)
    first, rest = message.pieces.take(slice(1)), message.pieces.take(slice(1, None))
    return replace(message, pieces=first, tag=message.tag + 500), replace(message, pieces=rest)


def in_parts(cut: Callable[[Message], tuple[Message, ...]]) -> Callable[[RankSchedule], RankSchedule]:
    """Every message in parts, which travel in the same step."""

    def some(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(part for message in messages for part in cut(message))

    return lambda rank_schedule: tuple(s._replace(sends=some(s.sends), recvs=some(s.recvs)) for s in rank_schedule)


def received_one_by_one(rank_schedule: RankSchedule) -> RankSchedule:
    """Of the messages that a step receives all but the first one in a step of their own."""
    steps: list[Step] = []
    for step in rank_schedule:
        steps.append(step._replace(recvs=step.recvs[:1]))
        steps += [Step(recvs=step.recvs[1:])] if step.recvs[1:] else []
    return tuple(steps)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("ranks", [(), (1, 3)], ids=["as they are sent", "by two ranks one by one"])
def test_messages_travel_in_their_order_whatever_their_tags(ranks: tuple[int, ...], package: str) -> None:
    schedule = changed(make_schedule(RING), in_parts(cut_in_two))
    for name in PASSES:
        rank_schedules = getattr(schedule, name)
        apart = tuple(received_one_by_one(p) if rank in ranks else p for rank, p in enumerate(rank_schedules))
        schedule = replace(schedule, **{name: apart})
    check(package, RING, schedule)


@pytest.mark.parametrize("package", PACKAGES)
def test_all_messages_may_have_one_tag(package: str) -> None:
    schedule = changed(make_schedule(GROUPS), by_message(lambda message: replace(message, tag=7)))
    check(package, GROUPS, schedule)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.one_in(3)
def test_a_receive_in_a_step_of_its_own(rank: int, package: str) -> None:
    """Of a schedule with two groups; the last of a step, as all come in the order in which they were sent."""
    schedule = make_schedule(GROUPS)
    for name in PASSES:
        for number, step in enumerate(getattr(schedule, name)[rank]):
            if len(step.recvs) < 2:
                continue
            rank_schedules = list(getattr(schedule, name))
            steps = step._replace(recvs=step.recvs[:-1]), Step(recvs=step.recvs[-1:])
            rank_schedules[rank] = (*rank_schedules[rank][:number], *steps, *rank_schedules[rank][number + 1 :])
            check(package, GROUPS, replace(schedule, **{name: tuple(rank_schedules)}))


@pytest.mark.parametrize("name", PASSES)
def test_partial_results_are_not_complete(name: str) -> None:
    """A ring's partial gradients, and a group's: the mark is proved, not believed."""
    results = ("out", "dq", "dkv")
    mark = by_message(lambda message: replace(message, complete=message.kind in results))
    gathered = replace(RING, cp_comm_type="all_gather")
    for problem in (RING, gathered) if name == "backward" else ():
        with pytest.raises(InvalidSchedule, match=r"backward rank \d step \d+: 'recv complete dkv .*is not complete: "):
            verify(problem, changed(make_schedule(problem), mark, (name,)))
    good = make_schedule(GROUPS)
    verify(GROUPS, changed(good, mark, ("forward",)))  # as the planner marks them
    assert changed(good, mark, ("forward",)) == good


@pytest.mark.parametrize("package", PACKAGES)
def test_no_mark_is_right_too(package: str) -> None:
    check(package, GROUPS, changed(make_schedule(GROUPS), by_message(lambda m: replace(m, complete=False))))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.one_in(2)
def test_some_heads_of_what_a_launch_yielded_travel(package: str) -> None:
    """Of each piece one head first, then the others: what is sent is contiguous, as gloo and NCCL want it."""

    def by_heads(message: Message) -> tuple[Message, ...]:
        cut = message.pieces.head_start + 1
        if not bool((cut < message.pieces.head_stop).all()):
            return (message,)
        parts = replace(message.pieces, head_stop=cut), replace(message.pieces, head_start=cut)
        return tuple(replace(message, pieces=some) for some in parts)

    for problem in (RING, GROUPS, replace(RING, cp_comm_type="all_gather")):
        check(package, problem, changed(make_schedule(problem), in_parts(by_heads)))
