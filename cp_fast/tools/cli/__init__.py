"""The command line: `build`, `demo`, `doctor` and `plan`, each in its own module, imported when it is asked for."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

__all__ = ["app"]

_COMMANDS = {"demo": "demo", "doctor": "doctor", "plan": "plan_command", "build": "build"}  # and their modules


class _Commands(TyperGroup):
    """Commands that are imported when they are asked for: `plan --help` needs no PyTorch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _COMMANDS and cmd_name not in self.commands:
            own = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, context_settings=_SETTINGS)
            function = getattr(importlib.import_module(f"cp_fast.tools.cli.{_COMMANDS[cmd_name]}"), cmd_name)
            own.command(cmd_name)(function)
            self.commands[cmd_name] = typer.main.get_command(own)
        return super().get_command(ctx, cmd_name)


_SETTINGS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    cls=_Commands,
    help="Context-parallel attention: see it work, see what works here, see what it plans.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings=_SETTINGS,
)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"cp-attention {metadata.version('cp-attention')}")
        except metadata.PackageNotFoundError:
            typer.echo("cp-attention, run from a checkout that is not installed")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass
