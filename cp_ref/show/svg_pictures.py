"""A schedule as one SVG file: a polygon for each tile, coloured by rank and paler with each step.

On the left is the score matrix; on the right the work by rank and step, the costs, and the longest sequence, enlarged.
"""

from __future__ import annotations

import colorsys
from collections import defaultdict
from collections.abc import Iterable
from xml.sax.saxutils import escape

from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.costs import report
from cp_ref.show.picture_plane import (
    Block,
    Owner,
    PlacedTile,
    Plane,
    band_edge,
    centre,
    few_colours,
    plane,
    staircase,
    title,
)

__all__ = [
    "LINE",
    "MASKED",
    "PADDING",
    "SOFT",
    "STRIP",
    "Drawing",
    "Matrix",
    "ink_on",
    "rank_colour",
    "svg_picture",
]

_PALETTE = ("4063d8", "d1495b", "2a9d5c", "e08e1b", "8e4ec6", "119da4", "c2418f", "7f6d3f", "5b7083", "94a016")
INK, SOFT, LINE, MASKED, PADDING = "#1c2430", "#5d6875", "#c9d0d8", "#f1f3f6", "url(#padding)"
_FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\""
_HATCH = (
    '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#ffffff" fill-opacity="0.55"/>'
    f'<path d="M0 0V6" stroke="{SOFT}" stroke-opacity="0.45" stroke-width="1.6"/></pattern></defs>'
)


class Drawing:
    """The elements drawn so far, in `out`. Hovering over an element shows its name, if it has one."""

    def __init__(self) -> None:
        self.out: list[str] = []

    def element(self, tag: str, name: str, attributes: str, **more: object) -> None:
        """Draw an element. more: attributes, with "_" for "-"."""
        named = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
        self.out.append(f"<{tag} {attributes}{named}" + (f"><title>{escape(name)}</title></{tag}>" if name else "/>"))

    def box(self, x: float, y: float, wide: float, high: float, fill: str, name: str = "", **more: object) -> None:
        """Draw a rectangle."""
        where = f'x="{x:.2f}" y="{y:.2f}" width="{max(wide, 0):.2f}" height="{max(high, 0):.2f}"'
        self.element("rect", name, where, fill=fill, **more)

    def text(self, x: float, y: float, text: str, colour: str = INK, size: float = 12, **more: object) -> None:
        """Draw a line of text, its baseline at y."""
        named = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
        where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{colour}"'
        self.out.append(f"<text {where}{named}>{escape(text)}</text>")

    def place(self, other: Drawing, x: float, y: float) -> None:
        """Draw another drawing with its origin here."""
        self.out += [f'<g transform="translate({x:g} {y:g})">', *other.out, "</g>"]

    def document(self, title: str, width: float, height: float) -> str:
        """The drawing on white, as a file's text."""
        size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {_FONT} font-size="12" fill="{INK}">'
        white = f'<rect x="0.00" y="0.00" width="{width:.2f}" height="{height:.2f}" fill="#ffffff"/>'
        return "\n".join([head, f"<title>{escape(title)}</title>", _HATCH, white, *self.out, "</svg>\n"])


def rank_colour(rank: int, step: int = 0, steps: int = 1) -> str:
    """The colour of a rank, paler with each step, as #rrggbb.

    >>> rank_colour(0), rank_colour(0, 3, 4)
    ('#4063d8', '#b0beef')
    """
    if rank < len(_PALETTE):
        rgb = list(bytes.fromhex(_PALETTE[rank]))
    else:  # the golden angle: no two of any number of ranks are close
        rgb = [round(255 * c) for c in colorsys.hls_to_rgb(rank * 0.381966 % 1.0, 0.44, 0.5)]
    pale = 0.585 * step / max(steps - 1, 1)
    return "#" + "".join(f"{round(c + (255 - c) * pale):02x}" for c in rgb)


