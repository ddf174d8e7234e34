"""`compare`: where two recorded runs part."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cp_ref.contract.cli.terminal import CHECK_FAILED, readable_errors
from cp_ref.tracing.compare_traces import compare as compare_traces
from cp_ref.tracing.recorded_trace import Trace

__all__ = ["compare"]

_FILE = "A saved trace; or a quoted pattern such as 'run-*.pt', where each process has saved its own rank."


def compare(
    a: Annotated[str, typer.Argument(help=_FILE)],
    b: Annotated[str, typer.Argument(help="Another run of the same problem.")],
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance; by default rounding in the dtype.")] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance; by default rounding in the dtype.")] = None,
) -> None:
    """Name the first step and rank where two recorded runs part, and what differs there.

    Exit code: 0 where they agree, 1 where they part, 2 for files that hold no trace.
    """
    console = Console(highlight=False, soft_wrap=True)
    with readable_errors():
        with console.status("comparing"):
            found = compare_traces(Trace.load(a), Trace.load(b), rtol=rtol, atol=atol)
        console.print(str(found), markup=False, style="green" if found else None)
    if not found:
        raise typer.Exit(CHECK_FAILED)
