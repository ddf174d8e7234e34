"""`python -m conformance step`: compare a training step over ranks with one process.

Exit codes: 0 right, 1 differences, 2 the command line makes no sense, 3 the step could not be run.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn, TimeElapsedColumn

from conformance.record import what_runs
from conformance.step.compare_step import check_step, compare_step
from conformance.step.report import StepRecord, StepReport
from conformance.step.step_record import StepError

__all__ = ["ReportOption", "app"]


def _folder(text: str) -> Path:
    """The folder of a report: an empty name, as of a variable that is not set, is not this folder."""
    if not text:
        raise typer.BadParameter("it is empty; give a folder, or . for this one")
    return Path(text)


ReportOption = Annotated[
    Path | None, typer.Option(help="A folder for report.html and report.json.", parser=_folder, metavar="PATH")
]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(epilog="Exit codes: 0 right, 1 differences, 2 usage, 3 could not run. docs/how_to/training.md goes on.")
def step(
    build: Annotated[str, typer.Argument(help="module:function, build(cp) -> model, step[, optimizer].")],
    batch: Annotated[str, typer.Option(help="module:name, what step takes or makes it.")],
    cp_size: Annotated[str, typer.Option(help="Ranks of a sequence, such as 2,4.")] = "2",
    dp_size: Annotated[int, typer.Option(help="Groups of these.")] = 1,
    cp_comm_type: Annotated[str, typer.Option(help="p2p, all_gather, a2a, a2a+p2p.")] = "p2p",
    layout: Annotated[str, typer.Option(help="dual_chunk (zigzag), contiguous, balanced.")] = "dual_chunk",
    loss: Annotated[str, typer.Option(help="step returns the mean, or a share: sum.")] = "mean",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="Whose rounding counts, as bfloat16.")] = None,
    bits: Annotated[bool, typer.Option("--bits", help="Say too what has other bits than in one process.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds a run may take.")] = 600.0,
    report: ReportOption = None,
    junit: Annotated[Path | None, typer.Option(help="A file for JUnit's XML, which CI servers show.")] = None,
) -> None:
    """Compare one training step over ranks with the same step in one process.

    \b
    # train.py
    def build(cp):  # cp: None in one process, else a cp_fast.ContextParallel
        model = ...
        def step(batch):  # cuts the batch, computes the loss, reduces gradients
            ...
            return loss
        return model, step  # or model, step, optimizer
    batch = {"input_ids": ...}  # or a function that makes it
    """
    if problem := _unwritable(report, junit):
        raise typer.BadParameter(problem)
    reports: list[StepReport] = []
    failure = ""
    try:
        sizes = [int(word) for word in cp_size.split(",")]
        kind = None if dtype is None else _dtype(dtype)
        how: dict[str, Any] = {"dp_size": dp_size, "loss": loss, "device": device, "timeout_s": timeout}
        wanted = list(product(sizes, cp_comm_type.split(","), layout.split(",")))
        for size, comm, owner in wanted:  # all of them before the first one runs
            check_step(build, size, cp_comm_type=comm, layout=owner, **how)
        for size, comm, owner in wanted:
            with _Bars() as bars:
                given: dict[str, Any] = {"cp_comm_type": comm, "layout": owner, "dtype": kind, "bits": bits}
                reports.append(compare_step(build, batch, size, **how, **given, on_progress=bars.went_on))
            typer.echo(f"{reports[-1]}\n")
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    except StepError as error:
        failure = str(error)
        typer.echo(failure, err=True)
    if report is not None or junit is not None:
        from conformance.report import write_report

        record = StepRecord(what_runs(device), tuple(reports), failure)
        for path in write_report(record, report, junit):
            typer.echo(f"wrote {path}")
    right = all(each.right and (each.bits is None or each.bits.forward) for each in reports)
    raise typer.Exit(3 if failure else 0 if right else 1)


def _unwritable(report: Path | None, junit: Path | None) -> str:
    """Asks the package that writes reports only where one is wanted: it takes a second to import."""
    if report is None and junit is None:
        return ""
    from conformance.report import unwritable

    return unwritable(report, junit)


class _Bars:
    """A line for each process that runs, on a terminal's standard error: what it does now, and for how long."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._run, self._tasks = "", dict[str, TaskID]()

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def went_on(self, run: str, process: str, stage: str) -> None:
        """See `compare_step`."""
        if run != self._run:
            for task in self._tasks.values():
                self._progress.remove_task(task)
            self._run, self._tasks = run, {}
        if process in self._tasks:
            self._progress.remove_task(self._tasks.pop(process))
        if stage != "done":
            self._tasks[process] = self._progress.add_task(f"{run}: {process}, {stage}", total=None)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype is {name!r}; it must be float64, float32, bfloat16 or float16")
    return found
