"""`explain`: one problem, step by step, for somebody who has never seen context parallelism."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from typer import Option

from cp_ref.cli.explained_problem import Request
from cp_ref.cli.values import checked_position, show_values
from cp_ref.cli.words import (
    BACKWARD,
    IDEA,
    about,
    layout_words,
    legend,
    message_words,
    rows_words,
    step_words,
    tile_words,
)
from cp_ref.common.cli.options import check_number, integers, with_options
from cp_ref.common.cli.terminal import check_svg, coloured, table
from cp_ref.spec import Problem, Schedule, Step, verify
from cp_ref.spec.pictures.text_pictures import svg_picture, text_picture

__all__ = ["explain"]

_FEW_RANKS = 8  # up to here all ranks are shown unasked


@with_options
def explain(
    request: Request,
    values: Annotated[bool, Option("--values", help="Run it on random tensors too, and follow one position.")] = False,
    query: Annotated[
        str, Option(help="SEQ:POS, the position that --values follows; else the longest one's last.")
    ] = "",
    head: Annotated[int, Option(help="The query head that pictures and --values show.")] = 0,
    rank: Annotated[int | None, Option(help="Show the steps of this rank only.")] = None,
    svg: Annotated[Path | None, Option(help="Write the whole picture to this file too.")] = None,
) -> None:
    """Walk through a problem: who owns what, and step by step what is sent and what is computed where.

    Exit code: 0, or 2 for a problem that is refused.
    """
    check_svg(svg)
    console = Console(highlight=False)
    problem, schedule = request.problem, request.plan.schedule
    position = _place(query) if query else None
    check_number("--head", head, problem.heads_q)
    if rank is not None:
        check_number("--rank", rank, problem.cp_size)
    if position is not None and not values:
        raise ValueError("--query is for --values, which is not given")
    followed = checked_position(problem, position) if values else None
    if svg is not None:
        svg.write_text(svg_picture(problem, schedule, head), encoding="utf-8")
    ranks = [rank] if rank is not None else list(range(problem.cp_size if problem.cp_size <= _FEW_RANKS else 1))
    _Walk(console, problem, schedule, ranks, head).show(request.padded)
    if followed is not None:
        show_values(console, request, followed, head)
    if svg is not None:
        console.print(f"picture written to {svg}", soft_wrap=True, markup=False)


class _Walk:
    """The sections of the walk-through, top to bottom."""

    def __init__(self, console: Console, problem: Problem, schedule: Schedule, ranks: list[int], head: int) -> None:
        self.console, self.problem, self.schedule, self.ranks, self.head = console, problem, schedule, ranks, head

    def show(self, padded: int) -> None:
        """All of it."""
        self._heading("The problem")
        self._say(IDEA)
        self._say(f"Here: {self._here()}.")
        self._heading("Who owns what")
        self._say(layout_words(self.problem))
        if padded:
            self._say(f"{padded} slots of padding were added, so that every length divides.")
        self._owners()
        self._heading(f"The schedule: {self.problem.cp_comm_type}")
        self._say(about(self.problem))
        picture = text_picture(self.problem, self.schedule, width=self.console.width - 1, head=self.head)
        self.console.print(coloured(picture, self._steps("forward")))
        self.console.print()
        self._say(legend(self.problem))
        if len(self.ranks) < self.problem.cp_size:
            self._say(f"The steps of rank {self.ranks[0]} follow; --rank shows another's.")
        for direction in ("forward", "backward"):
            self._pass(direction)
        self._heading("The sum")
        costs = verify(self.problem, self.schedule)
        self._say(
            f"Verified: each of the {self.problem.pairs} visible pairs of a head is computed exactly once in each "
            "pass, every row is there when it is used, and every result ends at its owner. Balance (mean rank's work "
            f"over the busiest's) {costs.balance:.3f}; {costs.sent_bytes:,} bytes are sent."
        )

    def _here(self) -> str:
        p = self.problem
        lengths = [f"{s.len_q}" if s.len_q == s.len_kv else f"{s.len_q} x {s.len_kv}" for s in p.sequences]
        count = "1 sequence" if len(lengths) == 1 else f"{len(lengths)} sequences"
        mask = p.attn_mask_type if p.areas is None else f"who sees whom as {len(p.areas)} areas say"
        mask += f", window {p.window_size}" if p.window_size != (-1, -1) else ""
        heads = f"{p.heads_q} query heads over {p.heads_kv} key/value heads"
        what = f"{count} of {', '.join(lengths)} tokens ({p.qkv_format}), {heads}, {mask}"
        return f"{what}, {p.cp_size} ranks"

    def _owners(self) -> None:
        p = self.problem
        alike = all((s.len_q, s.slots_q) == (s.len_kv, s.slots_kv) for s in p.sequences)
        owners = table("", ">rank", "tokens") if alike else table("", ">rank", "queries", "keys and values")
        for rank in range(p.cp_size):
            sides = [self._owned(rank, side, heads) for side, heads in (("q", p.heads_q), ("kv", p.heads_kv))]
            owners.add_row(str(rank), *sides[: 1 if alike else 2])
        self.console.print(owners)
        self.console.print()

    def _owned(self, rank: int, side: str, heads: int) -> str:
        rows = self.problem.workload.ownership.side(side).of(rank).rows()
        return rows_words(self.problem, side, ((start, stop, 0, heads) for _, start, stop, _ in rows)) or "none"

    def _pass(self, direction: str) -> None:
        """All steps of one pass: the forward pass with pictures, the backward pass has the same tiles."""
        if direction == "backward":
            self._heading("The way back")
            self._say(BACKWARD)
        for number in range(self._steps(direction)):
            self._heading(f"{direction.capitalize()}, step {number} ({self._steps(direction)} in all)")
            steps = {r: self._step(direction, r, number) for r in range(self.problem.cp_size)}
            self._say(step_words(direction, steps.values()))
            if direction == "forward" and any(len(step.tiles) for step in steps.values()):
                self._picture(number)
            self._table({r: steps[r] for r in self.ranks})

    def _picture(self, number: int) -> None:
        """The score matrix so far: this step's cells are named, those of earlier steps are marked +."""
        so_far = tuple(tuple(s if n <= number else Step() for n, s in enumerate(p)) for p in self.schedule.forward)
        schedule = replace(self.schedule, forward=so_far)
        picture = text_picture(self.problem, schedule, width=self.console.width - 1, head=self.head).split("\n\n")[1]
        done = re.sub(r"\d+:(\d+)", lambda m: m[0] if int(m[1]) == number else f"{'+':^{len(m[0])}}", picture)
        self.console.print(coloured(done, self._steps("forward"), paler=False))
        self.console.print("R:S computed now by rank R, + computed before, . not yet or never (masked)", style="dim")

    def _table(self, steps: dict[int, Step]) -> None:
        p = self.problem
        columns = table("", ">rank", "computes", "sends", "receives")
        for rank, step in steps.items():
            columns.add_row(
                str(rank),
                "\n".join(tile_words(p, step.tiles)) or "-",
                "\n".join(message_words(p, m, "to") for m in step.sends) or "-",
                "\n".join(message_words(p, m, "from") for m in step.recvs) or "-",
            )
        if any(step != Step() for step in steps.values()):
            self.console.print(columns)
            self.console.print()

    def _steps(self, direction: str) -> int:
        return max(len(p) for p in (self.schedule.forward if direction == "forward" else self.schedule.backward))

    def _step(self, direction: str, rank: int, number: int) -> Step:
        program = (self.schedule.forward if direction == "forward" else self.schedule.backward)[rank]
        return program[number] if number < len(program) else Step()

    def _heading(self, words: str) -> None:
        self.console.print(Rule(Text(words, "bold"), align="left"))

    def _say(self, words: str) -> None:
        self.console.print(Text(words))
        self.console.print()


def _place(text: str) -> tuple[int, int]:
    """SEQ:POS as two integers.

    >>> _place("0:13")
    (0, 13)
    """
    rule = "SEQ:POS, the number of a sequence and a position in it, both from 0, such as 0:13"
    values = integers("--query", text, rule, ":")
    if len(values) != 2 or min(values) < 0:
        raise ValueError(f"--query is {text!r}; it must be {rule}")
    return values[0], values[1]
