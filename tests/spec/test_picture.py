"""Pictures: exact text on small cases, and SVG whose polygons have the area that the problem says is visible."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_ref.schedules.areas import UNBOUNDED
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Schedule, Step, Tiles
from cp_ref.show.picture_plane import Box, Point, band_edge, centre, few_colours, plane, staircase
from cp_ref.show.svg_pictures import rank_colour, svg_picture
from cp_ref.show.text_pictures import text_picture

SVG = "{http://www.w3.org/2000/svg}"


def packed(
    lengths: list[int], cp_size: int, mask: str = "padding_causal", window: tuple[int, int] = (-1, -1)
) -> Problem:
    """A thd problem, each sequence padded to a multiple of 2 * cp_size."""
    slots = [-(-n // (2 * cp_size)) * 2 * cp_size for n in lengths]
    sequences = tuple(Sequence(n, n, s, s) for n, s in zip(lengths, slots, strict=True))
    return Problem(
        cp_size=cp_size,
        sequences=sequences,
        qkv_format="thd",
        attn_mask_type=mask,
        window_size=window,
        heads_q=4,
        heads_kv=2,
    )


def text(problem: Problem, **options: object) -> str:
    return text_picture(problem, make_schedule(problem), **options)  # type: ignore[arg-type]


def test_window_with_padding() -> None:
    assert text(packed([7], 2, window=(2, 0))).splitlines()[1:12] == [
        "7 queries x 7 keys in 8 x 8 slots; a cell is one query x one key",
        "",
        "        key   0   1   2   3   4   5   6   7",
        "      owner   0   0   1   1   1   1   0   0",
        "query       ┌────────────────────────────────",
        "    0     0 │0:0  .   .   .   .   .   .   .",
        "    1     0 │0:0 0:0  .   .   .   .   .   .",
        "    2     1 │1:1 1:1 1:0  .   .   .   .   .",
        "    3     1 │ .  1:1 1:0 1:0  .   .   .   .",
        "    4     1 │ .   .  1:0 1:0 1:0  .   .   .",
        "    5     1 │ .   .   .  1:0 1:0 1:0  .   .",
    ]


def test_all_sequences_lie_on_the_diagonal() -> None:
    assert text(packed([4, 3], 2), sequence="all").splitlines()[1:14] == [
        "2 sequences on the diagonal, 8 query slots x 8 key slots; a cell is one query x",
        "one key",
        "",
        "        key   0   1   2   3   4   5   6   7",
        "      owner   0   1   1   0   0   1   1   0",
        "query       ┌────────────────────────────────",
        "    0     0 │0:0  .   .   .",
        "    1     1 │1:1 1:0  .   .",
        "    2     1 │1:1 1:0 1:0  .",
        "    3     0 │0:0 0:1 0:1 0:0",
        "    4     0 │                0:0  .   .   .",
        "    5     1 │                1:1 1:0  .   .",
        "    6     1 │                1:1 1:0 1:0  .",
    ]


def test_cells_hold_whole_chunks_where_they_are_scaled_down() -> None:
    lines = text(Problem(cp_size=4, sequences=(Sequence(800, 800, 800, 800),)), width=60).splitlines()
    assert lines[1].endswith("a cell is 100 queries x 100 keys")
    assert lines[3] == "        key   0  100 200 300 400 500 600 700"
    assert lines[-4] == "  700     0 │0:0 0:3 0:2 0:1 0:1 0:2 0:3 0:0"


def test_the_longest_sequence_is_the_default_and_any_can_be_chosen() -> None:
    problem = packed([4, 9, 3], 2)
    assert "sequence 1 of 3 (numbered from 0): 9 queries x 9 keys in 12 x 12 slots" in text(problem)
    assert "sequence 2 of 3 (numbered from 0): 3 queries" in text(problem, sequence=2)
    with pytest.raises(ValueError, match="sequence is 3; the problem has sequences 0 to 2"):
        text(problem, sequence=3)


@pytest.mark.parametrize("width", [40, 80, 137])
def test_it_keeps_to_the_width(width: int) -> None:
    problem = packed([5000, 77, 1, 0, 1234], 16)
    for sequence in (None, "all"):
        assert max(map(len, text(problem, sequence=sequence, width=width).splitlines())) <= width


def test_nothing_to_draw() -> None:
    for problem in (packed([], 2), packed([0], 2), packed([0, 0], 1)):
        assert "R:S" in text(problem)
        assert "R:S" in text(problem, sequence="all")
        ET.fromstring(svg_picture(problem, make_schedule(problem)))


def test_heads_spread_over_the_ranks() -> None:
    problem = Problem(cp_size=2, sequences=(Sequence(4, 4, 4, 4),), attn_mask_type="no_mask", heads_q=2, heads_kv=2)
    rank_schedules = tuple((Step(tiles=Tiles.of_rows([(0, 0, 4, 0, 4, rank, rank + 1)])),) for rank in range(2))
    schedule = Schedule("a2a", (2, 2), rank_schedules, rank_schedules)
    for head in (0, 1):
        picture = text_picture(problem, schedule, head=head)
        assert f"{head}:0" in picture
        assert f"{1 - head}:0" not in picture
        assert f"query head {head}." in picture
        assert f"query head {head} shown" in svg_picture(problem, schedule, head=head)


SIDES = st.integers(-9, 9)
BOXES = st.builds(
    lambda q, m, k, n, lo, hi: Box(q, q + m, k, k + n, lo, hi),
    *[st.integers(0, 9)] * 4,
    st.just(-UNBOUNDED) | SIDES,
    st.just(UNBOUNDED) | SIDES,
)


@given(BOXES)
def test_boxes_by_counting(box: Box) -> None:
    seen = {(i, j) for i in range(box.q0, box.q1) for j in range(box.k0, box.k1) if box.lo <= j - i <= box.hi}
    assert box.pairs == len(seen)
    assert box.full == (len(seen) == box.size) or not box.size
    for i in range(box.q0, box.q1):
        assert set(range(*box.row(i))) == {j for q, j in seen if q == i}
    cropped = box.cropped()
    if seen:
        rows, columns = {i for i, _ in seen}, {j for _, j in seen}
        assert cropped[:4] == (min(rows), max(rows) + 1, min(columns), max(columns) + 1)
    elif box.lo <= box.hi:
        assert not cropped.size
    moved = box.moved(3, 5)
    assert (moved.pairs, moved.size) == (box.pairs, box.size)
    assert moved.moved(-3, -5) == box


def area(outline: list[Point]) -> float:
    """The area of a polygon."""
    edges = zip(outline, outline[1:] + outline[:1], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in edges)) / 2


@given(BOXES)
def test_outlines_have_the_area_of_the_visible_pairs(box: Box) -> None:
    if not box.pairs:
        return
    cropped = box.cropped()
    stairs = staircase(cropped)
    assert area(stairs) == box.pairs
    assert (
        len(set(stairs)) == len(stairs) or box.lo == box.hi
    )  # a diagonal band one pair wide touches itself at its corners
    smooth = band_edge(cropped)
    assert abs(area(smooth) - box.pairs) <= 0.5  # 1/8 for each corner that is cut
    x, y = centre(smooth)
    assert cropped.k0 < x < cropped.k1
    assert cropped.q0 < y < cropped.q1


@pytest.mark.parametrize(
    "problem",
    [
        packed([700, 33, 1, 0, 1200], 4),
        packed([700, 33, 1, 0, 1200], 3, window=(100, 20), mask="padding"),
        packed([64, 40], 2, mask="no_mask"),
        packed([30], 2),
        Problem(cp_size=8, sequences=(Sequence(320, 1600, 320, 1600),), attn_mask_type="causal_bottom_right"),
        Problem(cp_size=4, sequences=(Sequence(512, 512, 512, 512),) * 3, qkv_format="sbhd", layout="contiguous"),
        Problem(cp_size=24, sequences=(Sequence(960, 960, 960, 960),)),
        Problem(cp_size=64, sequences=(Sequence(4096, 4096, 4096, 4096),), window_size=(700, 0)),
        packed([2000, 900], 20),
    ],
    ids=str,
)
@pytest.mark.one_in(3)
def test_svg_covers_what_is_visible(problem: Problem) -> None:
    schedule = make_schedule(problem)
    root = ET.fromstring(svg_picture(problem, schedule))
    shown = range(1 if problem.qkv_format != "thd" else len(problem.sequences))
    rows = sum(problem.sequences[s].slots_q for s in shown)
    columns = sum(problem.sequences[s].slots_kv for s in shown)
    areas = problem.workload.areas
    pairs = int(areas.pairs[areas.q_stop <= rows].sum())  # the sequences that are shown are the first ones
    scale = 640 / max(rows, columns)
    per_pair = max(rows * scale, 160) / rows * max(columns * scale, 160) / columns
    polygons = [
        [(float(x), float(y)) for x, y in (point.split(",") for point in polygon.attrib["points"].split())]
        for polygon in root.iter(f"{SVG}polygon")
        if polygon.attrib["class"] == "tile"
    ]
    view = few_colours(plane(problem, schedule, shown), problem.cp_size)
    assert len(polygons) == len(view.parts)
    assert sum(map(area, polygons)) / per_pair == pytest.approx(pairs, rel=0.005)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    corners: list[Point] = [point for polygon in polygons for point in polygon]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in corners)


def test_svg_names_its_tiles_and_ranks() -> None:
    problem = packed([29, 11], 2)
    picture = svg_picture(problem, make_schedule(problem))
    titles = [t.text for t in ET.fromstring(picture).iter(f"{SVG}title")]
    assert "rank 0 step 0: tile 0 q[0:8] k[0:8], 36 of 64 pairs visible" in titles
    assert "rank 1 owns slots 8 to 15, 8 of them tokens" in titles
    assert "sequence 1: 11 queries x 11 keys in 12 x 12 slots" in titles
    for words in ("p2p, cp_size 2, thd, dual_chunk, padding_causal", "4 query heads over 2, d 8, float32", "padding"):
        assert f">{words}<" in picture or words in picture
    assert rank_colour(0) in picture
    assert rank_colour(1, 1, 2) in picture


def test_many_ranks_share_few_colours_and_a_small_file() -> None:
    problem = Problem(cp_size=64, sequences=(Sequence(65536, 65536, 65536, 65536),), heads_q=32, heads_kv=8)
    picture = svg_picture(problem, make_schedule(problem))
    assert len(picture) < 60_000
    tiles = [one for one in ET.fromstring(picture).iter(f"{SVG}polygon") if one.attrib["class"] == "tile"]
    assert len({one.attrib["fill"] for one in tiles}) == 8
    assert len(tiles) < 200
    assert ">24-31<" in picture
    titles = [t.text or "" for t in ET.fromstring(picture).iter(f"{SVG}title")]
    assert any(title.startswith("ranks 56-63: all steps, ") for title in titles)


def test_colours_differ() -> None:
    colours = {rank_colour(rank) for rank in range(64)}
    assert len(colours) == 64
    assert all(len(c) == 7 and int(c[1:], 16) >= 0 for c in colours)
