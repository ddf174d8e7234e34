"""The command line: `build`, `demo`, `doctor` and `plan`, each in its own module."""

from __future__ import annotations

import typer

from cp_fast.cli.build import build
from cp_fast.cli.demo import demo
from cp_fast.cli.doctor import doctor
from cp_fast.cli.plan import plan

__all__ = ["app"]

app = typer.Typer(
    help="Context-parallel attention: see it work, see what works here, see what it plans.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, doctor, plan, build):
    app.command()(command)
