"""The sections that the command `plan` prints of a problem, for both packages; the user may ask for some of them.

walk        the schedule step by step, for somebody who has never seen context parallelism (`explain`)
schedule    the score matrix with who computes what, and the messages and tiles of each step
costs       the work and the bytes of each rank, and the proof that the schedule is right
layouts     what the largest rank has under every layout and schedule
prediction  time and memory on a machine: of `cp_fast` alone, which passes it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.filesize import decimal as size_text
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from typer import Option

from cp_ref.problems.compare_layouts import compare_layouts
from cp_ref.schedules.planners.a2a import head_ranges
from cp_ref.schedules.planners.choose_schedule import why_chosen
from cp_ref.schedules.planners.make_schedule import SCHEDULES
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Message, RankSchedule, Schedule, Step
from cp_ref.schedules.values import check_choice
from cp_ref.schedules.verify.costs import Report, message_bytes, tile_pairs
from cp_ref.schedules.verify.proof import verify
from cp_ref.schedules.words import AUTO, CP_COMM_TYPES, LAYOUTS, Unsupported
from cp_ref.show.cli.options import ProblemOptions, check_number, window
from cp_ref.show.cli.terminal import check_svg, coloured, one_line, table
from cp_ref.show.svg_pictures import svg_picture
from cp_ref.show.text_pictures import ownership_picture, text_picture

__all__ = [
    "Description",
    "HeadOption",
    "RankOption",
    "SectionsOption",
    "SvgOption",
    "TextOption",
    "cost_table",
    "heads_line",
    "refuse_unread",
    "show_picture",
    "size_text",
]

SectionsOption = Annotated[str, Option(metavar="NAMES", help="Only these sections, separated by commas.")]
RankOption = Annotated[int | None, Option(help="Show the steps of this rank only.")]
HeadOption = Annotated[int, Option(help="The query head that pictures show.")]
SvgOption = Annotated[Path | None, Option(help="Write the picture to this file too.")]
TextOption = Annotated[bool, Option("--text", help="Print the schedule's canonical text and nothing else.")]

_OF_PLANS = ("walk", "schedule", "costs")  # The sections that a plan is made for.
_FEW_RANKS = {"walk": 8, "schedule": 4}  # Up to here the steps of all ranks are shown unasked.
_FEW_SHARES = 4  # Up to this number of head ranges, all are named.


@dataclass(frozen=True)
class Description:
    """A user's questions about a problem's plan, and the form of the answers.

    request: the options that describe the problem. sections: names, as given; empty for all but the walk. more: the
    caller's sections. A section that is not asked for by name says in a line why it does not take the problem.
    """

    request: ProblemOptions
    sections: str = ""
    rank: int | None = None
    head: int = 0
    svg: Path | None = None
    text: bool = False
    more: Mapping[str, Callable[[Console], None]] = field(default_factory=dict[str, Callable[[Console], None]])
    console: Console = field(default_factory=lambda: Console(highlight=False))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The sections to show."""
        known = ("walk", "schedule", "costs", "layouts", *self.more)
        if not self.sections:
            return known[1:]
        names = tuple(name.strip() for name in self.sections.split(","))
        for name in names:
            check_choice("--sections", name, known)
        return names

    @cached_property
    def planned(self) -> tuple[Problem, Schedule]:
        """The problem and the schedule of all ranks."""
        return self.request.planned()

    @cached_property
    def costs(self) -> Report:
        """The schedule's costs, when it is proved."""
        return verify(*self.planned)

    def show(self) -> None:
        """Print it.

        Raises:
            ValueError, TypeError: naming what is wrong. Unsupported: naming what is missing.
        """
        of_plan = self.text or any(name in _OF_PLANS for name in self.names)
        if not of_plan:
            refuse_unread(f"--sections {','.join(self.names)}", rank=self.rank, head=self.head or None, svg=self.svg)
        check_svg(self.svg)
        if self.rank is not None:
            check_number("--rank", self.rank, self.request.cp_size)
        if of_plan:
            problem, schedule = self.planned
            check_number("--head", self.head, problem.heads_q)
            if self.svg is not None:
                self.svg.write_text(svg_picture(problem, schedule, self.head), encoding="utf-8")
            if self.text:
                typer.echo(_canonical(schedule, self.rank), nl=False)
                return
            _ = self.costs  # Proved before anything is shown.
        ways: dict[str, Callable[[Console], None]] = {
            "walk": self._walk,
            "schedule": self._schedule,
            "costs": self._costs,
            "layouts": lambda console: console.print(_layouts(self.request)),
            **self.more,
        }
        for name in self.names:
            try:
                ways[name](self.console)
            except (ValueError, Unsupported) as error:
                if self.sections:
                    raise
                self.console.print(f"{name}: not for this problem: {one_line(error)}", markup=False)
        if self.svg is not None:
            self.console.print(f"picture written to {self.svg}", soft_wrap=True, markup=False)

    def _ranks(self, section: str) -> list[int]:
        if self.rank is not None:
            return [self.rank]
        return list(range(self.request.cp_size if self.request.cp_size <= _FEW_RANKS[section] else 1))

    def _walk(self, console: Console) -> None:
        _Walk(console, *self.planned, self._ranks("walk"), self.head).show(self.request.padded, self.costs)

    def _schedule(self, console: Console) -> None:
        problem, schedule = self.planned
        show_picture(console, problem, schedule, self.head, self.request.head_chunks(problem))
        if len(shown := self._ranks("schedule")) < problem.cp_size and self.rank is None:
            console.print(f"The steps of rank 0 follow; --rank R shows another's (0 to {problem.cp_size - 1}).")
        for direction, programs in (("forward", schedule.forward), ("backward", schedule.backward)):
            columns = (">rank", ">step", "sends", "receives", ">tiles", ">pairs a head")
            steps = table(f"{direction}, step by step", *columns)
            for rank in shown:
                _add_steps(steps, problem, rank, programs[rank])
            console.print(steps)

    def _costs(self, console: Console) -> None:
        problem, costs = self.planned[0], self.costs
        held = [f"{cost.held_rows:,}" for cost in costs.ranks]
        console.print(cost_table("cost of each rank", costs, most_kv_rows_held=held))
        console.print(
            f"balance {costs.balance:.3f} (the mean rank's work over the busiest's); "
            f"{size_text(costs.sent_bytes)} sent by all ranks, forward and backward"
        )
        if self.request.cp_comm_type == "auto":
            console.print(why_chosen(problem, AUTO))
        console.print(
            f"[green]verified[/]: every visible pair ({problem.pairs:,} a head) is computed exactly once, forward and "
            "backward; every operand is there when it is used, every message is expected, every gradient comes home, "
            "nothing deadlocks"
        )


