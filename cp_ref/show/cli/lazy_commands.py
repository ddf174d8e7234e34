"""A group of commands whose modules are imported when a command runs, so that `--help` answers without PyTorch."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from cp_ref.show.version import __version__

__all__ = [
    "lazy_commands",
    "start",
]

_SETTINGS = {"help_option_names": ["-h", "--help"]}


def lazy_commands(text: str, commands: Mapping[str, tuple[str, ...]], *, completion: bool = False) -> typer.Typer:
    """A command line, which has --version too.

    Args:
        text: its help.
        commands: a command's name to the module that has it, and its help in the list. A third text makes it an alias:
            the command that it is, and the options that go before the user's.
        completion: whether it has --install-completion; a shell completes the words of a console script alone.
    """

    class Commands(_LazyGroup):
        commands_of = commands

    made = typer.Typer(
        cls=Commands,
        help=text,
        add_completion=completion,
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,
        context_settings=_SETTINGS,
    )
    made.callback()(_options)
    return made


def start(app: typer.Typer, name: str) -> None:
    """Run a command line as this process, by the name that its help shows.

    Words that are not UTF-8 are printed with escapes, so that a file of such a name can be written.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name=name)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cp-attention {__version__ or 'of a checkout that is not installed'}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


class _LazyGroup(TyperGroup):
    commands_of: ClassVar[Mapping[str, tuple[str, ...]]]

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands_of]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = self.commands_of.get(cmd_name)
        return found and _LazyCommand(cmd_name, *found)


class _LazyCommand(TyperCommand):
    """A command's place in the list; the imported command parses and runs."""

    def __init__(self, name: str, module: str, help: str, alias: str = "") -> None:
        super().__init__(name, help=help)
        self._module = module
        self._function, *self._words = alias.split() or [name]

    @cached_property
    def imported(self) -> Any:
        """The command, imported now."""
        own = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, context_settings=_SETTINGS)
        try:
            module = importlib.import_module(self._module)
        except ValueError as error:  # of an environment variable that is read at import
            _end(error)
        own.command(self.name)(getattr(module, self._function))
        return typer.main.get_command(own)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        for option, value in pairwise([*args, " "] if not extra.get("resilient_parsing") else ()):  # a shell completes
            name, sign, text = option.partition("=")
            if option.startswith("--") and (value == "" or (sign and not text)):
                _end(ValueError(f"{name} is ''; give it a value, or leave it out"))  # an unset variable of the shell
        return self.imported.make_context(info_name, [*self._words, *args], parent=parent, **extra)


def _end(error: ValueError) -> NoReturn:
    """End the command as `readable_errors` does, which is imported only then."""
    from cp_ref.show.cli.terminal import readable_errors

    with readable_errors():
        raise error
