"""The output of the demonstration: the documents, each rank's share, each result's error and its bound, the picture."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape

from cp_fast.tools.cli.common import heads_line, picture, size_text
from cp_fast.tools.cli.demo.check import Exact
from cp_fast.tools.cli.demo.documents import Document
from cp_fast.tools.cli.demo.job import Job
from cp_fast.tools.cli.demo.rank import Measured
from cp_ref.common.cli.terminal import table
from cp_ref.spec import verify

__all__ = ["show_checks", "show_documents", "show_picture", "show_ranks"]


def show_documents(console: Console, documents: list[Document], job: Job) -> None:
    """Show the number of documents, their spread, and a few names."""
    lengths, names = sorted(job.lengths), [d.name for d in documents]
    few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    padding = sum(job.slots) - sum(lengths)
    console.print(
        f"[bold]{sum(lengths):,} bytes[/] of {len(names)} documents ({escape(few)}), from {lengths[0]:,} to "
        f"{lengths[-1]:,} bytes, half of them under {median(lengths):,.0f}; packed with {padding:,} slots of padding"
    )


def show_ranks(console: Console, job: Job, measured: Measured) -> None:
    """Show each rank's rows, work, messages and memory. Also verifies the schedule."""
    costs = verify(measured.problem, measured.schedule)
    total = sum(r.pairs for r in costs.ranks) or 1
    ring = f" (a2a in groups of {job.a2a_size})" if job.cp_comm_type == "a2a+p2p" else ""
    title = f"{job.ranks} ranks, {job.cp_comm_type}{ring}, {job.layout}, {job.attn_mask_type}"
    columns = (">rank", ">tokens", ">tiles", ">work share", ">sent forward", ">sent backward", ">forward", ">backward")
    made = table(title, *columns)
    for r, cost in enumerate(costs.ranks):
        made.add_row(
            str(r),
            f"{cost.tokens:,}",
            f"{cost.tiles:,}",
            f"{cost.pairs / total:.1%}",
            size_text(cost.forward_bytes),
            size_text(cost.backward_bytes),
            f"{1e3 * measured.forward_s[r]:,.1f} ms",
            f"{1e3 * measured.backward_s[r]:,.1f} ms",
        )
    console.print(made)


def show_checks(console: Console, rows: list[Any], exact: list[Exact]) -> bool:
    """Show each result's error and its bound; True if all are within."""
    columns = ("result", ">largest error", ">bound", ">mean error", ">bound", "")
    made = table("against the oracle (dense attention in float64)", *columns)
    for row in rows:
        errors = (f"{x:.2e}" for x in (row.max_error, row.max_bound, row.mean_error, row.mean_bound))
        made.add_row(row.name, *errors, _verdict(row.ok))
    for item in exact:
        wrong = f"{item.wrong:,} wrong" if item.wrong else "none wrong"
        made.add_row(item.name, wrong, f"of {item.of:,}", "", "", _verdict(item.wrong == 0))
    console.print(made)
    return all(row.ok for row in rows) and all(item.wrong == 0 for item in exact)


def show_picture(console: Console, measured: Measured, head: int) -> None:
    """The longest document's score matrix, for one query head."""
    console.print(picture(measured.problem, measured.schedule, console.width, head))
    if heads := heads_line(measured.problem):
        console.print(heads)


def _verdict(ok: bool) -> str:
    return "[green]ok[/]" if ok else "[bold red]FAILED[/]"
