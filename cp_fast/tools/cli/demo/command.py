"""The `demo` command: from options to a verdict."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cp_fast.tools.cli.common import heads_line, picture, size_text
from cp_fast.tools.cli.demo.check import check_exact, check_results
from cp_fast.tools.cli.demo.job import Job, under_torchrun
from cp_fast.tools.cli.demo.launch import RankFailed, join_and_run, spawn
from cp_fast.tools.cli.demo.rank import Measured
from cp_ref.common.cli.options import with_options
from cp_ref.common.cli.terminal import BAD_INPUT, CHECK_FAILED, check_svg, complain, table
from cp_ref.spec import verify
from cp_ref.spec.pictures.schedule_svg import svg_picture

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
    if console.quiet:
        return
    with console.status("checking every result with the oracle"):
        exact = check_exact(job, measured.tensors)
        rows = check_results(job, measured.tensors)
    console.print()
    console.print(picture(measured.problem, measured.schedule, console.width, job.head))
    if heads := heads_line(measured.problem):
        console.print(heads)
    console.print()
    _show_ranks(console, job, measured)
    well = _show_checks(console, rows, exact)
    if svg is not None:
        svg.write_text(svg_picture(measured.problem, measured.schedule, job.head), encoding="utf-8")
        console.print(f"picture written to {svg}", soft_wrap=True)
    if not well:
        complain("a check failed: the table above says which")
        raise typer.Exit(CHECK_FAILED)
    console.print("[bold green]All results are right.[/]")


def _run(job: Job) -> Measured:
    """The ranks at work; a failure is told in one line, with its traceback where it is not about the options."""
    try:
        if not under_torchrun():
            return spawn(job)
        return join_and_run(job, int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")))
    except RankFailed as error:
        if not error.about_arguments:
            Console(stderr=True, highlight=False).print(error.details, style="dim", markup=False, soft_wrap=True)
        complain(str(error))
        raise typer.Exit(BAD_INPUT if error.about_arguments else CHECK_FAILED) from None


def _show_documents(console: Console, job: Job) -> None:
    lengths, names = sorted(job.lengths), [d.name for d in job.documents]
    few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    padding = sum(job.slots) - sum(lengths)
    dtype = str(job.torch_dtype).removeprefix("torch.")
    console.print(
        f"[bold]{sum(lengths):,} bytes[/] of {len(names)} documents ({escape(few)}), from {lengths[0]:,} to "
        f"{lengths[-1]:,} bytes, half of them under {median(lengths):,.0f}; packed with {padding:,} slots of padding\n"
        f"{job.heads} query heads over {job.heads_kv}, d {job.head_dim}, {dtype}; {escape(job.where[2])}"
    )


def _show_ranks(console: Console, job: Job, measured: Measured) -> None:
    """Each rank's rows, work, messages and times. Also verifies the schedule."""
    costs = verify(measured.problem, measured.schedule)
    total = sum(r.pairs for r in costs.ranks) or 1
    ring = f" (a2a in groups of {job.exchanging})" if job.cp_comm_type == "a2a+p2p" else ""
    title = f"{job.where[0]} ranks, {job.cp_comm_type}{ring}, {job.layout}, {job.mask}"
    columns = (">rank", ">tokens", ">tiles", ">work share", ">sent forward", ">sent backward", ">forward", ">backward")
    made = table(title, *columns)
    for rank, (cost, seconds) in enumerate(zip(costs.ranks, measured.seconds, strict=True)):
        counts = str(rank), f"{cost.tokens:,}", f"{cost.tiles:,}", f"{cost.pairs / total:.1%}"
        sent = size_text(cost.forward_bytes), size_text(cost.backward_bytes)
        made.add_row(*counts, *sent, *(f"{1e3 * s:,.1f} ms" for s in seconds))
    console.print(made)


def _show_checks(console: Console, rows: list[Any], exact: list[tuple[str, int, int]]) -> bool:
    """Each result's error and its bound; True if all are within."""
    verdicts = {True: "[green]ok[/]", False: "[bold red]FAILED[/]"}
    columns = ("result", ">largest error", ">bound", ">mean error", ">bound", "")
    made = table("against the oracle (dense attention in float64)", *columns)
    for row in rows:
        errors = (f"{x:.2e}" for x in (row.max_error, row.max_bound, row.mean_error, row.mean_bound))
        made.add_row(row.name, *errors, verdicts[row.ok])
    for name, wrong, of in exact:
        made.add_row(name, f"{wrong:,} wrong" if wrong else "none wrong", f"of {of:,}", "", "", verdicts[not wrong])
    console.print(made)
    return all(row.ok for row in rows) and not any(wrong for _, wrong, _ in exact)
