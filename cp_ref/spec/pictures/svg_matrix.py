"""One score matrix in SVG: every sequence's block, every tile as a polygon, the owners along two sides."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

from cp_ref.spec.pictures.svg_elements import MASKED, SOFT, box, ink_on, rank_colour, words
from cp_ref.spec.pictures.tile_polygons import Block, Owner, Part, Plane, Point, band_edge, centre, staircase

__all__ = ["STRIP", "Matrix"]

STRIP = 16  # The thickness of an ownership strip, in pixels.
_EXACT = 5.0  # From this many pixels per pair on, a band's edge is drawn as stairs.
_SHORTEST = 0.25  # The shorter side's least share of the longer one.


class Matrix:
    """A plane, its upper left corner at the origin and its longer side `side` pixels long. `out` holds the elements.

    A colour pales over `steps` steps; `kind` is the class of the tiles' polygons. Hovering over anything names it.
    """

    def __init__(self, view: Plane, side: float, steps: int, kind: str = "tile") -> None:
        self.view, self.steps, self.kind = view, steps, kind
        scale = side / max(view.rows, view.columns, 1)
        self.height, self.width = (max(n * scale, _SHORTEST * side) for n in (view.rows, view.columns))
        self.sy, self.sx = self.height / max(view.rows, 1), self.width / max(view.columns, 1)
        self.out: list[str] = []

    def blocks(self) -> None:
        """Every sequence's block: its uncovered part is masked; padding is hatched."""
        for b in self.view.blocks:
            s = b.sequence
            name = f"sequence {b.number}: {s.len_q} queries x {s.len_kv} keys in {s.slots_q} x {s.slots_kv} slots"
            self._rect(b.x, b.y, s.slots_kv, s.slots_q, MASKED, name)
            self._rect(b.x + s.len_kv, b.y, s.slots_kv - s.len_kv, s.slots_q, "url(#padding)", "padding")
            self._rect(b.x, b.y + s.len_q, s.len_kv, s.slots_q - s.len_q, "url(#padding)", "padding")
            if len(self.view.blocks) > 1:
                self._block_label(b)

    def _block_label(self, block: Block) -> None:
        """The sequence's number in its upper right corner, where the mask leaves room for it."""
        s, text = block.sequence, f"sequence {block.number}"
        rows, columns = int(24 / self.sy), int((7.5 * len(text) + 12) / self.sx)
        right = block.x + s.len_kv
        corner = block.y, block.y + rows, right - columns, right
        free = not any(part.box.within(*corner).pairs for part in self.view.parts if part.block is block)
        if columns < s.len_kv and rows < s.len_q and free:
            x, y = (block.x + s.len_kv) * self.sx - 6, block.y * self.sy + 16
            self._text(x, y, text, anchor="end")

    def tiles(self) -> None:
        """Every tile's visible pairs."""
        for part in self.view.parts:
            box = part.box.cropped()
            exact = min(self.sx, self.sy) >= _EXACT or part.pairs < 4
            outline = staircase(box) if exact and not box.full else band_edge(box)
            colour = rank_colour(part.rank, part.step, self.steps)
            wide, high = (box.k1 - box.k0) * self.sx, (box.q1 - box.q0) * self.sy
            stroke = ' stroke="#ffffff" stroke-width="0.8"' if min(wide, high) >= 5 else ""
            points = " ".join(f"{x * self.sx:.2f},{y * self.sy:.2f}" for x, y in outline)
            seen = f"{part.pairs:,} of {part.box.size:,} pairs visible"
            name = escape(f"rank {part.rank} step {part.step}: {part.text}, {seen}")
            polygon = f'<polygon class="{self.kind}" points="{points}" fill="{colour}"{stroke}>'
            self.out.append(f"{polygon}<title>{name}</title></polygon>")
            self._tile_label(part, outline, colour, *((wide, high) if box.full else (0.62 * wide, 0.62 * high)))

    def _tile_label(self, part: Part, outline: list[Point], colour: str, wide: float, high: float) -> None:
        """The rank and step, or the step alone, where there is room."""
        for text in (f"{part.rank}:{part.step}", str(part.step)):
            if 7.5 * len(text) + 4 <= wide and high >= 13:
                x, y = centre(outline)
                self._text(x * self.sx, y * self.sy + 4, text, colour=ink_on(colour), anchor="middle")
                return

    def owners(self) -> None:
        """The owners of the queries (left) and the keys (top), and the positions."""
        view = self.view
        for o in view.owners_kv:
            self._strip(o, o.start * self.sx, -STRIP - 4, (o.stop - o.start) * self.sx, STRIP, across=True)
        for o in view.owners_q:
            self._strip(o, -STRIP - 4, o.start * self.sy, STRIP, (o.stop - o.start) * self.sy, across=False)
        for at in _ticks([b.x for b in view.blocks] + [view.columns], (o.start for o in view.owners_kv), self.sx, 40):
            self._text(at * self.sx, -STRIP - 9, f"{at:,}", size=10.5, anchor="middle")
        for at in _ticks([b.y for b in view.blocks] + [view.rows], (o.start for o in view.owners_q), self.sy, 14):
            self._text(-STRIP - 9, at * self.sy + 4, f"{at:,}", size=10.5, anchor="end")

    def _strip(self, owner: Owner, x: float, y: float, wide: float, high: float, *, across: bool) -> None:
        """One owner's slots, along the keys (`across`) or down the queries; padding is hatched."""
        colour, real = rank_colour(owner.rank), owner.real / (owner.stop - owner.start)
        real_wide, real_high = (wide * real, high) if across else (wide, high * real)
        name = f"rank {owner.rank} owns slots {owner.start} to {owner.stop - 1}, {owner.real} of them tokens"
        self.out.append(box(x, y, wide, high, colour, name=name))
        if across and real < 1:
            self.out.append(box(x + real_wide, y, wide - real_wide, high, "url(#padding)"))
        elif real < 1:
            self.out.append(box(x, y + real_high, wide, high - real_high, "url(#padding)"))
        if min(real_wide, real_high) >= 12:
            x, y = x + real_wide / 2, y + real_high / 2 + 4
            self._text(x, y, str(owner.rank), size=11, colour=ink_on(colour), anchor="middle")

    def _rect(self, x: int, y: int, columns: int, rows: int, fill: str, name: str) -> None:
        """Draw a rectangle of the plane, unless it is empty."""
        if columns > 0 and rows > 0:
            self.out.append(box(x * self.sx, y * self.sy, columns * self.sx, rows * self.sy, fill, name=name))

    def _text(self, x: float, y: float, text: str, *, size: float = 12, colour: str = SOFT, anchor: str = "") -> None:
        self.out.append(words(x, y, text, size=size, colour=colour, anchor=anchor))


def _ticks(first: list[int], then: Iterable[int], scale: float, apart: float) -> list[int]:
    """Positions to label, at least `apart` pixels from each other: the end, the sequences' starts, the other cuts."""
    kept: list[int] = []
    for at in [first[-1], *first[:-1], *then]:
        if all(abs(at - other) * scale >= apart for other in kept):
            kept.append(at)
    return kept
