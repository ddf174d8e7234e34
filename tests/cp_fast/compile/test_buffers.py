"""Which buffer has the rows that a step needs, and where partial results go: cell by cell, by brute force."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from cp_fast.planning.operands import Operands
from cp_fast.planning.results import Results, parcels_of
from cp_fast.program import Heads, Operand
from hypothesis import event, given
from hypothesis import strategies as st

from cp_fast.compile.index_tables import Tables
from cp_fast.compile.row_maps import Spans, SpanSets
from cp_ref.spec import Message, Pieces, Step
from tests.cp_fast.compile.brute_force import spans

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
    contents: dict[str, list[list[Cell]]]

    def read(self, what: Operand[slice]) -> list[list[Cell]]:
        rows = self.operands.tables.numbers(what.rows).tolist()
        assert 0 <= what.heads[0] < what.heads[1]
        return [self.contents[what.buffer][row][slice(*what.heads)] for row in rows]


@st.composite
def filled(draw: st.DrawFn) -> Filled:
    """A few buffers of two kinds, each with rows and heads of its own."""
    made = Filled(Operands(Tables(), SpanSets()), {})
    for number in range(draw(st.integers(0, 4))):
        held, heads = draw(shuffled()), draw(st.one_of(st.just((0, HEADS)), head_ranges()))
        if len(held):
            kind = draw(st.sampled_from(["q", "q", "q", "kv"]))
            buffer = made.operands.new(f"{number}", kind, heads, held.buffer, held.total)
            made.operands.held.append(buffer)
            made.contents[buffer.name] = cells(held, heads)
    return made


@given(filled(), shuffled(), head_ranges())
def test_holder(made: Filled, wanted: Spans, heads: Heads) -> None:
    """The newest buffer of the kind that has all rows and heads, or none."""
    want = cells(wanted, heads)

    def has_all(name: str) -> bool:
        buffer = made.operands.buffers[name]
        there = {cell for row in made.contents[name] for cell in row}
        inside = buffer.heads[0] <= heads[0] and heads[1] <= buffer.heads[1]
        return buffer.kind == "q" and inside and {cell for row in want for cell in row} <= there

    having = [held.name for held in made.operands.held if has_all(held.name)]
    held = made.operands.holder("q", heads, wanted)
    event("found" if held else "not found")
    assert (held.name if held else None) == (having[-1] if having else None)
    if held:
        assert made.read(made.operands.of(held, wanted, heads)) == want  # type: ignore[arg-type]


@given(filled(), st.lists(shuffled(), min_size=1, max_size=3), head_ranges())
def test_gather(made: Filled, parts: list[Spans], heads: Heads) -> None:
    """All rows of all parts in one new buffer, each once, in the order of the global rows; or an error that names the
    rows that are nowhere.
    """
    before = dict(made.contents)
    want = sorted({tuple(row) for part in parts for row in cells(part, heads)})
    if not want:
        return
    there = {
        cell for name, rows in before.items() for row in rows for cell in row if made.operands.buffers[name].kind == "q"
    }
    if not {cell for row in want for cell in row} <= there:
        event("rows that are nowhere")
        with pytest.raises(ValueError, match=r"needs q rows \d+:\d+ at step 3, which are not there"):
            made.operands.gather("q", heads, parts, step=3)
        return
    held, copies = made.operands.gather("q", heads, parts, step=3)
    assert held is made.operands.held[-1] is made.operands.holder("q", heads, parts[0])
    made_buffer = made.operands.buffers[held.name]
    assert (made_buffer.kind, made_buffer.heads, made_buffer.size) == ("q", heads, len(want))
    filled: list[list[Cell | None]] = [[None] * (heads[1] - heads[0]) for _ in want]
    for copy in copies:
        assert copy.target.buffer == held.name
        rows = made.operands.tables.numbers(copy.target.rows).tolist()
        for row, values in zip(rows, made.read(copy.source), strict=True):  # type: ignore[arg-type]
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
def test_goes_to(steps: list[Step], own: Spans, more: Spans, parts: list[tuple[Heads, Spans]], step: int) -> None:
    """Every cell of a partial result goes into the next message that takes it along, or home; once."""
    tables, sets = Tables(), SpanSets()
    results = Results(tables, sets, {"out": own.buffer, "dq": own.buffer})
    messages = [[p for m in s.sends for p in parcels_of(m, sets)] for s in steps]
    pieces = [p.heads for parcels in messages for p in parcels]
    edges = {edge for heads in [*pieces, *(heads for heads, _ in parts)] for edge in heads}
    sends = results.announce(messages, {kind: set(edges) for kind in ("out", "dq", "dkv")})
    leaves: dict[Cell, tuple[int, int, int]] = {}  # step, peer and row of the message
    for number, of_step in reversed(list(enumerate(messages))):
        for parcels in (p for p in of_step if p.kind == "out" and number > step):
            for row, of_row in enumerate(cells(parcels.spans, parcels.heads)):
                leaves |= dict.fromkeys(of_row, (number, parcels.tag, row))
    home = {cell: row for row, of_row in enumerate(cells(own, (0, HEADS))) for cell in of_row}
    for heads, wanted in parts:
        want = cells(wanted, heads)
        nowhere = {cell for row in want for cell in row} - set(leaves) - set(home)
        if nowhere:
            with pytest.raises(ValueError, match=f"leaves out rows .* of step {step} on a rank that does not own them"):
                results.goes_to("out", heads, wanted.packed, step)
            continue
        arrived: dict[Cell, list[tuple[str, int]]] = {}
        for c in results.goes_to("out", heads, wanted.packed, step):
            into_heads = results.sums[c.sums].heads
            for row, into in zip(tables.numbers(c.rows).tolist(), tables.numbers(c.into).tolist(), strict=True):
                for (of_row, head), target in zip(want[row][slice(*c.heads)], range(*c.into_heads), strict=True):
                    assert into_heads[0] + target == head
                    arrived.setdefault((of_row, head), []).append((c.sums, into))
        for cell in (cell for row in want for cell in row):
            ((sums, row),) = arrived.pop(cell)
            if cell not in leaves:
                assert results.sums[sums].home
                assert row == home[cell]
                continue
            number, tag, first = leaves[cell]
            (sent,) = (s for s in sends[number] if s.tag == tag)
            assert (sums, row) == (sent.sums, sent.start + first)
        assert not arrived
    homes = sorted(sums.heads for sums in results.sums.values() if sums.home)
    assert all(a[1] <= b[0] for a, b in pairwise(homes)), "sums at home share heads"
