r"""A schedule as one SVG file: every tile a polygon, its colour the rank, its shade the step.

   title and what the problem is
         key owners
   .---------------------.   work by rank and step: the legend (every colour that occurs) and the balance in one
q  | \                   |
o  |    \     the score  |   facts: pairs, balance, bytes
w  |       \    matrix   |
n  |          \          |
.  '---------------------'
"""

from __future__ import annotations

import colorsys
from collections import defaultdict
from collections.abc import Iterable
from xml.sax.saxutils import escape

from cp_ref.spec.drawing import Block, Owner, Part, Plane, Point, band_edge, centre, plane, staircase, title
from cp_ref.spec.mask import Rect
from cp_ref.spec.problem import Problem
from cp_ref.spec.report import report
from cp_ref.spec.schedule import Schedule

__all__ = ["rank_colour", "svg_picture"]

_SIDE = 640  # pixels of the matrix's longer side
_SHORT_SIDE = 160  # at least, for the shorter one
_LEFT, _TOP, _PANEL, _GAP = 96, 144, 300, 40
_STRIP = 16  # thickness of an ownership strip
_EXACT = 5.0  # pixels per pair from which a band's edge is drawn as the stairs that it is
_PALETTE = ("4063d8", "d1495b", "2a9d5c", "e08e1b", "8e4ec6", "119da4", "c2418f", "7f6d3f", "5b7083", "94a016")
_INK, _SOFT, _LINE, _MASKED = "#1c2430", "#5d6875", "#c9d0d8", "#f1f3f6"
_HATCH = (
    '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#ffffff" fill-opacity="0.55"/>'
    f'<path d="M0 0V6" stroke="{_SOFT}" stroke-opacity="0.45" stroke-width="1.6"/></pattern></defs>'
)
_FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\""


def svg_picture(problem: Problem, schedule: Schedule, head: int = 0) -> str:
    """The forward pass as an SVG document: all sequences on the diagonal, or one where all are alike.

    Hovering over a tile names it. `head` is the query head that is looked at, where a schedule spreads the heads over the
    ranks.
    """
    alike = problem.qkv_format != "thd" and len(set(problem.sequences)) == 1
    view = plane(problem, schedule, range(1 if alike else len(problem.sequences)), head)
    return _Picture(problem, schedule, view, head).document()


def rank_colour(rank: int, step: int = 0, steps: int = 1) -> str:
    """The colour of a rank, paler with each step, as #rrggbb.

    >>> rank_colour(0), rank_colour(0, 3, 4)
    ('#4063d8', '#b0beef')
    """
    if rank < len(_PALETTE):
        rgb = [int(_PALETTE[rank][n : n + 2], 16) for n in (0, 2, 4)]
    else:  # the golden angle: no two of any number of ranks are close
        rgb = [round(255 * c) for c in colorsys.hls_to_rgb(rank * 0.381966 % 1.0, 0.44, 0.5)]
    pale = 0.585 * step / max(steps - 1, 1)
    return "#" + "".join(f"{round(c + (255 - c) * pale):02x}" for c in rgb)


