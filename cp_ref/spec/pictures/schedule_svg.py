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

from collections import defaultdict
from xml.sax.saxutils import escape

from cp_ref.spec.pictures.problem_title import title
from cp_ref.spec.pictures.svg_elements import FONT, HATCH, INK, LINE, MASKED, SOFT, box, rank_colour, words
from cp_ref.spec.pictures.svg_matrix import STRIP, Matrix
from cp_ref.spec.pictures.tile_polygons import Plane, plane
from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.schedule import Schedule
from cp_ref.spec.verify.schedule_costs import report

__all__ = ["rank_colour", "svg_picture"]

_SIDE = 640  # pixels of the matrix's longer side
_LEFT, _TOP, _PANEL, _GAP = 96, 144, 300, 40


def svg_picture(problem: Problem, schedule: Schedule, head: int = 0) -> str:
    """The forward pass as an SVG document: all sequences on the diagonal, or one if all are equal.

    Hovering over a tile names it. `head` is the query head to show, where heads are spread over the ranks.
    """
    alike = problem.qkv_format != "thd" and len(set(problem.sequences)) == 1
    view = plane(problem, schedule, range(1 if alike else len(problem.sequences)), head)
    return _Page(problem, schedule, view, head).document()


class _Page:
    """The elements of one document, top to bottom; `document` puts them together."""

    def __init__(self, problem: Problem, schedule: Schedule, view: Plane, head: int) -> None:
        self.problem, self.schedule, self.view, self.head = problem, schedule, view, head
        self.matrix = Matrix(view, _SIDE, view.steps)
        self.out: list[str] = []

    def document(self) -> str:
        """The whole text."""
        matrix, right = self.matrix, _LEFT + self.matrix.width + _GAP
        self._heading()
        self._place(matrix, _LEFT, _TOP)
        self._axes()
        bottom = self._inset(right, self._facts(right, self._work(right)))
        width, height = right + _PANEL + 24, max(_TOP + matrix.height + 28, bottom)
        size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {FONT} font-size="12" fill="{INK}">',
            f"<title>{escape(title(self.problem, self.schedule))}</title>",
            HATCH,
            box(0, 0, width, height, "#ffffff"),
        ]
        return "\n".join([*head, *self.out, "</svg>"]) + "\n"

    def _place(self, matrix: Matrix, x: float, y: float) -> None:
        matrix.blocks()
        matrix.tiles()
        matrix.owners()
        self.out += [f'<g transform="translate({x:g} {y:g})">', *matrix.out, "</g>"]

    def _heading(self) -> None:
        p = self.problem
        self.out.append(words(_LEFT, 34, "Who computes which scores, and when", size=20, weight=600))
        self.out.append(words(_LEFT, 56, title(p, self.schedule), size=13.5, colour=SOFT))
        tokens = sum(s.len_q for s in p.sequences)
        count = _counted(len(p.sequences), "sequence")
        if len(self.view.blocks) < len(p.sequences) and p.areas is None:
            count += " alike, one shown"
        dims = f"d {p.d_qk}" if p.d_v == p.d_qk else f"d {p.d_qk}/{p.d_v}"
        heads = f"{_counted(p.heads_q, 'query head')} over {p.heads_kv}, {dims}"
        what = f"{count}, {_counted(tokens, 'query token')}; {heads}, {p.dtype}"
        if self.view.some_heads:
            what += f"; query head {self.head} shown"
        self.out.append(words(_LEFT, 75, what, size=13.5, colour=SOFT))

    def _axes(self) -> None:
        one = len(self.view.blocks) == 1 and self.problem.areas is None
        where = "positions" if one else "slots of the packed buffer"
        x, y = _LEFT + self.matrix.width / 2, _TOP - STRIP - 24
        self.out.append(words(x, y, f"keys ({where}, coloured by owner)", colour=SOFT, anchor="middle"))
        x, y = 26, _TOP + self.matrix.height / 2
        turn = f'transform="rotate(-90 {x} {y:.1f})"'
        self.out.append(words(x, y, f"queries ({where}, coloured by owner)", colour=SOFT, anchor="middle", more=turn))

    def _work(self, x: float) -> float:
        """The legend: a bar for the work of every rank at every step. Returns where it ends."""
        steps = self.view.steps
        work: dict[tuple[int, int], int] = defaultdict(int)
        for part in self.view.parts:
            work[part.rank, part.step] += part.pairs
        most, total = max(work.values(), default=1), max(sum(work.values()), 1)
        y, high = _TOP - 4.0, min(26.0, 560 / self.problem.cp_size)
        cell, small = min((_PANEL - 100) / steps, 64), min(12.0, high)
        shares = x + 60 + steps * cell
        self.out.append(words(x, y - 16, "Work by rank and step", size=14, weight=600))
        self.out.append(words(x, y + 6, "rank", size=10.5, colour=SOFT))
        for step in range(0, steps, max(round(20 / cell), 1)):
            self.out.append(words(x + 52 + step * cell, y + 6, str(step), size=10.5, colour=SOFT))
        self.out.append(words(shares, y + 6, "share", size=10.5, colour=SOFT))
        y += 14
        for rank in range(self.problem.cp_size):
            base = y + high / 2 + small / 3
            self.out.append(box(x, y + 1, small * 1.2, high - 3, rank_colour(rank)))
            self.out.append(words(x + 22, base, str(rank), size=small))
            for step in range(steps):
                left, full = x + 52 + step * cell, work[rank, step] / most
                self.out.append(box(left, y + 1, cell - 2, high - 3, MASKED))
                self.out.append(box(left, y + 1, (cell - 2) * full, high - 3, rank_colour(rank, step, steps)))
            self.out.append(words(shares, base, f"{sum(work[rank, s] for s in range(steps)) / total:.1%}", size=small))
            y += high
        return y

    def _facts(self, x: float, y: float) -> float:
        """Balance, bytes, and the other colours. Returns where it ends."""
        costs = report(self.problem, self.schedule)
        facts = [
            ("balance", f"{costs.balance:.3f} (mean rank / busiest)"),
            ("visible", f"{self.problem.pairs:,} pairs a head"),
            ("tiles", f"{sum(r.tiles for r in costs.ranks):,}"),
            ("sent", f"{_bytes(sum(r.forward_bytes for r in costs.ranks))} forward"),
            ("", f"{_bytes(sum(r.backward_bytes for r in costs.ranks))} backward"),
        ]
        y += 26
        for name, value in facts:
            self.out.append(words(x, y, name, colour=SOFT))
            self.out.append(words(x + 60, y, value))
            y += 19
        y += 10
        key = [(MASKED, "masked: nobody computes it")]
        if any(s.len_q < s.slots_q or s.len_kv < s.slots_kv for s in self.problem.sequences):
            key.append(("url(#padding)", "padding"))
        for fill, meaning in key:
            self.out.append(box(x, y - 11, 44, 14, fill, f'stroke="{LINE}"'))
            self.out.append(words(x + 60, y, meaning, colour=SOFT))
            y += 22
        for line in ("In a tile: rank:step, or the step alone.", "A colour is a rank; it pales with the steps."):
            self.out.append(words(x, y + 2, line, colour=SOFT))
            y += 18
        return y + 16

    def _inset(self, x: float, y: float) -> float:
        """The longest of several sequences again, larger, where the diagonal leaves it small. Returns where it ends."""
        if len(self.view.blocks) < 2:
            return y
        longest = max(self.view.blocks, key=lambda b: b.sequence.len_q * b.sequence.len_kv)
        side, s = _PANEL - 36, longest.sequence
        if max(s.slots_q * self.matrix.sy, s.slots_kv * self.matrix.sx) > 0.6 * side or not s.len_q * s.len_kv:
            return y
        view = plane(self.problem, self.schedule, [longest.number], self.head)
        large = Matrix(view, side, self.view.steps, kind="again")
        self.out.append(words(x, y + 14, f"Sequence {longest.number}, the longest, enlarged", size=14, weight=600))
        self._place(large, x + 36, y + 58)
        return y + 58 + large.height + 24


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _bytes(count: float) -> str:
    """A number of bytes in decimal units.

    >>> _bytes(999), _bytes(42_100_000)
    ('999 bytes', '42.1 MB')
    """
    if count < 1000:
        return f"{count:g} bytes"
    units = ("kB", "MB", "GB", "TB", "PB")
    power = min(len(f"{count:.0f}") - 1, 3 * len(units)) // 3
    return f"{count / 1000**power:.1f} {units[power - 1]}"
