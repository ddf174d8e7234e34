"""Schedules of states on integers: proved for every random problem, printed and read back, wrong ones found."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_ref.schedules.linear_schedules import (
    conv_rank_schedule,
    conv_schedule,
    conv_workload,
    document_fragments,
    make_rank_states,
    make_states,
)
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.proof import InvalidSchedule, verify, verify_tables
from cp_ref.schedules.verify.verify_states import verify_states
from tests.linear.problems import linear_problems
from tests.marks import examples

__all__ = [
    "MUTANTS",
    "mutated",
]

# ---- wrong schedules
#
# Mistakes in schedules of states, as changes of their text: each makes a wrong schedule of any right one.


class Line(NamedTuple):
    """A line of a schedule's text, and where it stands."""

    direction: str
    rank: int
    step: int
    text: str

    @property
    def pieces(self) -> list[str]:
        return re.findall(r"\[\d+:\d+\]", self.text)

    @property
    def peer(self) -> int:
        return int(re.findall(r"(?:to|from) (\d+)", self.text)[0])


def lines_of(schedule: Schedule) -> list[Line]:
    found, direction, rank, step = [], "", 0, 0
    for text in map(str.strip, str(schedule).splitlines()[1:]):
        if head := re.fullmatch(r"(forward|backward) rank (\d+)", text):
            direction, rank, step = head[1], int(head[2]), -1
        elif text == "step":
            step += 1
        else:
            found.append(Line(direction, rank, step, text))
    return found


def schedule_of(lines: list[Line], like: Schedule) -> Schedule:
    """The schedule of these lines, with the steps of `like`."""
    text = [str(like).splitlines()[0]]
    for direction, ranks in (("forward", like.forward), ("backward", like.backward)):
        for rank, steps in enumerate(ranks):
            text.append(f"{direction} rank {rank}")
            for step in range(len(steps)):
                text += ["step", *(line.text for line in lines if line[:3] == (direction, rank, step))]
    return Schedule.parse("\n".join(text))


Lines = list[Line]
Change = Callable[[Lines, random.Random, Problem], Lines | None]  # None: nothing of this kind to change


def _pick(
    lines: Lines, rng: random.Random, verb: str, most: int = 1, kept: Callable[[Line], bool] = bool
) -> Line | None:
    some = [line for line in lines if line.text.startswith(verb) and len(line.pieces) >= most and kept(line)]
    return rng.choice(some) if some else None


def _other_end(lines: Lines, send: Line) -> Line:
    wanted = re.sub(r"^send (.*) to \d+", rf"recv \1 from {send.rank}", send.text)
    return next(x for x in lines if x[:2] == (send.direction, send.peer) and x.text == wanted)


def _replaced(lines: Lines, old: Line, *new: str) -> Lines:
    at = next(n for n, line in enumerate(lines) if line is old)
    return [*lines[:at], *(old._replace(text=text) for text in new), *lines[at + 1 :]]


def _without(verb: str) -> Change:
    def change(lines: Lines, rng: random.Random, problem: Problem) -> Lines | None:
        line = _pick(lines, rng, verb)
        return None if line is None else _replaced(lines, line)

    return change


def _both_ends(edit: Callable[[str, list[str], random.Random], str | None], most: int = 1) -> Change:
    """The same change of a send and of its receive; the edit of a text gives None to drop the line."""

    def change(lines: Lines, rng: random.Random, problem: Problem) -> Lines | None:
        send = _pick(lines, rng, "send", most)
        if send is None:
            return None
        state = rng.getstate()
        for line in (send, _other_end(lines, send)):
            rng.setstate(state)
            new = edit(line.text, line.pieces, rng)
            lines = _replaced(lines, line, *([] if new is None else [new]))
        return lines

    return change


def _less(text: str, pieces: list[str], rng: random.Random) -> str:
    return text.replace(f" {rng.choice(pieces)}", "", 1)


