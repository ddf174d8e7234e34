"""A schedule as one SVG file: a polygon for each tile, coloured by rank and paler with each step.

On the left is the score matrix; on the right the work by rank and step, the costs, and the longest sequence, enlarged.
"""

from __future__ import annotations

from collections import defaultdict

from cp_ref.spec.pictures.plane import Plane, few_colours, plane
from cp_ref.spec.pictures.problem_title import title
from cp_ref.spec.pictures.svg_elements import LINE, MASKED, PADDING, SOFT, Drawing, rank_colour
from cp_ref.spec.pictures.svg_matrix import STRIP, Matrix
from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.schedule import Schedule
from cp_ref.spec.verify.schedule_costs import report

__all__ = ["svg_picture"]

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
