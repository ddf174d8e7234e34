"""verify finds what is planted: each kind of mistake, named with rank and step."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Message, Pieces, Schedule, Step, Tiles
from cp_ref.schedules.verify.proof import InvalidSchedule, verify, verify_tables

PROBLEM = Problem(3, (Sequence(12, 12, 12, 12),), qkv_format="thd", attn_mask_type="no_mask")
SCHEDULE = make_schedule(PROBLEM)


def change(rank: int, number: int, *, backward: bool = False, **changes: object) -> Schedule:
    """The good schedule with one step of one rank changed."""
    rank_schedules = list(SCHEDULE.backward if backward else SCHEDULE.forward)
    steps = list(rank_schedules[rank])
    steps[number] = steps[number]._replace(**changes)
    rank_schedules[rank] = tuple(steps)
    return replace(SCHEDULE, **{"backward" if backward else "forward": tuple(rank_schedules)})


def rows(start: int, stop: int) -> Pieces:
    return Pieces.of_rows([(start, stop, 0, 1)])


def errors(schedule: Schedule) -> list[str]:
    with pytest.raises(InvalidSchedule) as caught:
        verify(PROBLEM, schedule)
    return caught.value.errors


def step(rank: int, number: int, *, backward: bool = False) -> Step:
    return (SCHEDULE.backward if backward else SCHEDULE.forward)[rank][number]


def test_the_good_one() -> None:
    report = verify(PROBLEM, SCHEDULE)
    assert report.balance == 1.0
    assert [r.tokens for r in report.ranks] == [4, 4, 4]
    # every rank passes 2 blocks of 4 rows on, 1 head, d 8 + 8, float32; back: the same, and 2 sums in float32
    assert [r.forward_bytes for r in report.ranks] == [2 * 4 * 16 * 4] * 3
    assert [r.backward_bytes for r in report.ranks] == [2 * 2 * 4 * 16 * 4] * 3
    assert [r.held_rows for r in report.ranks] == [8, 8, 8]  # two blocks, whatever the ring's size


def test_a_lost_tile_is_a_pair_computed_never() -> None:
    lost = step(1, 1).tiles
    found = errors(change(1, 1, tiles=lost.take(slice(1, None))))
    assert any("computed never" in e and "query of rank 1, key of rank 0" in e and "rank 1 step 0" in e for e in found)


def test_a_tile_twice_is_a_pair_computed_twice() -> None:
    tiles = step(2, 1).tiles
    found = errors(change(2, 1, tiles=Tiles.concat([tiles, tiles.take(slice(1))])))
    assert any("computed twice (rank 2 step 1, rank 2 step 1)" in e for e in found)


def test_the_backward_pass_is_checked_too() -> None:
    found = errors(change(0, 0, backward=True, tiles=step(0, 0).tiles.take(slice(1, None))))
    assert found
    assert all(e.startswith("backward") for e in found)


def test_a_receive_without_a_send() -> None:
    found = errors(change(0, 1, sends=()))
    assert any(e.startswith("forward rank 1 step 1: 'recv kv") and "a receive without a send" in e for e in found)


def test_a_send_without_a_receive() -> None:
    found = errors(change(0, 1, recvs=()))
    assert any(e.startswith("forward rank 2 step 1: 'send kv") and "a send without a receive" in e for e in found)


def test_a_wrong_tag() -> None:
    (good,) = step(2, 0).recvs
    found = errors(change(2, 0, recvs=(replace(good, tag=99),)))
    assert any("forward rank 2 step 0: expects" in e and "tag 99" in e for e in found)


def test_an_operand_that_is_not_there() -> None:
    early = Tiles.of_rows([(0, 0, 2, 8, 10, 0, 1)])
    found = errors(change(0, 0, tiles=Tiles.concat([step(0, 0).tiles, early])))
    expected = "forward rank 0 step 0: tile 0 q[0:2] k[8:10] needs kv [8:10] (from position 8 of sequence 0 on), which"
    assert any(e.startswith(expected) and "not there" in e for e in found)


def test_sending_what_one_does_not_have() -> None:
    (good,) = step(0, 0).sends
    found = errors(change(0, 0, sends=(replace(good, pieces=rows(4, 6)),)))
    assert any(
        "forward rank 0 step 0: sends kv [4:6] (from position 4 of sequence 0 on) to rank 1, but does not have it" in e
        for e in found
    )


def test_a_deadlock() -> None:
    """Each rank first waits for a message that the next one sends only later."""
    waiting = [
        (
            Step(recvs=(Message("kv", (r + 1) % 3, 0, rows(0, 2)),)),
            Step(sends=(Message("kv", (r - 1) % 3, 0, rows(0, 2)),)),
        )
        for r in range(3)
    ]
    found = errors(replace(SCHEDULE, forward=tuple(waiting)))
    assert [e for e in found if "in a deadlock" in e and e.startswith("forward rank")] == found
    assert len(found) == 3


def test_a_result_that_does_not_come_home() -> None:
    last = len(SCHEDULE.backward[0]) - 1
    rank_schedules = [list(p) for p in SCHEDULE.backward]
    for rank_schedule in rank_schedules:
        rank_schedule[last] = Step()
    found = errors(replace(SCHEDULE, backward=tuple(map(tuple, rank_schedules))))
    assert any("ends with dkv" in e and "belongs to another rank" in e for e in found)


def test_a_result_of_a_head_that_nobody_computes() -> None:
    """Two query heads share a kv head; the second of them is missing for some rows."""
    problem = replace(PROBLEM, heads_q=2)
    good = make_schedule(problem)
    tiles = good.forward[0][0].tiles
    half = Tiles.concat([tiles.take(slice(1, None)), Tiles.of_rows([(*next(tiles.rows())[:5], 0, 1)])])
    first = (good.forward[0][0]._replace(tiles=half), *good.forward[0][1:])
    with pytest.raises(
        InvalidSchedule, match=r"query row 0 \(position 0 of sequence 0\), key row .* of heads 1:2: comp.*never"
    ):
        verify(problem, replace(good, forward=(first, *good.forward[1:])))


@pytest.mark.parametrize(
    ("tile", "said"),
    [
        ((1, 0, 2, 0, 2, 0, 1), "is of no area: there are 1"),
        ((0, 0, 13, 0, 2, 0, 1), r"reaches outside its area, area q\[0:12\] k\[0:12\] band"),
        ((0, 0, 2, -1, 2, 0, 1), "reaches outside its area"),
        ((0, 2, 2, 0, 2, 0, 1), "is empty"),
        ((0, 0, 2, 0, 2, 0, 2), "has heads that are not among 0:1"),
    ],
)
def test_tiles_that_mean_nothing(tile: tuple[int, ...], said: str) -> None:
    found = errors(change(1, 0, tiles=Tiles.of_rows([tile])))
    assert len(found) == 1
    assert re.search(f"^forward rank 1 step 0: tile .*{said}", found[0])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Message("kv", 1, 0, rows(0, 2)), "rank 1 is no peer"),
        (Message("kv", 3, 0, rows(0, 2)), "rank 3 is no peer"),
        (Message("kv", 0, 0, rows(2, 2)), "a piece is empty"),
        (Message("kv", 0, 0, Pieces.of_rows([])), "it has no rows"),
        (Message("kv", 0, 0, Pieces.of_rows([(0, 2, 0, 2)])), "there are heads 0:1"),
        (Message("kv", 0, 0, Pieces.of_rows([(4, 6, 0, 1), (5, 7, 0, 1)])), "it has the same rows twice"),
        (Message("v", 0, 0, rows(0, 2)), "there is no kind 'v'"),
        (Message("kv", 0, 2**21, rows(0, 2)), "tag 2097152 is not among 0:2097152"),
        (Message("kv", 0, 2**70, rows(0, 2)), "is not among 0:2097152"),
        (Message("kv", 0, -1, rows(0, 2)), "tag -1 is not among"),
        (Message("kv", 0, "a", rows(0, 2)), "tag a is not among"),  # type: ignore[arg-type]
        (Message("kv", 0, 0, rows(0, 2), complete=True), "only out, dq, dkv can be complete"),
    ],
)
def test_messages_that_mean_nothing(message: Message, said: str) -> None:
    found = errors(change(1, 0, sends=(message,)))
    assert len(found) == 1
    assert found[0].startswith("forward rank 1 step 0: 'send ")
    assert said in found[0]


def test_columns_that_are_no_integers_of_one_length() -> None:
    good, zeros = rows(0, 2), np.zeros(1)
    for pieces in (replace(good, start=zeros), replace(good, stop=zeros[:0].astype(int)), replace(good, head_stop=1)):
        (found,) = errors(change(1, 0, sends=(Message("kv", 0, 0, pieces),)))
        assert found == "forward rank 1 step 0: the pieces of a send are no columns of integers, equally long"
    (found,) = errors(change(1, 0, tiles=replace(step(1, 0).tiles, area=zeros)))
    assert found == "forward rank 1 step 0: the tiles are no columns of integers, equally long"


def test_a_result_is_sent_once() -> None:
    """What a rank hands over it does not have any more."""
    last = len(SCHEDULE.backward[0]) - 1
    (good,) = step(0, last, backward=True).sends
    found = errors(change(0, last, backward=True, sends=(good, good)))
    assert any(f"backward rank 0 step {last}: sends dkv" in e and "but does not have it" in e for e in found)


def test_other_heads_and_unknown_saved_operands() -> None:
    assert "for (2, 1) heads, but there are (1, 1)" in errors(replace(SCHEDULE, heads=(2, 1)))[0]
    assert "saves do; there is q and kv" in errors(replace(SCHEDULE, saved=("q", "do")))[0]


def test_tables_need_no_problem() -> None:
    verify_tables(PROBLEM.workload, SCHEDULE)
    with pytest.raises(InvalidSchedule, match=r"forward: area 0, query row 0, key row 0: computed never"):
        verify_tables(PROBLEM.workload, change(0, 0, tiles=step(0, 0).tiles.take(slice(1, None))))


def test_another_group_size() -> None:
    with pytest.raises(InvalidSchedule, match="3 forward and 3 backward"):
        verify(replace(PROBLEM, cp_size=2), SCHEDULE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "schedule p2p cp_size 2 heads 1/1 saved -\n  step",
        "schedule p2p cp_size 1 heads 1/1 saved -\nforward rank 5",
    ],
)
def test_texts_that_are_no_schedule(text: str) -> None:
    with pytest.raises(ValueError, match=r"schedule|stands before|cp_size"):
        Schedule.parse(text)


@pytest.mark.parametrize("old", ["[0:2]", "tag 0", "to 1", "tile 0", "q[0:2]", "cp_size 3", "rank 2", "heads 1/1"])
def test_numbers_beyond_64_bits_are_refused_with_their_line(old: str) -> None:
    text, long = str(SCHEDULE), str(2**63)
    line = next(line for line in text.splitlines() if old in line).replace(old, re.sub(r"\d+", long, old, count=1))
    wrong = text.replace(next(line for line in text.splitlines() if old in line), line, 1)
    with pytest.raises(ValueError, match=re.escape(f"{line.strip()!r} has a number of more than 18 digits")):
        Schedule.parse(wrong)


def test_a_text_for_more_ranks_than_there_can_be() -> None:
    with pytest.raises(ValueError, match="cp_size is 100000000; a schedule has at most 4096 ranks"):
        Schedule.parse("schedule p2p cp_size 100000000 heads 1/1 saved -")