def _twice(text: str, pieces: list[str], rng: random.Random) -> str:
    return f"{text}\n{text}"


def _longer(text: str, pieces: list[str], rng: random.Random) -> str:
    piece = rng.choice(pieces)
    start, stop = map(int, re.findall(r"\d+", piece))
    return text.replace(piece, f"[{start}:{stop + 1}]", 1)


def _shorter(text: str, pieces: list[str], rng: random.Random) -> str:
    piece = rng.choice(pieces)
    start, stop = map(int, re.findall(r"\d+", piece))
    return text.replace(piece, f"[{start}:{stop - 1}]" if stop - start > 1 else f"[{start}:{stop + 1}]", 1)


def _other_kind(text: str, pieces: list[str], rng: random.Random) -> str:
    return text.replace(" dstate ", " state ", 1) if " dstate " in text else text.replace(" state ", " dstate ", 1)


def _rotated(lines: Lines, rng: random.Random, problem: Problem) -> Lines | None:
    """To another rank than the one that waits."""
    send = _pick(lines, rng, "send")
    if send is None or problem.cp_size < 3:
        return None
    peer = rng.choice([r for r in range(problem.cp_size) if r not in (send.rank, send.peer)])
    return _replaced(lines, send, send.text.replace(f" to {send.peer} ", f" to {peer} "))


def _to_itself(lines: Lines, rng: random.Random, problem: Problem) -> Lines | None:
    send = _pick(lines, rng, "send")
    return None if send is None else _replaced(lines, send, send.text.replace(f"to {send.peer} ", f"to {send.rank} "))


def _other_tag(lines: Lines, rng: random.Random, problem: Problem) -> Lines | None:
    send = _pick(lines, rng, "send")
    return None if send is None else _replaced(lines, send, f"{send.text}7")


def _scan(edit: Callable[[list[str], random.Random], list[str]], most: int = 1) -> Change:
    """Another order, or other maps, of a scan."""

    def change(lines: Lines, rng: random.Random, problem: Problem) -> Lines | None:
        line = _pick(lines, rng, "scan", most)
        if line is None:
            return None
        document, maps = line.text.split()[1], edit(line.pieces, rng)
        return _replaced(lines, line, *([f"scan {document} {' '.join(maps)}"] if maps else []))

    return change


def _swapped(maps: list[str], rng: random.Random) -> list[str]:
    a, b = rng.sample(range(len(maps)), 2)
    maps = list(maps)
    maps[a], maps[b] = maps[b], maps[a]
    return maps


def _one_less(maps: list[str], rng: random.Random) -> list[str]:
    gone = rng.randrange(len(maps))
    return [x for n, x in enumerate(maps) if n != gone]


def _one_twice(maps: list[str], rng: random.Random) -> list[str]:
    n = rng.randrange(len(maps))
    return [*maps[: n + 1], *maps[n:]]


def _reversed(maps: list[str], rng: random.Random) -> list[str]:
    return maps[::-1]


def _two_in_one(maps: list[str], rng: random.Random) -> list[str]:
    """Two neighbours as one map, which nobody makes."""
    n = rng.randrange(len(maps) - 1)
    numbers = [int(x) for text in maps[n : n + 2] for x in re.findall(r"\d+", text)]
    return [*maps[:n], f"[{min(numbers)}:{max(numbers)}]", *maps[n + 2 :]]


def _other_document(lines: Lines, rng: random.Random, problem: Problem) -> Lines | None:
    line = _pick(lines, rng, "scan")
    if line is None or len(problem.sequences) < 2:
        return None
    here = int(line.text.split()[1])
    other = rng.choice([n for n in range(len(problem.sequences)) if n != here])
    return _replaced(lines, line, line.text.replace(f"scan {here} ", f"scan {other} ", 1))


