"""The page's pictures as inline SVG. Colours come from the page's style sheet, by class; every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from markupsafe import Markup

from conformance.coverage import Coverage
from conformance.features import CHOICES, Choice
from conformance.report.masks import Difference, Pair
from conformance.report.ratios import BINS, MOST, Ratios

__all__ = ["LEVELS", "coverage_picture", "histogram", "level", "mask_picture", "masks_differ"]

_LONGEST = 216  # of a mask's longer side, in pixels
_CELL = 11  # of the coverage table
_LEFT, _BOTTOM = 176, 118

LEVELS = (1, 3, 10, 30, 100)
"""The coverage table's shades: at least so many problems."""


def mask_picture(difference: Difference, which: str) -> Markup:
    """`which` is "expected" or "got": queries down, keys across, one square for each pair; wrong ones are marked."""
    d = difference
    rows, columns = len(d.rows), len(d.columns)
    cell = min(20, _LONGEST / max(rows, columns, 1))
    pairs = d.expected if which == "expected" else d.got
    body = [
        Markup('<rect class="hidden" width="{}" height="{}"/>').format(columns, rows),
        _runs("padding", _padding(d), d),
        _runs("visible", pairs, d),
    ]
    if which == "got":
        body += [_runs("extra", d.extra, d), _marks("extra-mark", d.extra, d)]
        body += [_runs("lost", d.missing, d), _marks("lost-mark", d.missing, d)]
    body.append(_lines(d))
    wide, high = 30 + columns * cell + 4, 18 + rows * cell + 4
    place = Markup('<g transform="translate(30 18) scale({:.4g})">').format(cell)
    size = Markup('viewBox="0 0 {:.5g} {:.5g}" width="{:.5g}" height="{:.5g}"').format(wide, high, wide, high)
    label = f"{which}: {len(pairs)} visible pairs of {rows} queries and {columns} keys"
    return Markup('<svg class="mask" role="img" aria-label="{}" {}>{}{}{}</g></svg>').format(
        label, size, Markup("").join(_ticks(d, cell)), place, Markup("").join(body)
    )


def masks_differ(difference: Difference) -> str:
    """The two pictures in a sentence."""
    d = difference
    if d.wrong is None:
        return "What was seen is not known: the picture is what should be."
    missing, extra = d.wrong
    if not missing and not extra:
        return "Every query saw the keys that it should see; what is wrong is not the mask."
    parts = [f"{extra:,} {_pairs(extra)} seen that should be hidden"] if extra else []
    parts += [f"{missing:,} {_pairs(missing)} not seen that should be visible"] if missing else []
    return ", ".join(parts).capitalize() + "."


def _pairs(count: int) -> str:
    return "pair is" if count == 1 else "pairs are"


def _runs(name: str, pairs: Iterable[Pair], d: Difference) -> Markup:
    """Pairs as one path, each run of a row one rectangle."""
    path: list[str] = []
    for q, row in groupby(sorted(pairs), key=lambda pair: pair[0]):
        keys = [k for _, k in row]
        for _, group in groupby(enumerate(keys), key=lambda item: item[1] - item[0]):  # the same in a run
            run = [k for _, k in group]
            path.append(f"M{run[0] - d.columns.start} {q - d.rows.start}h{len(run)}v1h-{len(run)}z")
    return Markup('<path class="{}" d="{}"/>').format(name, "".join(path)) if path else Markup("")


def _marks(name: str, pairs: Iterable[Pair], d: Difference) -> Markup:
    """A cross in every square, or a ring."""
    x, y, shape = (
        (0.25, 0.25, "l.5 .5m0-.5l-.5 .5")
        if name == "extra-mark"
        else (0.75, 0.5, "a.25 .25 0 1 1-.5 0a.25 .25 0 1 1 .5 0")
    )
    path = "".join(f"M{k - d.columns.start + x:g} {q - d.rows.start + y:g}{shape}" for q, k in sorted(pairs))
    return Markup('<path class="{}" d="{}"/>').format(name, path) if path else Markup("")


def _padding(d: Difference) -> Iterator[Pair]:
    """Where either side is padding or tail: nobody sees, nobody is seen."""
    p = d.case.problem
    real_q = {q for s, at in zip(p.sequences, p.starts_q, strict=False) for q in range(at, at + s.len_q)}
    real_k = {k for s, at in zip(p.sequences, p.starts_kv, strict=False) for k in range(at, at + s.len_kv)}
    return ((q, k) for q in d.rows for k in d.columns if q not in real_q or k not in real_k)


def _lines(d: Difference) -> Markup:
    """Where sequences begin and end, and hair lines between tokens."""
    rows, columns = len(d.rows), len(d.columns)
    hair = "".join(f"M0 {n}h{columns}" for n in range(1, rows)) + "".join(f"M{n} 0v{rows}" for n in range(1, columns))
    p = d.case.problem
    cuts = "".join(f"M0 {n - d.rows.start}h{columns}" for n in sorted(set(p.starts_q)) if n in d.rows[1:])
    cuts += "".join(f"M{n - d.columns.start} 0v{rows}" for n in sorted(set(p.starts_kv)) if n in d.columns[1:])
    return Markup('<path class="hair" d="{}"/><path class="cut" d="{}M0 0h{}v{}h-{}z"/>').format(
        hair, cuts, columns, rows, columns
    )


