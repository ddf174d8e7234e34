"""The picture on the page about hybrid models: a lane for each rank, a box for each fragment, an arrow for each map."""

from __future__ import annotations

from cp_ref.contract.linear_schedules import DocumentFragments, document_fragments, make_states
from cp_ref.contract.svg_pictures import LINE, SOFT, Drawing, ink_on, rank_colour
from cp_ref.schedules.problem import Problem

__all__ = ["states_svg"]

_WIDE, _LEFT, _TOP, _LANE, _HIGH = 720, 84, 116, 84, 36  # pixels


def states_svg(problem: Problem) -> str:
    """The forward messages of `make_states` as an SVG document.

    An arrow is a map that is sent. It leads from its fragment to the receiver's next fragment of the document. Hovering
    over a box or an arrow names it.
    """
    fragments, page = document_fragments(problem), Drawing()
    pixels = _WIDE / max(problem.starts_q[-1], 1)
    _heading(page, problem, pixels)
    for source, reader, start, stop in _sent(problem):
        lanes, target = 7 * abs(reader - source), _next_start(fragments, reader, start)
        name = f"map of rows {start}:{stop}, from rank {source} to rank {reader}"
        _arrow(page, _LEFT + stop * pixels - lanes, source, _LEFT + target * pixels + lanes, reader, name)
    for document, _, rank, start, stop, _ in fragments.rows():
        colour, name = rank_colour(rank), f"document {document}, rows {start}:{stop}, on rank {rank}"
        x, wide = _LEFT + start * pixels, (stop - start) * pixels
        page.box(x + 1, _y(rank), wide - 2, _HIGH, colour, name, rx=4)
        if wide > 40:
            page.text(x + wide / 2, _y(rank) + 23, f"{start}:{stop}", ink_on(colour), text_anchor="middle")
    high = _y(problem.cp_size)
    page.text(_LEFT, high, "An arrow is the map (M, B) of a fragment, sent once to each rank that needs it.", SOFT)
    return page.document("state messages of a linear layer", _LEFT + _WIDE + 24, high + 20)


def _heading(page: Drawing, problem: Problem, pixels: float) -> None:
    said = f"a linear layer on {problem.cp_size} ranks; boxes are fragments, rows of the packed buffer"
    page.text(_LEFT, 34, "Who sends which state", size=20, font_weight=600)
    page.text(_LEFT, 56, said, SOFT, 13.5)
    for rank in range(problem.cp_size):
        page.text(20, _y(rank) + 23, f"rank {rank}", rank_colour(rank), 13, font_weight=600)
    bottom = _y(problem.cp_size - 1) + _HIGH + 12
    for number, (first, last) in enumerate(zip(problem.starts_q, problem.starts_q[1:], strict=False)):
        x, y = _LEFT + first * pixels, _TOP - 22
        page.text(x + (last - first) * pixels / 2, y, f"document {number}", SOFT, text_anchor="middle")
        if number:
            page.element("path", "", f'd="M{x:.1f} {y - 12}V{bottom}"', stroke=LINE, stroke_dasharray="4 4")


def _y(rank: int) -> int:
    return _TOP + rank * _LANE


def _sent(problem: Problem) -> list[tuple[int, int, int, int]]:
    """(sender, receiver, first row, behind the last row) of every piece of the forward messages."""
    return [
        (rank, message.peer, start, stop)
        for rank, steps in enumerate(make_states(problem).forward)
        for step in steps
        for message in step.sends
        for start, stop, *_ in message.pieces.rows()
    ]


def _next_start(fragments: DocumentFragments, rank: int, row: int) -> int:
    """The first row of a rank's next fragment behind a row."""
    return next(start for _, _, _, start, _, _ in fragments.of(rank).rows() if start > row)


def _arrow(page: Drawing, x: float, source: int, to: float, reader: int, name: str) -> None:
    """From the lower or upper edge of a box to the edge of another that faces it."""
    down = reader > source
    y, end = _y(source) + _HIGH * down, _y(reader) + _HIGH * (not down)
    tip, middle = (-6 if down else 6), (y + end) / 2
    curve = f'd="M{x:.1f} {y}C{x:.1f} {middle:.1f} {to:.1f} {middle:.1f} {to:.1f} {end + tip}"'
    colour = rank_colour(source)
    page.element("path", name, curve, fill="none", stroke=colour, stroke_width=2)
    page.element("path", "", f'd="M{to - 4:.1f} {end + tip}H{to + 4:.1f}L{to:.1f} {end}Z"', fill=colour)