def _joined_documents(lines: Lines, rng: random.Random, problem: Problem) -> Lines | None:
    """A document goes on from the state of the one before it."""
    for one, other in pairwise(lines):
        if one[:3] == other[:3] and one.text.startswith("scan") and other.text.startswith("scan"):
            text = f"{one.text} {' '.join(other.pieces)}"
            return _replaced(_replaced(lines, other), one, text)
    return None


def _too_early(lines: Lines, rng: random.Random, problem: Problem) -> Lines | None:
    """A scan at the step at which its maps are still on their way."""
    own = {(rank, f"[{start}:{stop}]") for _, _, rank, start, stop, _ in document_fragments(problem).rows()}
    line = _pick(lines, rng, "scan", kept=lambda x: x.step > 0 and any((x.rank, p) not in own for p in x.pieces))
    return None if line is None else [*(x for x in lines if x is not line), line._replace(step=0)]


def _passes_exchanged(lines: Lines, rng: random.Random, problem: Problem) -> Lines | None:
    names = {"forward": "backward", "backward": "forward"}
    if not any(line.text.startswith("send") for line in lines):
        return None
    return [line._replace(direction=names[line.direction]) for line in lines]


MUTANTS: dict[str, Change] = {
    "a send is lost": _without("send"),
    "a receive is lost": _without("recv"),
    "a message is lost at both ends": _both_ends(lambda text, pieces, rng: None),
    "a map is lost at both ends": _both_ends(_less, most=2),
    "a message is sent twice": _both_ends(_twice),
    "a map with a row of padding, or of the next document": _both_ends(_longer),
    "a map without its last row": _both_ends(_shorter),
    "the kind of the other pass": _both_ends(_other_kind),
    "to another rank": _rotated,
    "to itself": _to_itself,
    "with another tag": _other_tag,
    "two maps exchanged": _scan(_swapped, most=2),
    "the maps in reverse order": _scan(_reversed, most=2),
    "a map left out of a scan": _scan(_one_less),
    "a map composed twice": _scan(_one_twice),
    "two maps as one": _scan(_two_in_one, most=2),
    "a scan is lost": _without("scan"),
    "a scan of another document": _other_document,
    "documents share a state": _joined_documents,
    "a scan too early": _too_early,
    "the passes exchanged": _passes_exchanged,
}


def mutated(name: str, problem: Problem, schedule: Schedule, seed: int) -> Schedule | None:
    """The schedule with one mistake; None where there is nothing of its kind, or where it changes nothing."""
    lines = MUTANTS[name](lines_of(schedule), random.Random(seed), problem)
    if lines is None:
        return None
    found = schedule_of(lines, schedule)
    return None if found == schedule else found


THREE = (Sequence(5, 5, 6, 6), Sequence(0, 0, 2, 2), Sequence(8, 8, 8, 8))
GOLDEN = """\
schedule state cp_size 2 heads 1/1 saved -
forward rank 0
  step
    send state [0:2] [8:10] to 1 tag 0
    recv state [10:14] from 1 tag 0
  step
    scan 0 [0:2]
    scan 2 [8:10] [10:14] [14:16]
forward rank 1
  step
    send state [10:14] to 0 tag 0
    recv state [0:2] [8:10] from 0 tag 0
  step
    scan 0 [0:2] [2:5]
    scan 2 [8:10] [10:14]
"""


def messages(schedule: Schedule) -> int:
    return sum(len(step.sends) for ranks in (schedule.forward, schedule.backward) for steps in ranks for step in steps)


