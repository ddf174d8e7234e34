"""Where rows lie: spans against sets of rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from cp_fast.compile.buffers import Buffers, Operands, Sums, message_parts
from cp_fast.compile.index_tables import Key, RowKey, Tables
from cp_fast.compile.program import Heads, View
from cp_fast.tiles.row_spans import Placement, SpanSets
from cp_ref.schedules.schedule import Message, Pieces, Step
from cp_ref.schedules.table import Spans
from tests.cp_fast.compile.brute_force import spans

# ---- Spans and placements


def rows(of: Spans) -> list[int]:
    return [row for start, stop in zip(of.start.tolist(), of.stop.tolist(), strict=True) for row in range(start, stop)]


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, dict[int, int]]:
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
    return Placement(Spans(start, stop), row), held


@given(placements(), spans(), st.randoms(use_true_random=False), st.booleans())
def test_find(drawn: tuple[Placement, dict[int, int]], wanted: Spans, random: np.random.Generator, mine: bool) -> None:
    """All rows of the spans that are in the buffer, by span, in any order of the spans; twice the same answer."""
    buffer, held = drawn
    if mine and held:  # the buffer's own spans, or the first part of each
        start, stop, _ = buffer.ascending
        wanted = Spans(start, stop - (stop - start > 1))
    order = list(range(len(wanted)))
    random.shuffle(order)  # type: ignore[arg-type]
    wanted = Spans(wanted.start[order], wanted.stop[order])
    for asked in (wanted, wanted):
        found = buffer.find(asked)
        got = [
            (number, start + n, row + n)
            for number, start, row, size in zip(
                *(x.tolist() for x in (found.span, found.start, found.row, found.count)), strict=True
            )
            for n in range(size)
        ]
        assert got == [
            (number, row, held[row])
            for number, (start, stop) in enumerate(zip(wanted.start.tolist(), wanted.stop.tolist(), strict=True))
            for row in range(start, stop)
            if row in held
        ]
        assert found.whole == (len(got) == wanted.total)
    assert buffer.covers(wanted) == (set(rows(wanted)) <= set(held))


@given(spans(), spans())
def test_sets_of_rows(one: Spans, other: Spans) -> None:
    assert rows(one.minus(other)) == sorted(set(rows(one)) - set(rows(other)))
    assert one.total == len(rows(one))
    both = SpanSets().joined([one, other])
    assert rows(both.merged()) == sorted(set(rows(both)))
    assert both.disjoint == (len(rows(both)) == len(set(rows(both))))


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


# ---- Buffers and sums
#
# Which buffer has the rows that a step needs, and where partial results go: cell by cell, by brute force.


Cell = tuple[int, int]  # a global row and a head
HEADS = 4


@st.composite
def head_ranges(draw: st.DrawFn) -> Heads:
    first = draw(st.integers(0, HEADS - 1))
    return first, draw(st.integers(first + 1, HEADS))


def cells(of: Spans, heads: Heads) -> list[list[Cell]]:
    """Rows of cells, span after span."""
    edges = zip(of.start.tolist(), of.stop.tolist(), strict=True)
    return [[(row, head) for head in range(*heads)] for start, stop in edges for row in range(start, stop)]


@st.composite
def shuffled(draw: st.DrawFn, end: int = 20) -> Spans:
    """Disjoint spans in any order."""
    drawn = draw(spans(end, 4))
    order = np.array(draw(st.permutations(range(len(drawn)))), dtype=np.int64)
    return Spans(drawn.start[order], drawn.stop[order])


@dataclass
class Filled:
    """Operands, and what lies in their buffers."""

    operands: Operands
    contents: dict[int, list[list[Cell]]]

    def rows(self, view: View[RowKey]) -> list[int]:
        assert view.rows is not None
        return self.operands.tables.numbers(view.rows).tolist()

    def read(self, view: View[RowKey]) -> list[list[Cell]]:
        assert 0 <= view.heads[0] < view.heads[1]
        return [self.contents[view.buffer][row][slice(*view.heads)] for row in self.rows(view)]


@st.composite
def filled(draw: st.DrawFn) -> Filled:
    """A few buffers of two kinds, each with rows and heads of its own."""
    made = Filled(Operands(Buffers(), Tables(), SpanSets()), {})
    for number in range(draw(st.integers(0, 4))):
        held, heads = draw(shuffled()), draw(st.one_of(st.just((0, HEADS)), head_ranges()))
        if len(held):
            kind = draw(st.sampled_from(["q", "q", "q", "kv"]))
            buffer = made.operands.new(f"{number}", kind, heads, Placement.packed(held), held.total)
            made.operands.held.append(buffer)
            made.contents[buffer.number] = cells(held, heads)
    return made


@given(filled(), shuffled(), head_ranges())
def test_holder(made: Filled, wanted: Spans, heads: Heads) -> None:
    """The newest buffer of the kind that has all rows and heads, or none."""
    want = cells(wanted, heads)

    def has_all(number: int) -> bool:
        spec = made.operands.buffers.specs[number]
        there = {cell for row in made.contents[number] for cell in row}
        inside = spec.heads[0] <= heads[0] and heads[1] <= spec.heads[1]
        return spec.kind == "q" and inside and {cell for row in want for cell in row} <= there

    having = [held.number for held in made.operands.held if has_all(held.number)]
    held = made.operands.holder("q", heads, wanted)
    event("found" if held else "not found")
    assert (held.number if held else None) == (having[-1] if having else None)
    if held:
        assert made.read(made.operands.view(held, wanted, heads)) == want


@given(filled(), st.lists(shuffled(), min_size=1, max_size=3), head_ranges())
def test_gather(made: Filled, parts: list[Spans], heads: Heads) -> None:
    """All rows of all parts in one new buffer, each once, in the order of the global rows; or an error that names the
    rows that are nowhere.
    """
    specs, before = made.operands.buffers.specs, dict(made.contents)
    want = sorted({tuple(row) for part in parts for row in cells(part, heads)})
    if not want:
        return
    there = {cell for number, rows in before.items() for row in rows for cell in row if specs[number].kind == "q"}
    if not {cell for row in want for cell in row} <= there:
        event("rows that are nowhere")
        with pytest.raises(ValueError, match=r"needs q rows \d+:\d+ at step 3, which are not there"):
            made.operands.gather("q", heads, parts, step=3)
        return
    held, copies = made.operands.gather("q", heads, parts, step=3)
    assert held is made.operands.held[-1] is made.operands.holder("q", heads, parts[0])
    spec = specs[held.number]
    assert (spec.kind, spec.heads, spec.rows, spec.role) == ("q", heads, len(want), "operand")
    filled: list[list[Cell | None]] = [[None] * (heads[1] - heads[0]) for _ in want]
    for copy in copies:
        assert copy.target.buffer == held.number
        for row, values in zip(made.rows(copy.target), made.read(copy.source), strict=True):
            assert filled[row][slice(*copy.target.heads)] == [None] * len(values), "a cell is copied twice"
            filled[row][slice(*copy.target.heads)] = values
    assert [tuple(row) for row in filled] == want


@st.composite
def outgoing(draw: st.DrawFn) -> list[Step]:
    """Steps that send partial results; each message has pieces of several ranges of heads."""
    steps: list[Step] = []
    for number in range(draw(st.integers(0, 4))):
        messages: list[Message] = []
        used: set[Cell] = set()
        for peer in range(draw(st.integers(0, 2))):
            rows: list[tuple[int, ...]] = []
            for _ in range(draw(st.integers(1, 2))):
                some, heads = draw(spans(20, 3)), draw(head_ranges())
                here = {cell for row in cells(some, heads) for cell in row}
                if here and not here & used:  # results leave a rank once
                    used |= here
                    rows += [(a, b, *heads) for a, b in zip(some.start.tolist(), some.stop.tolist(), strict=True)]
            if rows:
                kind = draw(st.sampled_from(["out", "out", "dq"]))
                messages.append(Message(kind, peer + 1, 6 * number + peer, Pieces.of_rows(rows)))
        steps.append(Step(tuple(messages)))
    return steps


@given(
    outgoing(), shuffled(), shuffled(), st.lists(st.tuples(head_ranges(), shuffled()), max_size=3), st.integers(-1, 3)
)
def test_accumulates(steps: list[Step], own: Spans, more: Spans, parts: list[tuple[Heads, Spans]], step: int) -> None:
    """Every cell of a partial result goes into the next message that takes it along, or into a local sum; once."""
    buffers, tables, sets = Buffers(), Tables(), SpanSets()
    sums = Sums(buffers, tables, sets, {"out": Placement.packed(own), "dq": Placement.packed(own)}, sink=False)
    messages = [[p for m in s.sends for p in message_parts(m, sets)] for s in steps]
    pieces = [p.heads for parcels in messages for p in parcels]
    edges = {edge for heads in [*pieces, *(heads for heads, _ in parts)] for edge in heads}
    announced = sums.announce(messages, {kind: set(edges) for kind in ("out", "dq", "dkv")})
    sum_of = {copy.target.buffer: copy.source.buffer for copies, _ in announced for copy in copies}
    leaves: dict[Cell, tuple[int, int, int]] = {}  # step, tag and row of the message
    for number, of_step in reversed(list(enumerate(messages))):
        for parcels in (p for p in of_step if p.kind == "out" and number > step):
            for row, of_row in enumerate(cells(parcels.spans, parcels.heads)):
                leaves |= dict.fromkeys(of_row, (number, parcels.tag, row))
    home = {cell: row for row, of_row in enumerate(cells(own, (0, HEADS))) for cell in of_row}
    for heads, wanted in parts:
        want = cells(wanted, heads)
        nowhere = {cell for row in want for cell in row} - set(leaves) - set(home)
        partial = buffers.new("partial", "out", heads, wanted.total, "partial")
        if nowhere:
            with pytest.raises(ValueError, match=f"leaves out rows .* of step {step} on a rank that does not own them"):
                sums.accumulates(partial, "out", heads, Placement.packed(wanted), step)
            continue
        arrived: dict[Cell, list[tuple[int, int]]] = {}
        for one in sums.accumulates(partial, "out", heads, Placement.packed(wanted), step):
            assert one.source.buffer == partial
            first = buffers.specs[one.target.buffer].heads[0]
            assert one.source.rows is not None
            assert one.target.rows is not None
            rows, into = (tables.numbers(view).tolist() for view in (one.source.rows, one.target.rows))
            for row, target_row in zip(rows, into, strict=True):
                of_row = want[row][slice(*one.source.heads)]
                for (cell_row, head), target in zip(of_row, range(*one.target.heads), strict=True):
                    assert first + target == head
                    arrived.setdefault((cell_row, head), []).append((one.target.buffer, target_row))
        for cell in (cell for row in want for cell in row):
            ((total, row),) = arrived.pop(cell)
            if cell not in leaves:
                assert buffers.specs[total].rows is None
                assert row == home[cell]
                continue
            number, tag, first_row = leaves[cell]
            (sent,) = (send for send in announced[number][1] if send.tag == tag)
            assert isinstance(sent.source.rows, slice)
            assert (total, row) == (sum_of[sent.source.buffer], sent.source.rows.start + first_row)
        assert not arrived
    local = sorted(spec.heads for spec in buffers.specs if spec.role == "sum" and spec.rows is None)
    assert all(a[1] <= b[0] for a, b in pairwise(local)), "local sums share heads"
