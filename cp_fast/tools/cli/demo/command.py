"""The `demo` command: from options to a verdict."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cp_fast.tools.cli.common import cost_table, show_picture
from cp_fast.tools.cli.demo import checks
from cp_fast.tools.cli.demo import Job, under_torchrun
from cp_fast.tools.cli.demo import Measured, RankFailed, run_rank, spawn
from cp_ref.contract.cli.options import with_options
from cp_ref.contract.cli.terminal import CHECK_FAILED, check_svg, complain, table
from cp_ref.contract.svg_pictures import svg_picture
from cp_ref.schedules.verify.proof import verify

__all__ = ["demo"]


@with_options
def demo(
    job: Job,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file too.")] = None,
) -> None:
    """Run attention over real documents on several ranks, forward and backward, and check all results with the oracle.

    Exit code: 0, 1 when a check or a rank fails, 2 for options that are refused.
    """
    check_svg(svg)
    console = Console(quiet=under_torchrun() and os.environ["RANK"] != "0")
    _show_documents(console, job)
    with console.status("running all ranks"):
        measured = _run(job)
    if measured is None:
        return
    problem, schedule = measured.problem, measured.schedule
    with console.status("checking every result with the oracle"):
        rows = checks(job, measured)
    console.print()
    show_picture(console, problem, schedule, job.head)
    ring = f" (a2a in groups of {job.exchanging})" if job.cp_comm_type == "a2a+p2p" else ""
    title = f"{job.where[0]} ranks, {job.cp_comm_type}{ring}, {job.layout}, {job.mask}"
    forward, backward = ([f"{1e3 * s:,.1f} ms" for s in of] for of in zip(*measured.seconds, strict=True))
    console.print(cost_table(title, verify(problem, schedule), forward=forward, backward=backward))
    columns = ("result", ">largest error", ">bound", ">mean error", ">bound", "")
    made = table("against the oracle (dense attention in float64)", *columns)
    for name, values, ok in rows:
        made.add_row(name, *values, "[green]ok[/]" if ok else "[bold red]FAILED[/]")
    console.print(made)
    if svg is not None:
        svg.write_text(svg_picture(problem, schedule, job.head), encoding="utf-8")
        console.print(f"picture written to {svg}", soft_wrap=True)
    if not all(ok for _, _, ok in rows):
        complain("a check failed: the table above says which")
        raise typer.Exit(CHECK_FAILED)
    console.print("[bold green]All results are right.[/]")


def _run(job: Job) -> Measured | None:
    """The results, on rank 0; a failure is told in one line behind its traceback."""
    try:
        if not under_torchrun():
            return spawn(job)
        return run_rank((job, int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), "env://"))
    except RankFailed as error:
        message, *details = error.args
        for trace in details:
            Console(stderr=True, highlight=False).print(trace, style="dim", markup=False, soft_wrap=True)
        complain(message)
        raise typer.Exit(CHECK_FAILED) from None


def _show_documents(console: Console, job: Job) -> None:
    lengths, names = sorted(len(d.data) for d in job.documents), [d.name for d in job.documents]
    few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    padding = sum(job.slots) - sum(lengths)
    dtype = str(job.torch_dtype).removeprefix("torch.")
    console.print(
        f"[bold]{sum(lengths):,} bytes[/] of {len(names)} documents ({escape(few)}), from {lengths[0]:,} to "
        f"{lengths[-1]:,} bytes, half of them under {median(lengths):,.0f}; packed with {padding:,} slots of padding\n"
        f"{job.heads} query heads over {job.heads_kv}, d {job.head_dim}, {dtype}; {escape(job.where[2])}"
    )