def ink_on(colour: str) -> str:
    """Ink that is readable on a colour."""
    red, green, blue = bytes.fromhex(colour[1:])
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else INK


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

    def _tile(self, part: PlacedTile) -> None:
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


_SIDE, _LEFT, _TOP, _PANEL, _GAP = 640, 96, 144, 300, 40  # pixels; the side is the longer one of the matrix


def svg_picture(problem: Problem, schedule: Schedule, head: int = 0) -> str:
    """The forward pass as an SVG document: all sequences on the diagonal, or one if all are equal.

    Hovering over a tile names it. More than 16 ranks share 8 colours, and tiles of one colour that touch are one
    polygon, of all steps. `head` is the query head to show, where heads are spread over the ranks.
    """
    alike = problem.qkv_format != "thd" and len(set(problem.sequences)) == 1
    ranks = problem.cp_size
    view = few_colours(plane(problem, schedule, range(1 if alike else len(problem.sequences)), head), ranks)
    matrix, page = Matrix(view, _SIDE, view.steps, ranks), Drawing()
    _heading(page, problem, schedule, view, head)
    page.place(matrix, _LEFT, _TOP)
    where = "positions" if len(view.blocks) == 1 and problem.areas is None else "slots of the packed buffer"
    text, x, y = f"keys ({where}, coloured by owner)", _LEFT + matrix.width / 2, _TOP + matrix.height / 2
    page.text(x, _TOP - STRIP - 24, text, SOFT, text_anchor="middle")
    page.text(26, y, f"queries {text[5:]}", SOFT, text_anchor="middle", transform=f"rotate(-90 26 {y:.1f})")
    right = _LEFT + matrix.width + _GAP
    bottom = _facts(page, problem, schedule, view, right, _work(page, problem, view, right))
    if (number := _small(view, matrix)) is not None:
        again = few_colours(plane(problem, schedule, [number], head), ranks)
        large = Matrix(again, _PANEL - 36, view.steps, ranks, kind="again")
        page.text(right, bottom + 14, f"Sequence {number}, the longest, enlarged", size=14, font_weight=600)
        page.place(large, right + 36, bottom + 58)
        bottom += 58 + large.height + 24
    return page.document(title(problem, schedule), right + _PANEL + 24, max(_TOP + matrix.height + 28, bottom))


def _heading(page: Drawing, p: Problem, schedule: Schedule, view: Plane, head: int) -> None:
    page.text(_LEFT, 34, "Who computes which scores, and when", size=20, font_weight=600)
    page.text(_LEFT, 56, title(p, schedule), SOFT, 13.5)
    alike = " alike, one shown" if len(view.blocks) < len(p.sequences) and p.areas is None else ""
    dims = f"d {p.d_qk}" if p.d_v == p.d_qk else f"d {p.d_qk}/{p.d_v}"
    counts = (
        (len(p.sequences), "sequence"),
        (sum(s.len_q for s in p.sequences), "query token"),
        (p.heads_q, "query head"),
    )
    sequences, tokens, heads = (f"{n:,} {thing}{'' if n == 1 else 's'}" for n, thing in counts)
    shown = f"; query head {head} shown" if view.some_heads else ""
    what = f"{sequences}{alike}, {tokens}; {heads} over {p.heads_kv}, {dims}, {p.dtype}{shown}"
    page.text(_LEFT, 75, what, SOFT, 13.5)


