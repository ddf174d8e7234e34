"""Sequences as columns are a tuple of `Sequence` to everybody who asks; problems are compared by fingerprint."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_ref.contract.group import agree
from cp_ref.schedules.problem import Problem, Sequence, Sequences
from tests.spec.problems import problems

LENGTHS = st.lists(st.tuples(*[st.integers(0, 99)] * 4), max_size=5)


@given(LENGTHS)
def test_columns_are_a_tuple_to_everybody(lengths: list[tuple[int, int, int, int]]) -> None:
    plain = tuple(Sequence(*x) for x in lengths)
    columns = Sequences(*(zip(*lengths, strict=True) if lengths else ((), (), (), ())))
    assert columns == plain
    assert plain == columns
    assert hash(columns) == hash(plain)
    assert list(columns) == list(plain)
    assert columns[1:] == plain[1:]
    assert repr(columns) == repr(plain)
    assert Problem(2, columns) == Problem(2, plain)
    assert str(Problem(2, columns)) == str(Problem(2, plain))
    assert Problem(2, columns).fingerprint == Problem(2, plain).fingerprint


@given(problems(), problems())
def test_fingerprints_are_equal_exactly_for_equal_problems(one: Problem, other: Problem) -> None:
    assert (one.fingerprint == other.fingerprint) == (one == other)
    assert Problem.parse(str(one)).fingerprint == one.fingerprint


@given(problems().filter(lambda p: len(p.sequences) > 0), st.integers(0, 3))
def test_one_length_changes_the_fingerprint(problem: Problem, which: int) -> None:
    first, *rest = problem.sequences
    name = ("len_q", "len_kv", "slots_q", "slots_kv")[which]
    changed = replace(problem, sequences=(replace(first, **{name: getattr(first, name) + 1}), *rest))
    assert changed.fingerprint != problem.fingerprint


class _Everyone:
    """Rank 0 of a group where the other rank says what it is told to."""

    rank, size = 0, 2

    def __init__(self, *said: object) -> None:
        self.said = list(said)

    def exchange(self, sends: object, recvs: object) -> object:
        raise AssertionError("nothing is sent")

    def all_gather_object(self, value: object) -> list[object]:
        return [value, self.said.pop(0)]


def test_ranks_that_agree_compare_fingerprints_alone() -> None:
    problem = Problem(2, (Sequence(8, 8, 8, 8),))
    agree(_Everyone(((problem.fingerprint, ()), None)), problem, None)  # type: ignore[arg-type]


def test_ranks_that_differ_are_told_where() -> None:
    mine, other = Problem(2, (Sequence(8, 8, 8, 8),)), Problem(2, (Sequence(8, 8, 8, 8),), softcap=2.0)
    with pytest.raises(ValueError, match=r"rank 0 has .* where rank 1 has softcap=2.0"):
        agree(_Everyone(((other.fingerprint, ()), None), str(other)), mine, None)  # type: ignore[arg-type]
