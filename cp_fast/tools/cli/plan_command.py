"""`plan`: the schedule of a problem, as tables, picture and text, and the proof on integers that it is right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cp_fast.compile.machine import built_in, read_machine
from cp_fast.tools.cli.common import cost_table, show_picture, size_text
from cp_fast.tools.cli.layouts_command import comparison
from cp_fast.tools.cli.plan import Request, planned
from cp_ref.contract.cli.options import check_number, with_options
from cp_ref.contract.cli.terminal import check_svg, table
from cp_ref.contract.svg_pictures import svg_picture
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Message, RankSchedule, Schedule
from cp_ref.schedules.verify.costs import Report, message_bytes, tile_pairs
from cp_ref.schedules.verify.proof import verify

__all__ = ["plan"]

_FEW_RANKS = 4  # up to here the steps of all ranks are shown unasked


@with_options
def plan(
    request: Request,
    rank: Annotated[int | None, typer.Option(help="Show the steps of this rank only.")] = None,
    head: Annotated[int, typer.Option(help="The picture's query head, where heads are spread over the ranks.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file too.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="What every layout and schedule costs instead.")] = False,
    prediction: Annotated[
        bool, typer.Option("--predict", help="Time and memory of every layout and schedule instead, on --machine.")
    ] = False,
    machine: Annotated[
        str,
        typer.Option(help=f"{', '.join(built_in())} (unless given), or a TOML file of doctor --measure --out FILE."),
    ] = "",
    messages: Annotated[
        str,
        typer.Option(help="Transport where all ranks share NVLink: peer_memory (unless given), or group (NCCL)."),
    ] = "",
    model: Annotated[
        str, typer.Option(help="With --predict, a whole step's memory: layers,hidden,ffn,vocabulary of a decoder.")
    ] = "",
    saved: Annotated[
        str,
        typer.Option(
            help="With --model, for the backward pass: offload (unless given), attention, layers (inputs), all."
        ),
    ] = "",
    fsdp: Annotated[
        int | None, typer.Option(help="With --model: ranks that share the weights; --cp-size unless given.", min=1)
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the schedule's canonical text and nothing else.")] = False,
) -> None:
    """Print the schedule of a problem, its balance and bytes, and verify it. No GPU and no other process is needed.

    Exit code: 0, or 2 for a problem that is refused.
    """
    console = Console()
    of_plans = {"--rank": rank, "--head": head or None, "--svg": svg, "--text": text or None}
    of_steps = {"--saved": saved or None, "--fsdp": fsdp}
    of_times = {"--machine": machine or None, "--messages": messages or None, "--model": model or None} | of_steps
    if prediction:
        # These import PyTorch: --help does not.
        from cp_fast.tools.cli.predict_command import TrainingStep, show_prediction

        _refuse("--predict", **of_plans, **{"--compare": compare or None})
        if not model:
            _refuse("--predict without --model", **of_steps)
        step = TrainingStep.read(model, saved or "offload", fsdp or request.cp_size) if model else None
        show_prediction(console, request, read_machine(machine or "h200-nvlink"), messages or "peer_memory", step)
        return
    _refuse("--compare" if compare else "a plan without --predict", **of_times, **(of_plans if compare else {}))
    if compare:
        console.print(comparison(request))
        return
    check_svg(svg)
    if rank is not None:
        check_number("--rank", rank, request.cp_size)
    problem, schedule = planned(request)
    check_number("--head", head, problem.heads_q)
    if svg is not None:
        svg.write_text(svg_picture(problem, schedule, head), encoding="utf-8")
    if text:
        typer.echo(_canonical(schedule, rank), nl=False)
        return
    costs = verify(problem, schedule)
    _show(console, problem, schedule, costs, rank, head)
    if svg is not None:
        console.print(f"picture written to {svg}", soft_wrap=True)


def _refuse(by: str, **options: object) -> None:
    """Raise ValueError for an option that is given, and would be ignored."""
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{option} is {value}, which {by} does not look at; leave it out")


def _show(console: Console, problem: Problem, schedule: Schedule, costs: Report, rank: int | None, head: int) -> None:
    show_picture(console, problem, schedule, head)
    shown = range(problem.cp_size) if rank is None else [rank]
    if rank is None and problem.cp_size > _FEW_RANKS:
        shown = [0]
        console.print(f"The steps of rank 0 follow; --rank R shows another's (0 to {problem.cp_size - 1}).")
    for direction, programs in (("forward", schedule.forward), ("backward", schedule.backward)):
        steps_table = table(
            f"{direction}, step by step", ">rank", ">step", "sends", "receives", ">tiles", ">pairs a head"
        )
        for r in shown:
            _add_steps(steps_table, problem, r, programs[r])
        console.print(steps_table)
    held = [f"{cost.held_rows:,}" for cost in costs.ranks]
    console.print(cost_table("cost of each rank", costs, most_kv_rows_held=held))
    console.print(
        f"balance {costs.balance:.3f} (the mean rank's work over the busiest's); "
        f"{size_text(costs.sent_bytes)} sent by all ranks, forward and backward"
    )
    console.print(
        f"[green]verified[/]: every visible pair ({problem.pairs:,} a head) is computed exactly once, forward and "
        "backward; every operand is there when it is used, every message is expected, every gradient comes home, "
        "nothing deadlocks"
    )


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
    rows, size = message.pieces.size, size_text(message_bytes(problem, message))
    return f"{message.kind} {rows:,} rows {towards} {message.peer} ({size})"


def _canonical(schedule: Schedule, rank: int | None) -> str:
    """The whole text, or the parts of one rank."""
    if rank is None:
        return str(schedule)
    lines, keep = [], True
    for line in str(schedule).splitlines():
        if line.startswith(("forward", "backward")):
            keep = line.endswith(f" rank {rank}")
        lines += [line] if keep else []
    return "\n".join(lines) + "\n"
