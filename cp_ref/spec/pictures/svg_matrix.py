"""One score matrix in SVG: every sequence's block, every tile as a polygon, the owners along two sides."""

from __future__ import annotations

from collections.abc import Iterable

from cp_ref.spec.pictures.outlines import band_edge, centre, staircase
from cp_ref.spec.pictures.plane import Block, Owner, Part, Plane
from cp_ref.spec.pictures.svg_elements import MASKED, PADDING, SOFT, Drawing, ink_on, rank_colour

__all__ = ["STRIP", "Matrix"]

STRIP = 16  # The thickness of an ownership strip, in pixels.
_EXACT = 5.0  # From this many pixels per pair on, a band's edge is drawn as stairs.
_SHORTEST = 0.25  # The shorter side's least share of the longer one.


class Matrix(Drawing):
    """A plane, its upper left corner at the origin and its longer side `side` pixels long.

    A colour pales over `steps` steps; `ranks` is their number; `kind` is the class of the tiles' polygons.
    """

    def __init__(self, view: Plane, side: float, steps: int, ranks: int, kind: str = "tile") -> None:
        super().__init__()
        self.view, self.steps, self.ranks, self.kind = view, steps, ranks, kind
        scale = side / max(view.rows, view.columns, 1)
        self.height, self.width = (max(n * scale, _SHORTEST * side) for n in (view.rows, view.columns))
        self.sy, self.sx = self.height / max(view.rows, 1), self.width / max(view.columns, 1)
        for block in view.blocks:
            self._block(block)
        for part in view.parts:
            self._tile(part)
        for owner in view.owners_kv:
            self._strip(owner, self.sx, across=True)
        for owner in view.owners_q:
            self._strip(owner, self.sy, across=False)
        for at in _ticks([b.x for b in view.blocks] + [view.columns], (o.start for o in view.owners_kv), self.sx, 40):
            self.text(at * self.sx, -STRIP - 9, f"{at:,}", SOFT, 10.5, text_anchor="middle")
        for at in _ticks([b.y for b in view.blocks] + [view.rows], (o.start for o in view.owners_q), self.sy, 14):
            self.text(-STRIP - 9, at * self.sy + 4, f"{at:,}", SOFT, 10.5, text_anchor="end")

    def _block(self, b: Block) -> None:
        """A sequence: its uncovered part is masked; padding is hatched; its number where the mask leaves room."""
        s, text, right = b.sequence, f"sequence {b.number}", b.x + b.sequence.len_kv
        name = f"{text}: {s.len_q} queries x {s.len_kv} keys in {s.slots_q} x {s.slots_kv} slots"
        self._slots(b.x, b.y, s.slots_kv, s.slots_q, MASKED, name)
        self._slots(right, b.y, s.slots_kv - s.len_kv, s.slots_q, PADDING, "padding")
        self._slots(b.x, b.y + s.len_q, s.len_kv, s.slots_q - s.len_q, PADDING, "padding")
        rows, columns = int(24 / self.sy), int((7.5 * len(text) + 12) / self.sx)
        if len(self.view.blocks) > 1 and columns < s.len_kv and rows < s.len_q:
            corner = b.y, b.y + rows, right - columns, right
            if not any(part.box.within(*corner).pairs for part in self.view.parts if part.block is b):
                self.text(right * self.sx - 6, b.y * self.sy + 16, text, SOFT, text_anchor="end")

    def _slots(self, x: int, y: int, columns: int, rows: int, fill: str, name: str) -> None:
        """Draw a rectangle of the plane, unless it is empty."""
        if columns > 0 and rows > 0:
            self.box(x * self.sx, y * self.sy, columns * self.sx, rows * self.sy, fill, name)

    def _tile(self, part: Part) -> None:
        """A tile's visible pairs, with the rank and step, or the step alone, where there is room."""
        box = part.box.cropped()
        exact = min(self.sx, self.sy) >= _EXACT or part.pairs < 4
        outline = staircase(box) if exact and not box.full else band_edge(box)
        colour = rank_colour(part.rank, part.step, self.steps)
        wide, high = (box.k1 - box.k0) * self.sx, (box.q1 - box.q0) * self.sy
        ranks, together = self.view.ranks_of(part.rank, self.ranks), self.view.ranks_each > 1
        who = f"ranks {ranks}" if together else f"rank {ranks} step {part.step}"
        name = f"{who}: {part.text}, {part.pairs:,} of {part.box.size:,} pairs visible"
        points = " ".join(f"{x * self.sx:.2f},{y * self.sy:.2f}" for x, y in outline)
        shape = f'class="{self.kind}" points="{points}" fill="{colour}"'
        stroke = {"stroke": "#ffffff", "stroke_width": 0.8} if min(wide, high) >= 5 else {}
        self.element("polygon", name, shape, **stroke)
        share = 1 if box.full else 0.62
        for text in [ranks] if together else [f"{ranks}:{part.step}", str(part.step)]:
            if 7.5 * len(text) + 4 <= share * wide and share * high >= 13:
                x, y = centre(outline)
                self.text(x * self.sx, y * self.sy + 4, text, ink_on(colour), text_anchor="middle")
                return

    def _strip(self, owner: Owner, scale: float, *, across: bool) -> None:
        """One owner's slots, along the keys (`across`) or down the queries; padding is hatched."""

        def draw(start: float, length: float, fill: str, name: str = "") -> None:
            edges = (start, -STRIP - 4, length, STRIP) if across else (-STRIP - 4, start, STRIP, length)
            self.box(*edges, fill, name)

        start, length, colour = owner.start * scale, (owner.stop - owner.start) * scale, rank_colour(owner.rank)
        real = length * (owner.real / (owner.stop - owner.start))
        ranks = self.view.ranks_of(owner.rank, self.ranks)
        who = f"ranks {ranks} own" if "-" in ranks else f"rank {ranks} owns"
        name = f"{who} slots {owner.start} to {owner.stop - 1}, {owner.real} of them tokens"
        draw(start, length, colour, name)
        if real < length:
            draw(start + real, length - real, PADDING)
        if real >= 12:
            x, y = (start + real / 2, -STRIP / 2 - 4) if across else (-STRIP / 2 - 4, start + real / 2)
            turn = {"transform": f"rotate(-90 {x:.1f} {y:.1f})"} if "-" in ranks and not across else {}
            if real >= 7 * len(ranks):
                self.text(x, y + 4, ranks, ink_on(colour), 11, text_anchor="middle", **turn)


def _ticks(first: list[int], then: Iterable[int], scale: float, apart: float) -> list[int]:
    """Positions to label, at least `apart` pixels from each other: the end, the sequences' starts, the other cuts."""
    kept: list[int] = []
    for at in [first[-1], *first[:-1], *then]:
        if all(abs(at - other) * scale >= apart for other in kept):
            kept.append(at)
    return kept
