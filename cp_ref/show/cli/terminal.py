"""The output of commands: refusals on one line, tables, pictures in colour."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cp_ref.schedules.words import Unsupported
from cp_ref.show.svg_pictures import ink_on, rank_colour

__all__ = [
    "BAD_INPUT",
    "CHECK_FAILED",
    "check_svg",
    "coloured",
    "complain",
    "one_line",
    "readable_errors",
    "table",
]

CHECK_FAILED = 1
BAD_INPUT = 2


def complain(message: str) -> None:
    """One line to standard error, in red where that shows."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble(("error: ", "bold red"), message))


@contextmanager
def readable_errors() -> Generator[None]:
    """Bad input ends the command with one line and exit code 2 instead of a traceback.

    This covers the package's errors about its arguments and files that cannot be written; anything else is a bug and
    keeps its traceback.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, Unsupported) as error:
        complain(one_line(error))
        raise typer.Exit(BAD_INPUT) from error


def check_svg(path: Path | None) -> None:
    """Raise if a picture's file is given and its name does not end in .svg: only SVG is written.

    >>> check_svg(Path("plan.png"))
    Traceback (most recent call last):
        ...
    ValueError: --svg is 'plan.png'; pictures are SVG, so the name must end in .svg
    """
    if path is not None and path.suffix.lower() != ".svg":
        raise ValueError(f"--svg is {str(path)!r}; pictures are SVG, so the name must end in .svg")


def one_line(error: Exception) -> str:
    """An error's message, on one line.

    >>> one_line(ValueError("this problem is not supported:\\n  fa4 lacks areas\\n  cpu has it"))
    'this problem is not supported: fa4 lacks areas; cpu has it'
    """
    first, *more = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [""]
    return f"{first} {'; '.join(more)}" if first.endswith(":") and more else " ".join((first, *more))


def table(title: str, *columns: str) -> Table:
    """An empty table, without a title for ""; columns whose name begins with ">" hold numbers.

    >>> [column.justify for column in table("cost", "name", ">bytes").columns]
    ['left', 'right']
    """
    made = Table(title=title or None, box=ROUNDED, title_style="bold", title_justify="left")
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        made.add_column(name.removeprefix(">"), justify=justify, overflow="fold")  # a long path is folded, not cut
    return made


def coloured(picture: str, steps: int, *, paler: bool = True) -> Text:
    """A text picture with cells on their rank's colour, as in the SVG: paler with each of `steps` steps, or not."""
    cells = "\n".join(line + " " for line in picture.split("\n"))  # a cell's colour reaches over the gap behind it
    text = Text(cells, no_wrap=True, overflow="crop")
    for cell in re.finditer(r"(?<=[│ ])(\d+):(\d+)(?!\S)", cells):
        colour = rank_colour(int(cell[1]), int(cell[2]) if paler else 0, steps)
        text.stylize(f"{ink_on(colour)} on {colour}", cell.start(), cell.end() + 1)
    return text
