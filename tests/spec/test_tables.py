"""The tables of a problem against their definitions, pair by pair and row by row; their texts and pictures."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.tensors import DiagonalBand
from cp_ref.groups.agreement import agreed
from cp_ref.schedules.areas import UNBOUNDED, Areas
from cp_ref.schedules.ownership import Fragments, Ownership, contiguous, dual_chunk, grouped
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence, Sequences, slice_rows
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.proof import verify
from cp_ref.show.text_pictures import areas_picture, ownership_picture
from tests.spec.problems import problems, small_problems

EDGES = st.integers(-9, 9)
AREAS = st.lists(
    st.builds(
        lambda q, m, k, n, lo, hi: (q, q + m, k, k + n, lo, hi),
        *[st.integers(0, 9)] * 4,
        st.just(-UNBOUNDED) | EDGES,
        st.just(UNBOUNDED) | EDGES,
    ),
    max_size=4,
).map(Areas.of_rows)


def visible(areas: Areas) -> list[tuple[int, int]]:
    """Every pair of every area, as often as it is in one."""
    return [
        (i, j)
        for q0, q1, k0, k1, lo, hi in areas.rows()
        for i in range(q0, q1)
        for j in range(k0, k1)
        if lo <= j - i <= hi
    ]


def defined(problem: Problem) -> set[tuple[int, int]]:
    """The visible pairs of a problem in rows of the packed buffers, from the definition of its mask."""
    found: set[tuple[int, int]] = set()
    left, right = problem.window_size
    for n, s in enumerate(problem.sequences):
        shift = s.len_kv - s.len_q if problem.attn_mask_type.endswith("bottom_right") else 0
        for i in range(s.len_q):
            for j in range(s.len_kv):
                aligned = i + shift  # the key that this query is aligned to
                hidden = "causal" in problem.attn_mask_type and j > aligned
                hidden |= left >= 0 and j < aligned - left
                hidden |= right >= 0 and "causal" not in problem.attn_mask_type and j > aligned + right
                if not hidden:
                    found.add((problem.starts_q[n] + i, problem.starts_kv[n] + j))
    return found


@given(small_problems(cp_sizes=(1, 2, 3)))
def test_areas_are_the_masks_definition(problem: Problem) -> None:
    areas = problem.workload.areas
    pairs = visible(areas)
    assert len(pairs) == len(set(pairs)), "areas have a pair in common"
    assert set(pairs) == defined(problem)
    assert problem.pairs == len(pairs)
    for q0, q1, k0, k1, lo, hi in areas.rows():  # cropped: no row or column without a pair
        assert {i for i, j in pairs if k0 <= j < k1 and q0 <= i < q1} == set(range(q0, q1)), (lo, hi)
        assert {j for i, j in pairs if q0 <= i < q1 and k0 <= j < k1} == set(range(k0, k1))


@given(AREAS)
def test_areas_count_their_pairs_and_read_back(areas: Areas) -> None:
    assert areas.pairs.tolist() == [len(visible(areas.take(slice(n, n + 1)))) for n in range(len(areas))]
    assert Areas.parse(str(areas)) == areas


@given(AREAS)
def test_windows_of_areas_are_aligned_to_their_last_row_and_column(areas: Areas) -> None:
    for (_, q1, _, k1, lo, hi), left, right in zip(
        areas.rows(), areas.left.tolist(), areas.right.tolist(), strict=True
    ):
        if lo > -UNBOUNDED:
            assert (q1 - 1) + lo == (k1 - 1) - left
        else:
            assert left == -1
        if hi < UNBOUNDED:
            assert (q1 - 1) + hi == (k1 - 1) + right
        else:
            assert right == -1


@pytest.mark.parametrize("text", ["area q[0:4] k[0:4]", "area q[0:4] k[0:4] band 0", "area q[0:4] k[0:-4] band *:0"])
def test_texts_that_are_no_areas(text: str) -> None:
    with pytest.raises(ValueError, match="is no area"):
        Areas.parse(text)


@given(problems())
def test_every_slot_has_one_owner_and_buffers_are_equal(problem: Problem) -> None:
    for side, starts in (("q", problem.starts_q), ("kv", problem.starts_kv)):
        slots = problem.slots.side(side)
        rows = [row for _, start, stop, _ in slots.rows() for row in range(start, stop)]
        assert sorted(rows) == list(range(starts[-1]))
        for rank in range(problem.cp_size):
            local = [
                row for _, start, stop, first in slots.of(rank).rows() for row in range(first, first + stop - start)
            ]
            batch = 1 if problem.qkv_format == "thd" else len(problem.sequences)
            assert local == sorted(set(local))
            assert all(row < slice_rows(problem, side) * batch for row in local)
            if problem.qkv_format == "thd" or problem.layout == "balanced":
                assert local == list(range(len(local)))  # the tail comes last


@given(problems())
def test_real_tokens_lie_where_their_slots_are(problem: Problem) -> None:
    for side, starts in (("q", problem.starts_q), ("kv", problem.starts_kv)):
        lengths = [s.len_q if side == "q" else s.len_kv for s in problem.sequences]
        real = {start + n for start, length in zip(starts, lengths, strict=False) for n in range(length)}
        slots, owned = (_by_row(x) for x in (problem.slots.side(side), problem.workload.ownership.side(side)))
        assert owned == {row: place for row, place in slots.items() if row in real}


def _by_row(fragments: Fragments) -> dict[int, tuple[int, int]]:
    """Global row -> (rank, row of its buffer)."""
    return {start + n: (rank, row + n) for rank, start, stop, row in fragments.rows() for n in range(stop - start)}


@given(problems())
def test_ownership_reads_back(problem: Problem) -> None:
    ownership = problem.workload.ownership
    assert Ownership.parse(str(ownership)) == ownership


@pytest.mark.parametrize("text", ["", "ownership", "ownership cp_size 2\nrank 0 x[0:2] row 0"])
def test_texts_that_are_no_ownership(text: str) -> None:
    with pytest.raises(ValueError, match=r"an ownership begins with|is no fragment"):
        Ownership.parse(text)


LENGTHS, RANKS = st.lists(st.integers(0, 5), max_size=4), st.integers(1, 6)


@given(LENGTHS, RANKS)
def test_dual_chunk_gives_a_rank_an_early_chunk_and_the_late_one_that_mirrors_it(
    lengths: list[int], ranks: int
) -> None:
    starts = np.append(0, np.cumsum(np.array(lengths, dtype=np.int64) * 2 * ranks))
    owners = _by_row(dual_chunk(starts, ranks))
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        chunk = max((stop - start) // (2 * ranks), 1)
        for row in range(start, stop):
            number = (row - start) // chunk
            assert owners[row][0] == min(number, 2 * ranks - 1 - number)


@given(LENGTHS, RANKS)
def test_contiguous_gives_a_rank_one_part_of_every_stretch(lengths: list[int], ranks: int) -> None:
    starts = np.append(0, np.cumsum(np.array(lengths, dtype=np.int64) * ranks))
    owners = _by_row(contiguous(starts, ranks))
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        for row in range(start, stop):
            assert owners[row][0] == (row - start) * ranks // (stop - start)


@given(LENGTHS, st.sampled_from([(2, 1), (2, 2), (4, 2), (6, 3), (6, 6)]))
def test_groups_own_what_their_ranks_own(lengths: list[int], sizes: tuple[int, int]) -> None:
    ranks, size = sizes
    fragments = dual_chunk(np.append(0, np.cumsum(np.array(lengths, dtype=np.int64) * 2 * ranks)), ranks)
    single, group = _by_row(fragments), _by_row(grouped(fragments, size))
    assert {row: member for row, (member, _) in group.items()} == {
        row: rank // size for row, (rank, _) in single.items()
    }
    for member in range(ranks // size):
        assert [place[1] for _, place in sorted(group.items()) if place[0] == member] == list(
            range(sum(u == member for u, _ in group.values()))
        )


@given(AREAS)
def test_pictures_of_areas_show_each_pair(areas: Areas) -> None:
    last = {pair: number for number, area in enumerate(areas.rows()) for pair in visible(Areas.of_rows([area]))}
    first, _, *lines = areas_picture(areas).splitlines()
    assert first.endswith("a cell is 1 x 1")
    cells = [line[7:].split(" ") for line in lines]
    shown = {(i, j) for i, row in enumerate(cells) for j, cell in enumerate(row) if cell not in (".", "")}
    assert shown == set(last)


@given(small_problems())
def test_pictures_of_ownership_show_each_owner(problem: Problem) -> None:
    ownership = problem.workload.ownership
    lines = ownership_picture(ownership, width=500).splitlines()
    for side, line in (("q", lines[1]), ("kv", lines[4])):
        shown = dict(enumerate(line[32:].split()))
        assert {n: int(rank) for n, rank in shown.items() if rank != "."} == {
            row: rank for row, (rank, _) in _by_row(ownership.side(side)).items()
        }


def test_pictures_keep_to_their_width() -> None:
    areas = Areas.of_rows([(0, 5000, 0, 7000, -UNBOUNDED, 0)])
    picture = areas_picture(areas, width=60)
    assert max(map(len, picture.splitlines())) <= 60
    assert "a cell is 500 x 500" in picture
    strip = ownership_picture(Ownership(2, *[dual_chunk(np.array([0, 4000]), 2)] * 2), width=80)
    assert max(map(len, strip.splitlines())) <= 80


ROWS_OF_LENGTHS = st.lists(st.tuples(*[st.integers(0, 99)] * 4), max_size=5)


@given(ROWS_OF_LENGTHS)
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
    everyone = _Everyone(((problem.fingerprint, ()), None))
    assert agreed([everyone], "a plan", lambda: problem, lambda found: found) is problem  # type: ignore[list-item]


def test_ranks_that_differ_are_told_where() -> None:
    mine, other = Problem(2, (Sequence(8, 8, 8, 8),)), Problem(2, (Sequence(8, 8, 8, 8),), softcap=2.0)
    everyone = _Everyone(((other.fingerprint, ()), None), str(other))
    with pytest.raises(ValueError, match=r"rank 0 has .* where rank 1 has softcap=2.0"):
        agreed([everyone], "a plan", lambda: mine, lambda found: found)  # type: ignore[list-item]


sides = st.one_of(st.none(), st.integers(-9, 9))


@given(sides, sides, st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))
def test_row(lo: int | None, hi: int | None, i: int, first: int, size: int) -> None:
    start, stop = DiagonalBand(lo, hi).row(i, first, first + size)
    seen = {j for j in range(first, first + size) if (lo is None or lo <= j - i) and (hi is None or j - i <= hi)}
    assert set(range(start, stop)) == seen


# ---- the schedules of eleven problems, letter by letter: a change of one is a change of what travels or is computed.
# Write them anew with CP_GOLDEN=write, and read the difference.


FOLDER = Path(__file__).parent / "golden"


def same(*lengths: int) -> tuple[Sequence, ...]:
    return tuple(Sequence(n, n, n, n) for n in lengths)


def padded(*pairs: tuple[int, int]) -> tuple[Sequence, ...]:
    return tuple(Sequence(n, n, slots, slots) for n, slots in pairs)


CAUSAL = "padding_causal"
PROBLEMS = {
    "p2p_causal_cp4": Problem(4, same(16), qkv_format="thd"),
    "p2p_no_mask_cp3": Problem(3, same(12, 6), qkv_format="thd", attn_mask_type="no_mask"),
    "p2p_window_halo_cp4": Problem(4, same(32), qkv_format="thd", window_size=(3, 0)),
    "p2p_contiguous_documents_cp3": Problem(3, same(9, 6, 3), qkv_format="thd", layout="contiguous"),
    "p2p_padding_cp2": Problem(2, padded((5, 8), (0, 4), (4, 4)), qkv_format="thd", attn_mask_type=CAUSAL),
    "all_gather_causal_cp3": Problem(3, same(12), "all_gather", qkv_format="thd"),
    "all_gather_cross_bottom_right_cp2": Problem(
        2, (Sequence(4, 8, 4, 8),), "all_gather", qkv_format="sbhd", attn_mask_type="causal_bottom_right"
    ),
    "a2a_gqa_cp2": Problem(2, same(8), "a2a", 2, heads_q=4, heads_kv=2),
    "a2a_replicated_kv_window_cp4": Problem(4, same(16), "a2a", 4, window_size=(5, 0), heads_q=8, heads_kv=2),
    "a2a_p2p_causal_cp4": Problem(4, same(16), "a2a+p2p", 2, heads_q=2, heads_kv=2),
    "a2a_head_chunks_cp2": Problem(2, same(8), "a2a", 2, heads_q=16, heads_kv=8),
}
HEAD_CHUNKS = {"a2a_head_chunks_cp2": (1, 2, 1)}


@pytest.mark.parametrize("name", PROBLEMS)
def test_golden(name: str) -> None:
    problem, path = PROBLEMS[name], FOLDER / f"{name}.txt"
    schedule = make_schedule(problem, head_chunks=HEAD_CHUNKS.get(name, ()))
    verify(problem, schedule)
    text = f"{problem}\n{schedule}"
    if os.environ.get("CP_GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    assert Schedule.parse(text.split("\n", 1)[1]) == schedule
