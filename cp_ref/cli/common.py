"""What the commands share: reading small options, and refusing them readably."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import typer
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cp_ref.spec import Unsupported

__all__ = ["BAD_INPUT", "DIFFERENT", "integers", "place", "readable_errors", "table"]

DIFFERENT = 1
BAD_INPUT = 2


@contextmanager
def readable_errors() -> Generator[None]:
    """Bad input ends the command with one line on standard error and exit code 2 instead of a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, Unsupported) as error:
        message = " ".join(str(error).split())
        Console(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble(("error: ", "bold red"), message))
        raise typer.Exit(BAD_INPUT) from error


def integers(option: str, text: str, rule: str, least: int, separator: str = ",") -> list[int]:
    """Integers of at least `least`; ValueError naming the option, its value and the rule.

    >>> integers("--seqlens", "100, 200", "lengths separated by commas", 0)
    [100, 200]
    """
    try:
        values = [int(word) for word in text.split(separator)]
    except ValueError:
        values = []
    if not values or min(values) < least:
        raise ValueError(f"{option} is {text!r}; it must be {rule}")
    return values


def place(option: str, text: str) -> tuple[int, int]:
    """SEQ:POS as two integers.

    >>> place("--query", "0:13")
    (0, 13)
    """
    rule = "SEQ:POS, the number of a sequence and a position in it, both from 0, such as 0:13"
    values = integers(option, text, rule, 0, ":")
    if len(values) != 2:
        raise ValueError(f"{option} is {text!r}; it must be {rule}")
    return values[0], values[1]


def table(*columns: str) -> Table:
    """An empty table; columns whose name begins with ">" hold numbers.

    >>> [column.justify for column in table("name", ">rows").columns]
    ['left', 'right']
    """
    made = Table(box=ROUNDED)
    for name in columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return made
