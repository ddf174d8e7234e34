"""Output of commands about a problem: its picture, the ranks of its heads, each rank's cost, sizes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.filesize import decimal as size_text
from rich.table import Table

from cp_fast.compile.chosen_schedule import choose_head_chunks
from cp_ref.contract.cli.terminal import coloured, table
from cp_ref.contract.text_pictures import text_picture
from cp_ref.schedules.planners.a2a import head_ranges
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.verify.costs import Report

__all__ = ["cost_table", "heads_line", "show_picture", "size_text"]

_FEW_SHARES = 4  # Up to this number of head ranges, all are named.


def heads_line(problem: Problem) -> str:
    """The ranks of each range of query heads, if a schedule spreads heads over ranks; else empty.

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
    chunks = ", ".join(map(str, choose_head_chunks(problem)))
    cut = f" Head chunks of {chunks} kv heads of each rank go one by one." if chunks else ""
    return f"Query heads {'; '.join(shares)}{more}. The tiles of a rank are of its heads.{cut}"


def show_picture(console: Console, problem: Problem, schedule: Schedule, head: int) -> None:
    """Print the text picture of a query head, in colour, and the ranks of all heads."""
    steps = 1 + max((n for program in schedule.forward for n, step in enumerate(program) if len(step.tiles)), default=0)
    console.print(coloured(text_picture(problem, schedule, width=console.width, head=head), steps))
    if heads := heads_line(problem):
        console.print(heads)
    console.print()


def cost_table(title: str, costs: Report, **more: Sequence[str]) -> Table:
    """Each rank's rows, work and messages; `more` has further columns."""
    columns = (">rank", ">tokens", ">tiles", ">work share", ">sent forward", ">sent backward")
    made = table(title, *columns, *(">" + name.replace("_", " ") for name in more))
    total = sum(r.pairs for r in costs.ranks) or 1
    for rank, (cost, *others) in enumerate(zip(costs.ranks, *more.values(), strict=True)):
        work = f"{cost.tokens:,}", f"{cost.tiles:,}", f"{cost.pairs / total:.1%}"
        made.add_row(str(rank), *work, size_text(cost.forward_bytes), size_text(cost.backward_bytes), *others)
    return made
