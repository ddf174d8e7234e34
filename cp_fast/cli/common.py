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

from cp_ref.spec import CP_COMM_TYPES, Problem, Schedule, Unsupported, check_choice, head_ranges
from cp_ref.spec.picture import rank_colour, text_picture
from cp_ref.spec.svg_elements import ink_on

__all__ = [
    "BAD_INPUT",
    "CHECK_FAILED",
    "check_head",
    "complain",
    "exchanging",
    "heads_line",
    "lengths",
    "one_line",
    "picture",
    "readable_errors",
    "size_text",
    "table",
    "window",
]

CHECK_FAILED = 1
BAD_INPUT = 2
_FEW_SHARES = 4  # of the heads: up to here all are named


def complain(message: str) -> None:
    """One line to standard error, in red where that shows."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble(("error: ", "bold red"), message))


@contextmanager
def readable_errors() -> Iterator[None]:
    """Bad input ends the command with one line and exit code 2 instead of a traceback.

    Only what the package raises about its arguments counts, and files that cannot be written; anything else is a bug,
    and keeps its traceback.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, Unsupported) as error:
        complain(one_line(error))
        raise typer.Exit(BAD_INPUT) from error


def one_line(error: Exception) -> str:
    """An error's message, on one line.

    >>> one_line(ValueError("this problem is not supported:\\n  fa4 lacks softcap\\n  cpu has it"))
    'this problem is not supported: fa4 lacks softcap; cpu has it'
    """
    first, *more = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [""]
    return f"{first} {'; '.join(more)}" if first.endswith(":") and more else " ".join((first, *more))


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


def exchanging(cp_comm_type: str, a2a_size: int | None, ranks: int) -> int:
    """How many ranks exchange heads: `a2a_size` of the problem, from --a2a-size (None where it is not given).

    >>> exchanging("a2a+p2p", None, 4), exchanging("a2a", None, 4), exchanging("p2p", None, 4)
    (2, 4, 1)
    """
    check_choice("cp_comm_type", cp_comm_type, CP_COMM_TYPES)
    if cp_comm_type != "a2a+p2p":
        if a2a_size is not None:
            raise ValueError(f"--a2a-size is {a2a_size}, but --cp-comm-type is {cp_comm_type}; only a2a+p2p takes it")
        return ranks if cp_comm_type == "a2a" else 1
    size, unless = (2, " unless it is given") if a2a_size is None else (a2a_size, "")
    if size < 1 or ranks % size:
        raise ValueError(f"--a2a-size is {size}{unless}; it must divide the number of ranks, {ranks}")
    return size


def check_head(head: int, problem: Problem) -> None:
    """--head is one of the problem's query heads."""
    if not 0 <= head < problem.heads_q:
        raise ValueError(f"--head is {head}; it must be 0 to {problem.heads_q - 1}")


def heads_line(problem: Problem) -> str:
    """Who attends with which query heads, where a schedule spreads them over the ranks; else nothing.

    >>> heads_line(Problem(4, (), "a2a+p2p", 2, heads_q=4, heads_kv=2))
    'Query heads 0-1: ranks 0, 2; 2-3: ranks 1, 3. The tiles of a rank are of its heads.'
    """
    if problem.a2a_size == 1:
        return ""
    shares = []
    for place in range(min(problem.a2a_size, _FEW_SHARES)):
        (first, stop), _ = head_ranges(problem.workload, place)
        ranks = [str(rank) for rank in range(place, problem.cp_size, problem.a2a_size)]
        heads = str(first) if stop - first == 1 else f"{first}-{stop - 1}"
        shares.append(f"{heads}: rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
    more = "; and so on" if problem.a2a_size > _FEW_SHARES else ""
    stages = problem.workload.stages
    cut = f" Stages of {', '.join(map(str, stages))} kv heads of each rank go one by one." if len(stages) > 1 else ""
    return f"Query heads {'; '.join(shares)}{more}. The tiles of a rank are of its heads.{cut}"


def table(title: str, *columns: str) -> Table:
    """An empty table; columns whose name begins with ">" hold numbers.

    >>> [column.justify for column in table("cost", "name", ">bytes").columns]
    ['left', 'right']
    """
    made = Table(title=title, box=ROUNDED, title_style="bold", title_justify="left")
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        made.add_column(name.removeprefix(">"), justify=justify, overflow="fold")  # a long path is folded, not cut
    return made


def picture(problem: Problem, schedule: Schedule, width: int, head: int) -> Text:
    """The text picture of a query head, with every cell on its rank's colour, paler with each step, as in the SVG."""
    steps = 1 + max((n for program in schedule.forward for n, step in enumerate(program) if len(step.tiles)), default=0)
    lines = text_picture(problem, schedule, width=width, head=head).split("\n")
    cells = "\n".join(line + " " for line in lines)  # a cell's colour reaches over the gap behind it
    text = Text(cells, no_wrap=True, overflow="crop")
    for cell in re.finditer(r"(?<=[│ ])(\d+):(\d+)(?!\S)", cells):
        colour = rank_colour(int(cell[1]), int(cell[2]), steps)
        text.stylize(f"{ink_on(colour)} on {colour}", cell.start(), cell.end() + 1)
    return text


def size_text(count: int) -> str:
    """A number of bytes, in decimal units."""
    return decimal(count)