class _Picture:
    """The elements of one document, top to bottom; `document` puts them together."""

    def __init__(self, problem: Problem, schedule: Schedule, view: Plane, head: int) -> None:
        self.problem, self.schedule, self.view, self.head = problem, schedule, view, head
        scale = _SIDE / max(view.rows, view.columns, 1)
        self.height, self.width = (max(n * scale, _SHORT_SIDE) for n in (view.rows, view.columns))
        self.sy, self.sx = self.height / max(view.rows, 1), self.width / max(view.columns, 1)
        self.out: list[str] = []

    def document(self) -> str:
        self._heading()
        self.out.append(f'<g transform="translate({_LEFT} {_TOP})">')
        self._background()
        self._tiles()
        self._strips()
        self.out.append("</g>")
        bottom = self._panel(_LEFT + self.width + _GAP)
        width, height = _LEFT + self.width + _GAP + _PANEL + 24, max(_TOP + self.height + 28, bottom)
        size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {_FONT} font-size="12" fill="{_INK}">',
            f"<title>{escape(title(self.problem, self.schedule))}</title>",
            _HATCH,
            _box(0, 0, width, height, "#ffffff"),
        ]
        return "\n".join([*head, *self.out, "</svg>"]) + "\n"

    def _heading(self) -> None:
        p = self.problem
        self._text(_LEFT, 34, "Who computes which scores, and when", size=20, weight=600)
        self._text(_LEFT, 56, title(p, self.schedule), size=13.5, colour=_SOFT)
        tokens = sum(s.len_q for s in p.sequences)
        count = _counted(len(p.sequences), "sequence")
        if len(self.view.blocks) < len(p.sequences):
            count += " alike, one shown"
        dims = f"d {p.d_qk}" if p.d_v == p.d_qk else f"d {p.d_qk}/{p.d_v}"
        heads = f"{_counted(p.heads_q, 'query head')} over {p.heads_kv}, {dims}"
        words = f"{count}, {_counted(tokens, 'query token')}; {heads}, {p.dtype}"
        if any(part.tile.heads is not None for part in self.view.parts):
            words += f"; query head {self.head} shown"
        self._text(_LEFT, 75, words, size=13.5, colour=_SOFT)

    def _background(self) -> None:
        """Every sequence's block: what stays uncovered is masked; padding is hatched."""
        for b in self.view.blocks:
            s = b.sequence
            name = f"sequence {b.number}: {s.len_q} queries x {s.len_kv} keys in {s.slots_q} x {s.slots_kv} slots"
            self._rect(b.x, b.y, s.slots_kv, s.slots_q, _MASKED, name)
            self._rect(b.x + s.len_kv, b.y, s.slots_kv - s.len_kv, s.slots_q, "url(#padding)", "padding")
            self._rect(b.x, b.y + s.len_q, s.len_kv, s.slots_q - s.len_q, "url(#padding)", "padding")
            if len(self.view.blocks) > 1:
                self._block_label(b)

    def _block_label(self, block: Block) -> None:
        """The sequence's number in its upper right corner, where the mask leaves room for it."""
        s, text = block.sequence, f"sequence {block.number}"
        corner = Rect(0, int(24 / self.sy), s.len_kv - int((7.5 * len(text) + 12) / self.sx), s.len_kv)
        if corner.k0 > 0 and corner.q1 < s.len_q and self.problem.band(s).count(corner) == 0:
            x, y = (block.x + s.len_kv) * self.sx - 6, block.y * self.sy + 16
            self._text(x, y, text, colour=_SOFT, anchor="end")

    def _tiles(self) -> None:
        for part in self.view.parts:
            rect, band = part.rect, part.plane_band
            full, exact = band.full(rect), min(self.sx, self.sy) >= _EXACT or part.pairs < 4
            outline = staircase(band, rect) if exact and not full else band_edge(band, rect)
            colour = rank_colour(part.rank, part.step, self.view.steps)
            wide, high = (rect.k1 - rect.k0) * self.sx, (rect.q1 - rect.q0) * self.sy
            stroke = ' stroke="#ffffff" stroke-width="0.8"' if min(wide, high) >= 5 else ""
            points = " ".join(f"{x * self.sx:.2f},{y * self.sy:.2f}" for x, y in outline)
            seen = f"{part.pairs:,} of {part.tile.rect.area:,} pairs visible"
            name = escape(f"rank {part.rank} step {part.step}: {part.tile}, {seen}")
            polygon = f'<polygon class="tile" points="{points}" fill="{colour}"{stroke}>'
            self.out.append(f"{polygon}<title>{name}</title></polygon>")
            self._tile_label(part, outline, colour, *((wide, high) if full else (0.62 * wide, 0.62 * high)))

    def _tile_label(self, part: Part, outline: list[Point], colour: str, wide: float, high: float) -> None:
        """The rank and step, or the step alone, where there is room."""
        for text in (f"{part.rank}:{part.step}", str(part.step)):
            if 7.5 * len(text) + 4 <= wide and high >= 13:
                x, y = centre(outline)
                self._text(x * self.sx, y * self.sy + 4, text, colour=_on(colour), anchor="middle")
                return

    def _strips(self) -> None:
        """Who owns the queries (left) and the keys (top), the positions, and the sequences where there are several."""
        view, several = self.view, len(self.view.blocks) > 1
        for o in view.owners_kv:
            self._strip(o, o.start * self.sx, -_STRIP - 4, (o.stop - o.start) * self.sx, _STRIP, across=True)
        for o in view.owners_q:
            self._strip(o, -_STRIP - 4, o.start * self.sy, _STRIP, (o.stop - o.start) * self.sy, across=False)
        for at in _ticks([b.x for b in view.blocks] + [view.columns], (o.start for o in view.owners_kv), self.sx, 40):
            self._text(at * self.sx, -_STRIP - 9, f"{at:,}", size=10.5, colour=_SOFT, anchor="middle")
        for at in _ticks([b.y for b in view.blocks] + [view.rows], (o.start for o in view.owners_q), self.sy, 14):
            self._text(-_STRIP - 9, at * self.sy + 4, f"{at:,}", size=10.5, colour=_SOFT, anchor="end")
        where = "slots of the packed buffer, coloured by owner" if several else "positions, coloured by owner"
        self._text(self.width / 2, -_STRIP - 24, f"keys ({where})", colour=_SOFT, anchor="middle")
        turn = f'transform="rotate(-90 {-_LEFT + 26} {self.height / 2:.1f})"'
        self._text(-_LEFT + 26, self.height / 2, f"queries ({where})", colour=_SOFT, anchor="middle", more=turn)

    def _strip(self, owner: Owner, x: float, y: float, wide: float, high: float, *, across: bool) -> None:
        """One owner's slots, along the keys (`across`) or down the queries; padding is hatched."""
        colour, real = rank_colour(owner.rank), owner.real / (owner.stop - owner.start)
        real_wide, real_high = (wide * real, high) if across else (wide, high * real)
        name = f"rank {owner.rank} owns slots {owner.start} to {owner.stop - 1}, {owner.real} of them tokens"
        self.out.append(_box(x, y, wide, high, colour, name=name))
        if across and real < 1:
            self.out.append(_box(x + real_wide, y, wide - real_wide, high, "url(#padding)"))
        elif real < 1:
            self.out.append(_box(x, y + real_high, wide, high - real_high, "url(#padding)"))
        if min(real_wide, real_high) >= 12:
            x, y = x + real_wide / 2, y + real_high / 2 + 4
            self._text(x, y, str(owner.rank), size=11, colour=_on(colour), anchor="middle")

    def _panel(self, x: float) -> float:
        """The legend: a bar for the work of every rank at every step; then the facts. Returns where it ends."""
        costs, steps = report(self.problem, self.schedule), self.view.steps
        work: dict[tuple[int, int], int] = defaultdict(int)
        for part in self.view.parts:
            work[part.rank, part.step] += part.pairs
        most, total = max(work.values(), default=1), max(sum(work.values()), 1)
        y, high = _TOP - 4.0, min(26.0, 560 / self.problem.cp_size)
        cell = min((_PANEL - 100) / steps, 64)
        self._text(x, y - 16, "Work by rank and step", size=14, weight=600)
        for step in range(0, steps, -(-16 // int(cell)) if cell < 16 else 1):
            self._text(x + 52 + step * cell, y + 6, str(step), size=10.5, colour=_SOFT)
        self._text(x, y + 6, "rank", size=10.5, colour=_SOFT)
        self._text(x + 60 + steps * cell, y + 6, "share", size=10.5, colour=_SOFT)
        y += 14
        for rank in range(self.problem.cp_size):
            small = min(12.0, high)
            self.out.append(_box(x, y + 1, small * 1.2, high - 3, rank_colour(rank)))
            self._text(x + 22, y + high / 2 + small / 3, str(rank), size=small)
            for step in range(steps):
                left, share = x + 52 + step * cell, work[rank, step] / most
                self.out.append(_box(left, y + 1, cell - 2, high - 3, _MASKED))
                self.out.append(_box(left, y + 1, (cell - 2) * share, high - 3, rank_colour(rank, step, steps)))
            share = sum(work[rank, s] for s in range(steps)) / total
            self._text(x + 60 + steps * cell, y + high / 2 + small / 3, f"{share:.1%}", size=small)
            y += high
        facts = [
            ("balance", f"{costs.balance:.3f} (mean rank / busiest)"),
            ("visible", f"{self.problem.pairs:,} pairs a head"),
            ("tiles", f"{sum(r.tiles for r in costs.ranks):,}"),
            ("sent", f"{_bytes(sum(r.forward_bytes for r in costs.ranks))} forward"),
            ("", f"{_bytes(sum(r.backward_bytes for r in costs.ranks))} backward"),
        ]
        y += 26
        for name, value in facts:
            self._text(x, y, name, colour=_SOFT)
            self._text(x + 60, y, value)
            y += 19
        y += 14
        key = [(_MASKED, "masked: nobody computes it")]
        if any(s.len_q < s.slots_q or s.len_kv < s.slots_kv for s in self.problem.sequences):
            key.append(("url(#padding)", "padding"))
        for fill, words in key:
            self.out.append(_box(x, y - 11, 44, 14, fill, f'stroke="{_LINE}"'))
            self._text(x + 60, y, words, colour=_SOFT)
            y += 22
        for words in ("In a tile: rank:step, or the step alone.", "A colour is a rank; it pales with the steps."):
            self._text(x, y + 4, words, colour=_SOFT)
            y += 19
        return y + 16

    def _rect(self, x: int, y: int, columns: int, rows: int, fill: str, name: str) -> None:
        """A rectangle of the plane; none where it is empty."""
        if columns > 0 and rows > 0:
            self.out.append(_box(x * self.sx, y * self.sy, columns * self.sx, rows * self.sy, fill, name=name))

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        colour: str = _INK,
        anchor: str = "",
        weight: int = 0,
        more: str = "",
    ) -> None:
        extra = (f' text-anchor="{anchor}"' if anchor else "") + (f' font-weight="{weight}"' if weight else "")
        where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{colour}"'
        self.out.append(f"<text {where}{extra}{' ' + more if more else ''}>{escape(text)}</text>")


def _box(x: float, y: float, wide: float, high: float, fill: str, more: str = "", name: str = "") -> str:
    box = f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(wide, 0):.2f}" height="{max(high, 0):.2f}" fill="{fill}" {more}'
    return f"{box.rstrip()}><title>{escape(name)}</title></rect>" if name else f"{box.rstrip()}/>"


def _on(colour: str) -> str:
    """Ink that is readable on a colour."""
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else _INK


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _ticks(first: list[int], then: Iterable[int], scale: float, apart: float) -> list[int]:
    """Positions to label, at least `apart` pixels from each other: the end, the sequences' starts, the other cuts."""
    kept: list[int] = []
    for at in [first[-1], *first[:-1], *then]:
        if all(abs(at - other) * scale >= apart for other in kept):
            kept.append(at)
    return kept


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