def _work(page: Drawing, problem: Problem, view: Plane, x: float) -> float:
    """The legend: a bar for the work of every rank at every step. Returns where it ends."""
    steps = view.steps
    work: dict[tuple[int, int], int] = defaultdict(int)
    for part in view.parts:
        work[part.rank, part.step] += part.pairs
    most, total = max(work.values(), default=1), max(sum(work.values()), 1)
    groups = -(-problem.cp_size // view.ranks_each)
    y, high = _TOP - 4.0, min(26.0, 560 / groups)
    cell, small = min((_PANEL - 100) / steps, 64), min(12.0, high)
    together = view.ranks_each > 1
    page.text(x, y - 16, "Work by ranks" if together else "Work by rank and step", size=14, font_weight=600)
    columns = [(step * cell + 52, str(step)) for step in range(0, steps, max(round(20 / cell), 1))]
    columns = [(52, "all steps")] if together else columns
    for left, name in [(0, "rank"), *columns, (60 + steps * cell, "share")]:
        page.text(x + left, y + 6, name, SOFT, 10.5)
    y += 14
    for rank in range(groups):
        base = y + high / 2 + small / 3
        page.box(x, y + 1, small * 1.2, high - 3, rank_colour(rank))
        page.text(
            x + (17 if together else 22), base, view.ranks_of(rank, problem.cp_size), size=10 if together else small
        )
        for step in range(steps):
            left, full = x + 52 + step * cell, work[rank, step] / most
            page.box(left, y + 1, cell - 2, high - 3, MASKED)
            page.box(left, y + 1, (cell - 2) * full, high - 3, rank_colour(rank, step, steps))
        page.text(x + 60 + steps * cell, base, f"{sum(work[rank, s] for s in range(steps)) / total:.1%}", size=small)
        y += high
    return y


def _facts(page: Drawing, problem: Problem, schedule: Schedule, view: Plane, x: float, y: float) -> float:
    """Balance, bytes, and the other colours. Returns where it ends."""
    costs = report(problem, schedule)
    facts = [
        ("balance", f"{costs.balance:.3f} (mean rank / busiest)"),
        ("visible", f"{problem.pairs:,} pairs a head"),
        ("tiles", f"{sum(r.tiles for r in costs.ranks):,}"),
        ("sent", f"{_bytes(sum(r.forward_bytes for r in costs.ranks))} forward"),
        ("", f"{_bytes(sum(r.backward_bytes for r in costs.ranks))} backward"),
    ]
    for line, (name, value) in enumerate(facts):
        page.text(x, y + 26 + 19 * line, name, SOFT)
        page.text(x + 60, y + 26 + 19 * line, value)
    y += 36 + 19 * len(facts)
    padded = any(s.len_q < s.slots_q or s.len_kv < s.slots_kv for s in problem.sequences)
    for fill, meaning in [(MASKED, "masked: nobody computes it"), (PADDING, "padding")][: 1 + padded]:
        page.box(x, y - 11, 44, 14, fill, stroke=LINE)
        page.text(x + 60, y, meaning, SOFT)
        y += 22
    if view.ranks_each > 1:
        page.text(x, y + 2, f"A colour is {view.ranks_each} ranks; their tiles that touch", SOFT)
        page.text(x, y + 20, "are one, of all steps.", SOFT)
        return y + 52
    page.text(x, y + 2, "In a tile: rank:step, or the step alone.", SOFT)
    page.text(x, y + 20, "A colour is a rank; it pales with the steps.", SOFT)
    return y + 52


def _small(view: Plane, matrix: Matrix) -> int | None:
    """The number of the longest of several sequences, where the diagonal leaves it small."""
    longest = max(view.blocks, key=lambda b: b.sequence.len_q * b.sequence.len_kv, default=None)
    if longest is None or len(view.blocks) < 2 or not longest.sequence.len_q * longest.sequence.len_kv:
        return None
    side = max(longest.sequence.slots_q * matrix.sy, longest.sequence.slots_kv * matrix.sx)
    return None if side > 0.6 * (_PANEL - 36) else longest.number


def _bytes(count: int) -> str:
    """A number of bytes in decimal units.

    >>> _bytes(999), _bytes(42_100_000)
    ('999 bytes', '42.1 MB')
    """
    power = min((len(str(count)) - 1) // 3, 5)
    return f"{count / 1000**power:.1f} {' kMGTP'[power]}B" if power else f"{count} bytes"
