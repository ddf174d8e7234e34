"""An SVG drawing, element by element, and a colour for every rank and step."""

from __future__ import annotations

import colorsys
from xml.sax.saxutils import escape

__all__ = ["LINE", "MASKED", "PADDING", "SOFT", "Drawing", "ink_on", "rank_colour"]

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