@settings(max_examples=examples(int(os.environ.get("CP_PLANS", "250"))), deadline=None)
@given(linear_problems(), st.integers(1, 40))
def test_random_problems_are_proved(problem: Problem, kernel_size: int) -> None:
    states, halo = make_states(problem), conv_schedule(problem, kernel_size)
    verify_states(problem, states)
    verify_tables(conv_workload(problem, kernel_size), halo)
    for schedule in (states, halo):
        assert Schedule.parse(str(schedule)) == schedule
        for rank, passes in enumerate(zip(schedule.forward, schedule.backward, strict=True)):
            for steps in passes:
                for message in (message for step in steps for message in step.sends):
                    row, column = divmod(message.peer, problem.a2a_size)
                    joined = problem.cp_comm_type != "a2a+p2p"
                    assert joined or rank // problem.a2a_size == row or rank % problem.a2a_size == column
            made = (
                make_rank_states(problem, rank)
                if schedule is states
                else conv_rank_schedule(problem, kernel_size, rank)
            )
            assert made == passes


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.one_in(3)
def test_wrong_schedules_are_found(name: str) -> None:
    tried = 0

    @settings(max_examples=examples(200, fast=15), deadline=None, derandomize=True, database=None)
    @given(linear_problems((2, 3, 4)), st.integers(0, 2**16))
    def each(problem: Problem, seed: int) -> None:
        nonlocal tried
        schedule = mutated(name, problem, make_states(problem), seed)
        if schedule is not None:
            tried += 1
            with pytest.raises(InvalidSchedule):
                verify_states(problem, schedule)

    each()
    assert tried > 2


def test_one_document_in_one_piece_sends_nothing() -> None:
    whole = ((0, 0, 0, 6), (1, 1, 0, 2), (1, 2, 0, 8))
    for problem in (
        Problem(2, THREE, qkv_format="thd", layout=whole),
        Problem(1, THREE, qkv_format="thd"),
        Problem(3, (Sequence(0, 0, 4, 4),), qkv_format="thd"),
    ):
        assert messages(make_states(problem)) == messages(conv_schedule(problem, 4)) == 0


def test_two_pieces_that_follow_on_each_other_on_one_rank_send_nothing() -> None:
    """Rows 0 to 2 lie behind rows 3 to 5 in the rank's buffer, so that these are two fragments."""
    problem = Problem(2, (Sequence(6, 6, 6, 6),), qkv_format="thd", layout=((0, 0, 3, 6), (0, 0, 0, 3)))
    assert len(document_fragments(problem)) == 2
    assert messages(make_states(problem)) == 0
    verify_states(problem, make_states(problem))


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_the_schedule_does_not_depend_on_the_schedule_of_attention(comm: str) -> None:
    size = 4 if comm == "a2a" else 1
    problem = Problem(4, THREE, comm, size, qkv_format="thd", heads_q=4, heads_kv=4)
    assert make_states(problem) == make_states(Problem(4, THREE, qkv_format="thd"))


def test_a_pair_of_groups_forwards() -> None:
    problem = Problem(4, (Sequence(16, 16, 16, 16),), "a2a+p2p", 2, "contiguous", "thd", heads_q=2, heads_kv=2)
    first, second, _ = make_states(problem).forward[2]
    assert [(m.peer, list(m.pieces.rows())) for m in first.recvs] == [(0, [(0, 4, 0, 1)])]
    assert [(m.peer, list(m.pieces.rows())) for m in second.sends] == [(3, [(0, 4, 0, 1), (8, 12, 0, 1)])]


def test_a_schedule_of_states_is_none_of_attention_and_the_reverse() -> None:
    problem = Problem(2, THREE, qkv_format="thd")
    with pytest.raises(InvalidSchedule, match=r"there is no kind 'state'"):
        verify(problem, make_states(problem))
    alone = Problem(1, THREE, qkv_format="thd")
    with pytest.raises(InvalidSchedule, match=r"a schedule of attention has no scans"):
        verify(alone, make_states(alone))
    with pytest.raises(InvalidSchedule, match=r"there is no kind 'kv'"):
        verify_states(problem, conv_schedule(problem, 4))
    with pytest.raises(InvalidSchedule, match=r"saves kv, but a schedule of states saves nothing"):
        verify_states(alone, replace(make_states(alone), saved=("kv",)))


def test_the_text() -> None:
    problem = Problem(2, THREE, qkv_format="thd")
    assert str(make_states(problem)).split("backward")[0] == GOLDEN