def _ticks(d: Difference, cell: float) -> Iterator[Markup]:
    """The first and the last row and column."""
    for n in dict.fromkeys((0, len(d.rows) - 1)):
        if n >= 0:
            yield Markup('<text x="25" y="{:.5g}" text-anchor="end">{}</text>').format(
                18 + (n + 0.5) * cell + 3.5, d.rows[n]
            )
    for n in dict.fromkeys((0, len(d.columns) - 1)):
        if n >= 0:
            yield Markup('<text x="{:.5g}" y="12" text-anchor="middle">{}</text>').format(
                30 + (n + 0.5) * cell, d.columns[n]
            )


def histogram(ratios: Ratios) -> Markup:
    """How the ratios are spread from 0 to 1.5 bounds, the bound a line."""
    wide, high, bins = 300, 44, ratios.histogram
    bar, most = wide / BINS, max(ratios.histogram)
    parts = []
    for n, count in enumerate(bins):
        if count:
            tall = max(2.0, high * count / most)
            name = "within" if (n + 0.5) * MOST / BINS <= 1 else "beyond"
            ends = (n * MOST / BINS, (n + 1) * MOST / BINS)
            beyond = " and more" if n == BINS - 1 else ""
            parts.append(
                Markup(
                    '<rect class="{}" x="{:.4g}" y="{:.4g}" width="{:.4g}" height="{:.4g}"><title>{}</title></rect>'
                ).format(
                    name,
                    n * bar + 0.5,
                    high - tall,
                    bar - 1,
                    tall,
                    f"{count:,} between {ends[0]:.2f} and {ends[1]:.2f} bounds{beyond}",
                )
            )
    at = wide / MOST
    ticks = Markup("").join(
        Markup('<text x="{:.4g}" y="{}" text-anchor="{}">{}</text>').format(x * at, high + 12, anchor, word)
        for x, anchor, word in (
            (0, "start", "0"),
            (0.5, "middle", "0.5"),
            (1, "middle", "bound"),
            (1.5, "end", "1.5 and more"),
        )
    )
    return Markup(
        '<svg class="spread" role="img" aria-label="{}" viewBox="0 0 {} {}">{}<path class="floor" d="M0 {}h{}"/>'
        '<path class="bound" d="M{:.4g} 0v{}"/>{}</svg>'
    ).format(
        f"{ratios.name}: {len(ratios.values)} problems, the worst at {ratios.values[-1]:.3g} bounds",
        *(wide, high + 14, Markup("").join(parts), high, wide, at, high, ticks),
    )


def level(count: int) -> int:
    """Which shade of `LEVELS` a count has, from 1; 0 for none.

    >>> level(0), level(2), level(1000)
    (0, 1, 5)
    """
    return sum(count >= least for least in LEVELS)


def coverage_picture(coverage: Coverage) -> Markup:
    """The pairs of features, a triangle: how many problems had both, by shade; what never ran is marked."""
    paths: dict[str, list[str]] = {}
    for i, a in enumerate(CHOICES):
        for j, b in enumerate(CHOICES[:i]):
            if a.axis != b.axis:
                state = coverage.state(a, b)
                name = f"l{level(coverage.count(a, b))}" if state == "played" else state
                paths.setdefault(name, []).append(_square(name, j, i))
    size = len(CHOICES) * _CELL
    body = [Markup('<path class="{}" d="{}"/>').format(name, "".join(path)) for name, path in sorted(paths.items())]
    wide, high = _LEFT + size + 8, size + _BOTTOM
    return Markup(
        '<svg class="pairs" role="img" aria-label="pairs of features" viewBox="0 0 {} {}" width="{}" height="{}" '
        'data-left="{}" data-cell="{}">{}<g transform="translate({} 0)">{}<path class="cross" d=""/></g></svg>'
    ).format(wide, high, wide, high, _LEFT, _CELL, Markup("").join(_names(size)), _LEFT, Markup("").join(body))


def _square(name: str, column: int, row: int) -> str:
    x, y, side = column * _CELL, row * _CELL, _CELL - 1
    if name == "never":  # a cross
        return f"M{x + 2.5} {y + 2.5}l5 5m0-5l-5 5"
    if name == "refused":  # a dash
        return f"M{x + 2} {y + 5}h6"
    if name == "impossible":  # a dot
        return f"M{x + 4.5} {y + 5}h1"
    return f"M{x} {y}h{side}v{side}h-{side}z"


def _names(size: int) -> Iterator[Markup]:
    """The name of every choice at its row and its column, and the axes."""
    for axis, choices in groupby(CHOICES, key=lambda choice: choice.axis):
        names = list(choices)
        first = CHOICES.index(names[0])
        y = first * _CELL
        yield Markup('<path class="rule" d="M0 {}H{}"/>').format(y - 0.5, _LEFT + max(y, 1))
        yield Markup('<text class="axis" x="2" y="{}">{}</text>').format(y + 9, axis)
        for n, choice in enumerate(names):
            yield from _name(choice, first + n, size)


def _name(choice: Choice, n: int, size: int) -> Iterator[Markup]:
    short = choice.name.replace("bottom_right", "b.r.").replace("padding_causal", "pad. causal")
    yield Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(_LEFT - 4, n * _CELL + 8.5, short)
    x = _LEFT + n * _CELL + 8.5
    yield Markup('<text x="{}" y="{}" text-anchor="end" transform="rotate(-90 {} {})">{}</text>').format(
        x, size + 4, x, size + 4, short
    )
