"""Where rows lie: spans against sets of rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cp_fast.compile.index_tables import Key, Tables
from cp_fast.compile.row_spans import RowMap, Spans, SpanSets, subtract
from tests.cp_fast.compile.brute_force import spans


def rows(of: Spans) -> list[int]:
    return [row for start, stop in zip(of.start.tolist(), of.stop.tolist(), strict=True) for row in range(start, stop)]


@st.composite
def row_maps(draw: st.DrawFn) -> tuple[RowMap, dict[int, int]]:
    """A buffer, and the local row of each global row that it holds."""
    drawn = draw(spans())
    start, stop = drawn.start, drawn.stop
    order = np.array(draw(st.permutations(range(len(start)))), dtype=np.int64)
    gaps = np.array(draw(st.lists(st.integers(0, 2), min_size=len(start), max_size=len(start))), dtype=np.int64)
    start, stop = start[order], stop[order]
    size = stop - start
    row = np.cumsum(size + gaps) - size
    held = {
        a + n: r + n for a, b, r in zip(start.tolist(), stop.tolist(), row.tolist(), strict=True) for n in range(b - a)
    }
    return RowMap.at(Spans(start, stop), row), held


@given(row_maps(), spans(), st.randoms(use_true_random=False), st.booleans())
def test_locate(drawn: tuple[RowMap, dict[int, int]], wanted: Spans, random: np.random.Generator, mine: bool) -> None:
    """All rows of the spans that are in the buffer, by span, in any order of the spans; twice the same answer."""
    buffer, held = drawn
    if mine and len(buffer):  # the buffer's own spans, or the first part of each
        wanted = Spans(buffer.start, buffer.stop - (buffer.stop - buffer.start > 1))
    order = list(range(len(wanted)))
    random.shuffle(order)  # type: ignore[arg-type]
    wanted = Spans(wanted.start[order], wanted.stop[order])
    for asked in (wanted, wanted):
        located = buffer.locate(asked)
        got = [
            (number, start + n, row + n)
            for number, start, row, size in zip(
                *(x.tolist() for x in (located.number, located.start, located.row, located.count)), strict=True
            )
            for n in range(size)
        ]
        assert got == [
            (number, row, held[row])
            for number, (start, stop) in enumerate(zip(wanted.start.tolist(), wanted.stop.tolist(), strict=True))
            for row in range(start, stop)
            if row in held
        ]
        assert located.whole == (len(got) == wanted.total)
    assert buffer.covers(wanted) == (set(rows(wanted)) <= set(held))


@given(spans(), spans())
def test_sets_of_rows(one: Spans, other: Spans) -> None:
    assert rows(subtract(one, other)) == sorted(set(rows(one)) - set(rows(other)))
    assert one.total == len(rows(one))


@given(st.lists(spans(), max_size=6))
def test_equal_spans_are_one_object(asked: list[Spans]) -> None:
    sets = SpanSets()
    found = [sets.of(one.start.copy(), one.stop.copy()) for one in asked]
    assert all(rows(one) == rows(other) for one, other in zip(found, asked, strict=True))
    edges = [(one.start.tolist(), one.stop.tolist()) for one in asked]
    assert [[one is other for other in found] for one in found] == [[a == b for b in edges] for a in edges]


@given(st.lists(spans(), max_size=4), st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), max_size=3))
def test_tables(asked: list[Spans], lengths: list[list[int]]) -> None:
    """Rows and lengths are on the device what they are on the host; a request that is repeated gets the same key."""
    tables = Tables()
    found = [tables.rows(one.start, one.size) for one in asked]
    keys = [tables.lengths(np.array(x)) for x in lengths]
    assert [tables.rows(one.start.copy(), one.stop - one.start) for one in asked] == found
    assert [tables.lengths(np.array(x)) for x in lengths] == keys
    if not found and not keys:
        return
    uploaded = tables.on_device(tables.on_host(pinned=False)) if any(isinstance(k, Key) for k in found) else None
    for key, wanted in zip(found, asked, strict=True):
        assert tables.numbers(key).tolist() == rows(wanted)
        if isinstance(key, Key):
            assert uploaded is not None
            assert uploaded.rows(key).tolist() == rows(wanted)  # type: ignore[union-attr]
            assert rows(wanted) != list(range(rows(wanted)[0], rows(wanted)[0] + len(rows(wanted))))
    for key, wanted in zip(keys, lengths, strict=True):
        cumulative = [sum(wanted[:n]) for n in range(len(wanted) + 1)]
        assert tables.cumulative(key).tolist() == cumulative
        if uploaded is not None:
            host, device = uploaded.lengths(key)
            assert (list(host), device.tolist(), host.longest) == (cumulative, cumulative, max(wanted))
