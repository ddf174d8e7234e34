"""The command line: `explain`, `record` and `compare`, each in its own module."""

from __future__ import annotations

import typer

from cp_ref.cli.compare_runs import compare
from cp_ref.cli.explain import explain
from cp_ref.cli.record import record

__all__ = ["app"]

app = typer.Typer(
    help="Context-parallel attention, step by step: see how it works, and find where two runs part.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (explain, record, compare):
    app.command()(command)
