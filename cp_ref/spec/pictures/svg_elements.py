"""The elements of the SVG pictures: boxes, words, and a colour for every rank and step."""

from __future__ import annotations

import colorsys
from xml.sax.saxutils import escape

__all__ = ["FONT", "HATCH", "INK", "LINE", "MASKED", "SOFT", "box", "ink_on", "rank_colour", "words"]

_PALETTE = ("4063d8", "d1495b", "2a9d5c", "e08e1b", "8e4ec6", "119da4", "c2418f", "7f6d3f", "5b7083", "94a016")
INK, SOFT, LINE, MASKED = "#1c2430", "#5d6875", "#c9d0d8", "#f1f3f6"
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\""
HATCH = (
    '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#ffffff" fill-opacity="0.55"/>'
    f'<path d="M0 0V6" stroke="{SOFT}" stroke-opacity="0.45" stroke-width="1.6"/></pattern></defs>'
)


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


def ink_on(colour: str) -> str:
    """Ink that is readable on a colour."""
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else INK


def box(x: float, y: float, wide: float, high: float, fill: str, more: str = "", name: str = "") -> str:
    """A rectangle; hovering over it shows `name`."""
    element = (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(wide, 0):.2f}" height="{max(high, 0):.2f}" fill="{fill}" {more}'
    )
    return f"{element.rstrip()}><title>{escape(name)}</title></rect>" if name else f"{element.rstrip()}/>"


def words(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 12,
    colour: str = INK,
    anchor: str = "",
    weight: int = 0,
    more: str = "",
) -> str:
    """A line of text, its baseline at y."""
    extra = (f' text-anchor="{anchor}"' if anchor else "") + (f' font-weight="{weight}"' if weight else "")
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{colour}"'
    return f"<text {where}{extra}{' ' + more if more else ''}>{escape(text)}</text>"
