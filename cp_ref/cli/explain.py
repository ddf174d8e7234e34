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

from cp_ref.cli.plan import Request
from cp_ref.contract.cli.options import check_number, with_options
from cp_ref.contract.cli.terminal import check_svg, coloured
from cp_ref.contract.svg_pictures import svg_picture
from cp_ref.contract.text_pictures import ownership_picture, text_picture
from cp_ref.schedules.planners.make_schedule import SCHEDULES
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule, Step
from cp_ref.schedules.verify.proof import verify

__all__ = ["explain"]

_FEW_RANKS = 8  # up to here all ranks are shown unasked

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


@with_options
def explain(
    request: Request,
    head: Annotated[int, Option(help="The query head that pictures show.")] = 0,
    rank: Annotated[int | None, Option(help="Show the steps of this rank only.")] = None,
    svg: Annotated[Path | None, Option(help="Write the whole picture to this file too.")] = None,
) -> None:
    """Walk through a problem: the owners of its tokens, and the messages and tiles of each step.

    Exit code: 0, or 2 for a problem that is refused.
    """
    check_svg(svg)
    console = Console(highlight=False)
    problem, schedule = request.problem, request.plan.schedule
    check_number("--head", head, problem.heads_q)
    if rank is not None:
        check_number("--rank", rank, problem.cp_size)
    if svg is not None:
        svg.write_text(svg_picture(problem, schedule, head), encoding="utf-8")
    ranks = [rank] if rank is not None else list(range(problem.cp_size if problem.cp_size <= _FEW_RANKS else 1))
    _Walk(console, problem, schedule, ranks, head).show(request.padded)
    if svg is not None:
        console.print(f"picture written to {svg}", soft_wrap=True, markup=False)


class _Walk:
    """The sections of the walk-through, top to bottom."""

    def __init__(self, console: Console, problem: Problem, schedule: Schedule, ranks: list[int], head: int) -> None:
        self.console, self.problem, self.schedule, self.ranks, self.head = console, problem, schedule, ranks, head
        self._steps = max(map(len, schedule.forward))

    def show(self, padded: int) -> None:
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
        costs = verify(p, self.schedule)
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