def refuse_unread(by: str, **options: object) -> None:
    """Raise ValueError for an option that is given, and would be ignored.

    >>> refuse_unread("--sections costs", cp_rank=3)
    Traceback (most recent call last):
        ...
    ValueError: --cp-rank is 3, which --sections costs does not look at; leave it out
    """
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, which {by} does not look at; leave it out")


# ---- schedule and costs


def heads_line(problem: Problem, head_chunks: Sequence[int] = ()) -> str:
    """The ranks of each range of query heads, if a schedule spreads heads over ranks; else empty.

    >>> heads_line(Problem(4, (), "a2a+p2p", 2, heads_q=4, heads_kv=2))
    'Query heads 0-1: ranks 0, 2; 2-3: ranks 1, 3. A rank has all heads of documents that stay on it.'
    """
    if problem.a2a_size == 1:
        return ""
    shares = list[str]()
    for place in range(min(problem.a2a_size, _FEW_SHARES)):
        (first, stop), _ = head_ranges(problem.workload, place)
        ranks = [str(rank) for rank in range(place, problem.cp_size, problem.a2a_size)]
        heads = str(first) if stop - first == 1 else f"{first}-{stop - 1}"
        shares.append(f"{heads}: rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
    more = "; and so on" if problem.a2a_size > _FEW_SHARES else ""
    chunks = ", ".join(map(str, head_chunks))
    cut = f" Head chunks of {chunks} kv heads of each rank go one by one." if chunks else ""
    return f"Query heads {'; '.join(shares)}{more}. A rank has all heads of documents that stay on it.{cut}"


def show_picture(
    console: Console, problem: Problem, schedule: Schedule, head: int, head_chunks: Sequence[int] = ()
) -> None:
    """Print the text picture of a query head, in colour, and the ranks of all heads."""
    steps = 1 + max((n for program in schedule.forward for n, step in enumerate(program) if len(step.tiles)), default=0)
    console.print(coloured(text_picture(problem, schedule, width=console.width, head=head), steps))
    if heads := heads_line(problem, head_chunks):
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


def _add_steps(steps_table: Table, problem: Problem, rank: int, program: RankSchedule) -> None:
    for n, step in enumerate(program):
        pairs = int(tile_pairs(problem.workload.areas, step.tiles).sum())
        steps_table.add_row(
            str(rank),
            str(n),
            "\n".join(_message(problem, m, "to") for m in step.sends) or "-",
            "\n".join(_message(problem, m, "from") for m in step.recvs) or "-",
            str(len(step.tiles)),
            f"{pairs:,}",
            end_section=n == len(program) - 1,
        )


def _message(problem: Problem, message: Message, towards: str) -> str:
    rows, size = message.pieces.total, size_text(message_bytes(problem, message))
    return f"{message.kind} {rows:,} rows {towards} {message.peer} ({size})"


def _canonical(schedule: Schedule, rank: int | None) -> str:
    """The whole text, or the parts of one rank."""
    if rank is None:
        return str(schedule)
    lines, keep = list[str](), True
    for line in str(schedule).splitlines():
        if line.startswith(("forward", "backward")):
            keep = line.endswith(f" rank {rank}")
        lines += [line] if keep else []
    return "\n".join(lines) + "\n"


# ---- layouts


def _layouts(request: ProblemOptions) -> Table:
    """The costs of the largest rank, one line for each layout and schedule. Layout and schedule of the request are not
    looked at; its batch is packed.
    """
    if request.seqlens_kv or request.seqlen_kv is not None:
        raise ValueError("layouts are compared for self-attention; --seqlens-kv and --seqlen-kv do not go with it")
    if request.areas:
        raise ValueError(f"--areas is {request.areas!r}; layouts are compared for masks and windows")
    lengths, sizes = request.lengths_q or [request.length] * request.count, request.sizes()
    costs = compare_layouts(
        lengths,
        cp_size=request.cp_size,
        attn_mask_type=cast(Any, request.mask_type),
        window_size=window(request.window),
        **{name: sizes[name] for name in ("heads_q", "heads_kv", "d_qk", "d_v")},
        dtype=request.dtype,
        cp_comm_types=[name for name in CP_COMM_TYPES if name != "a2a+p2p"],
    )
    made = table(
        f"{len(lengths):,} documents, {sum(lengths):,} tokens on {request.cp_size} ranks: what the largest rank has",
        *("layout", "schedule", ">work / mean", ">K/V rows received", ">sent, both passes", ">tail rows"),
    )
    for n, cost in enumerate(costs, 1):
        numbers = f"{cost.work:.3f}", f"{cost.kv_rows:,.0f}", size_text(cost.sent_bytes), f"{cost.tail:,}"
        cells = ("refused", "", "", "") if cost.refused else numbers
        made.add_row(cost.layout, cost.cp_comm_type, *cells, end_section=n % (len(costs) // len(LAYOUTS)) == 0)
    made.caption = "\n".join(dict.fromkeys(f"refused: {cost.refused}" for cost in costs if cost.refused)) or None
    return made


# ---- the walk


_IDEA = (
    "Every token's query, key and value live on one rank, its owner; but a query has to meet keys of other ranks too. "
    "The schedule says who sends what to whom, and who computes which part of the score matrix (queries x keys) when."
)
_LINES = (
    "The lines below are those of print(plan.schedule); rows are rows of the global buffer. send kv [0:2] to 1: rows 0 "
    "and 1 of keys and values go to rank 1. tile 0 q[2:4] k[0:2]: query rows 2 and 3 against key rows 0 and 1 of area "
    "0; h0:2 are heads 0 and 1. The messages of a step travel while its tiles are computed. out are partial outputs "
    "with their LSE, do is the output's gradient, dq and dkv are gradients."
)
_BACKWARD = (
    "The backward pass computes the same tiles again, with the gradient of the output (do) and the final LSE. "
    "Gradients of keys and values arise wherever a tile was, and travel to their owner."
)


class _Walk:
    """The sections of the walk-through, top to bottom."""

    def __init__(self, console: Console, problem: Problem, schedule: Schedule, ranks: list[int], head: int) -> None:
        self.console, self.problem, self.schedule, self.ranks, self.head = console, problem, schedule, ranks, head
        self._steps = max(map(len, schedule.forward))

    def show(self, padded: int, costs: Report) -> None:
        """All of it."""
        p, width = self.problem, self.console.width - 1
        self._say("The problem", f"{self._here()}.", _IDEA)
        self._say(f"Who owns what: {p.layout_name}")
        if padded:
            self._say("", f"{padded} slots of padding were added, so that every length divides.")
        self.console.print(f"{ownership_picture(p.workload.ownership, width)}\n", markup=False)
        self._say(f"The schedule: {p.cp_comm_type}", SCHEDULES[p.cp_comm_type].text)
        picture = text_picture(p, self.schedule, width=width, head=self.head)
        self.console.print(coloured(picture, self._steps))
        self._say("", "", _LINES)
        if len(self.ranks) < p.cp_size:
            self._say("", f"The steps of rank {self.ranks[0]} follow; --rank shows another's.")
        self._pass("Forward", self.schedule.forward)
        self._say("The way back", _BACKWARD)
        self._pass("Backward", self.schedule.backward)
        self._say(
            "The sum",
            f"Verified: each of the {p.pairs} visible pairs of a head is computed exactly once in each pass, every row "
            "is there when it is used, and every result ends at its owner. Balance (mean rank's work over the "
            f"busiest's) {costs.balance:.3f}; {costs.sent_bytes:,} bytes are sent.",
        )

    def _here(self) -> str:
        p = self.problem
        lengths = [f"{s.len_q}" if s.len_q == s.len_kv else f"{s.len_q} x {s.len_kv}" for s in p.sequences]
        count = "1 sequence" if len(lengths) == 1 else f"{len(lengths)} sequences"
        mask = p.attn_mask_type if p.areas is None else f"who sees whom as {len(p.areas)} areas say"
        mask += f", window {p.window_size}" if p.window_size != (-1, -1) else ""
        heads = f"{p.heads_q} query heads over {p.heads_kv} key/value heads"
        return f"{count} of {', '.join(lengths)} tokens ({p.qkv_format}), {heads}, {mask}, {p.cp_size} ranks"

    def _pass(self, name: str, rank_schedules: tuple[tuple[Step, ...], ...]) -> None:
        """All steps of one pass: the forward pass with pictures, the backward pass has the same tiles."""
        count = max(map(len, rank_schedules))
        for number in range(count):
            steps = {
                rank: rank_schedule[number]
                for rank, rank_schedule in enumerate(rank_schedules)
                if number < len(rank_schedule)
            }
            self._say(f"{name}, step {number} ({count} in all)")
            if name == "Forward" and any(len(step.tiles) for step in steps.values()):
                self._picture(number)
            for rank in self.ranks:
                if lines := list(self.schedule.lines(steps.get(rank, Step()))):
                    self.console.print("\n    ".join((f"rank {rank}", *lines)), soft_wrap=True, markup=False)
            self.console.print()

    def _picture(self, number: int) -> None:
        """The score matrix so far: this step's cells are named, those of earlier steps are marked +."""
        so_far = tuple(tuple(s if n <= number else Step() for n, s in enumerate(p)) for p in self.schedule.forward)
        schedule = replace(self.schedule, forward=so_far)
        picture = text_picture(self.problem, schedule, width=self.console.width - 1, head=self.head).split("\n\n")[1]
        done = re.sub(r"\d+:(\d+)", lambda m: m[0] if int(m[1]) == number else f"{'+':^{len(m[0])}}", picture)
        self.console.print(coloured(done, self._steps, paler=False))
        self.console.print("R:S computed now by rank R, + computed before, . not yet or never (masked)\n", style="dim")

    def _say(self, heading: str, *paragraphs: str) -> None:
        if heading:
            self.console.print(Rule(Text(heading, "bold"), align="left"))
        for words in paragraphs:
            self.console.print(Text(f"{words}\n" if words else ""))
