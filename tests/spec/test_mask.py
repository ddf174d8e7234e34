"""The band's arithmetic against counting, on all small rectangles that Hypothesis can think of."""

from hypothesis import given
from hypothesis import strategies as st

from cp_ref.spec import Band, Rect

sides = st.one_of(st.none(), st.integers(-9, 9))
bands = st.builds(Band, sides, sides)
rects = st.tuples(*[st.integers(0, 8)] * 4).map(lambda t: Rect(t[0], t[0] + t[1], t[2], t[2] + t[3]))


def visible(band: Band, rect: Rect) -> set[tuple[int, int]]:
    return {(i, j) for i in range(rect.q0, rect.q1) for j in range(rect.k0, rect.k1) if band.visible(i, j)}


@given(bands, rects)
def test_count(band: Band, rect: Rect) -> None:
    assert band.count(rect) == len(visible(band, rect))


@given(bands, rects)
def test_crop_is_the_bounding_box_of_what_is_visible(band: Band, rect: Rect) -> None:
    pairs = visible(band, rect)
    if not pairs:
        assert band.crop(rect) is None
    else:
        rows, columns = {i for i, _ in pairs}, {j for _, j in pairs}
        assert band.crop(rect) == Rect(min(rows), max(rows) + 1, min(columns), max(columns) + 1)


@given(bands, rects)
def test_full(band: Band, rect: Rect) -> None:
    if rect.area:
        assert band.full(rect) == (len(visible(band, rect)) == rect.area)


@given(bands, rects)
def test_row(band: Band, rect: Rect) -> None:
    for i in range(rect.q0, rect.q1):
        start, stop = band.row(i, rect.k0, rect.k1)
        assert set(range(start, stop)) == {j for q, j in visible(band, rect) if q == i}
