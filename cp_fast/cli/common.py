"""What the commands share: reading options, refusing them readably, and the picture in colour."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.box import ROUNDED
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from cp_ref.spec import Unsupported
from cp_ref.spec.picture import rank_colour
from cp_ref.spec.svg_elements import ink_on

__all__ = [
    "BAD_INPUT",
    "CHECK_FAILED",
    "coloured",
    "complain",
    "lengths",
    "readable_errors",
    "size_text",
    "table",
    "window",
]

CHECK_FAILED = 1
BAD_INPUT = 2


def complain(message: str) -> None:
    """One line to standard error, in red where that shows."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble(("error: ", "bold red"), message))


@contextmanager
def readable_errors() -> Iterator[None]:
    """Bad input ends the command with one line and exit code 2 instead of a traceback.

    Only what the package raises about values counts (the options' types are settled); anything else is a bug, and keeps
    its traceback.
    """
    try:
        yield
    except (ValueError, OSError, Unsupported) as error:
        complain(" ".join(str(error).split()))
        raise typer.Exit(BAD_INPUT) from error


def window(text: str) -> tuple[int, int]:
    """LEFT,RIGHT as two integers.

    >>> window("128,0")
    (128, 0)
    """
    sides = _integers("--window", text, "LEFT,RIGHT, two integers such as 128,0; -1 is unbounded")
    if len(sides) != 2:
        raise ValueError(f"--window is {text!r}; it must be LEFT,RIGHT, two integers such as 128,0; -1 is unbounded")
    return sides[0], sides[1]


def lengths(option: str, text: str) -> list[int]:
    """Sequence lengths separated by commas.

    >>> lengths("--seqlens", "100, 200")
    [100, 200]
    """
    rule = "lengths of at least 0 separated by commas, such as 100,200"
    values = _integers(option, text, rule)
    if min(values) < 0:
        raise ValueError(f"{option} is {text!r}; it must be {rule}")
    return values


def _integers(option: str, text: str, rule: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; it must be {rule}") from None


def table(title: str, *columns: str) -> Table:
    """An empty table; columns whose name begins with ">" hold numbers.

    >>> [column.justify for column in table("cost", "name", ">bytes").columns]
    ['left', 'right']
    """
    made = Table(title=title, box=ROUNDED, title_style="bold", title_justify="left")
    for name in columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return made


def coloured(picture: str, steps: int) -> Text:
    """A text picture with every cell on its rank's colour, paler with each step, as in the SVG."""
    picture = "\n".join(line + " " for line in picture.split("\n"))  # a cell's colour reaches over the gap behind it
    text = Text(picture, no_wrap=True, overflow="crop")
    for cell in re.finditer(r"(?<=[│ ])(\d+):(\d+)(?!\S)", picture):
        colour = rank_colour(int(cell[1]), int(cell[2]), steps)
        text.stylize(f"{ink_on(colour)} on {colour}", cell.start(), cell.end() + 1)
    return text


def size_text(count: int) -> str:
    """A number of bytes, in decimal units."""
    return decimal(count)
