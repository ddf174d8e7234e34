"""`doctor`: what is installed here, what works, and why the rest does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cp_fast import build
from cp_fast.backends import BACKENDS, Backend, installed, probe, remark_on
from cp_fast.movers.select_movers import chosen
from cp_fast.tools.cli.doctor import installed_rows
from cp_fast.tools.cli.doctor import measure_machine
from cp_ref.contract.cli.terminal import BAD_INPUT, CHECK_FAILED, complain, readable_errors, table
from cp_ref.schedules.words import Feature

__all__ = ["doctor"]

Row = dict[str, Any]
_TITLES = {
    "installed": "installed",
    "attention backends": "attention backends, in the order that 'auto' prefers",
    "kernels": "kernels that move and merge",
}
_CELLS = {None: "-", True: "[green]yes[/]", False: "[red]no[/]"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, for bug reports.")] = False,
    measured: Annotated[
        bool,
        typer.Option("--measure", help="Measure this machine instead, for plan --machine; links under torchrun."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="--measure: write the machine to this TOML file.")] = None,
    dims: Annotated[str, typer.Option(help="--measure: head dims d_qk,d_v of the kernels.")] = "128,128",
    start: Annotated[str, typer.Option(help="--measure: the machine that the rest is taken from.")] = "h200-nvlink",
) -> None:
    """Say what is installed, and which attention backends and kernels work here; of the others say why not.

    Exit code: 0 when attention runs here on at least one backend, else 1.
    """
    if measured:
        with readable_errors():
            measure_machine(dims, start, out)
        return
    if out is not None:
        complain(f"--out is {str(out)!r}, but --measure is not given; only a measured machine is written")
        raise typer.Exit(BAD_INPUT)
    console = Console(stderr=as_json)
    with console.status("trying the attention backends"):
        found = {"installed": installed_rows(), "attention backends": _backends(), "kernels": _kernels()}
    working = [row for row in found["attention backends"] if row["works"]]
    served = {row["device"] for row in found["kernels"] if row["in use"]}
    ready = [f"{row['backend']} ({row['device']})" for row in working if row["device"] in served]
    if as_json:
        typer.echo(json.dumps({**found, "ready": ready, "variables": _variables()}, indent=2))
    else:
        for part, rows in found.items():
            console.print(_table(_TITLES[part], rows))
        lacking = "no kernels move and merge for the backends that work" if working else "no attention backend works"
        console.print(
            f"[green]ready[/]: attention runs here on {', '.join(ready)}"
            if ready
            else f"[red]{lacking} here[/]; the table says why"
        )
    if not ready:
        raise typer.Exit(CHECK_FAILED)


def _table(title: str, rows: list[Row]) -> Table:
    made = table(title, *rows[0])
    for row in rows:
        made.add_row(*(_CELLS.get(cell, escape(str(cell))) for cell in row.values()))
    return made


def _backends() -> list[Row]:
    """Every backend on every device that it supports, tried on small problems with known answers."""
    made: list[Row] = []
    for backend in map(installed, BACKENDS):
        for device in _devices(backend):
            reason = _try(backend, device)
            remark = reason or remark_on(backend)
            made.append({"backend": backend.name, "device": device, "works": reason is None, "remark": remark})
    return made


def _devices(backend: Backend) -> list[str]:
    return [name for feature, name in ((Feature.CUDA, "cuda"), (Feature.CPU, "cpu")) if feature in backend.features]


def _try(backend: Backend, device: str) -> str | None:
    reason = backend.why_not()
    if reason is None:
        try:
            reason = probe(backend, device)
        except Exception as error:  # Any error of a foreign library is the answer.
            reason = f"{type(error).__name__}: {error}"
    return None if reason is None else " ".join(reason.split())


def _kernels() -> list[Row]:
    """For every device, the kernels that move and merge there, the reason, and the state of the native ones."""
    made: list[Row] = []
    for device in build.DEVICES:
        try:
            built, why_not_built = build.status(device)
        except ValueError as error:
            built, why_not_built = None, str(error)
        in_use: str | None = None
        if device == "cuda" and not torch.cuda.is_available():
            why = "PyTorch sees no GPU"
        else:
            try:
                in_use, why = chosen(device)
            except (RuntimeError, ValueError) as error:
                why = str(error)
        remark = why if why_not_built in (None, why) or why_not_built in why else f"{why}; {why_not_built}"
        state = "no" if why_not_built else "yes" if built else "on first use"
        made.append({"device": device, "in use": in_use, "native build": state, "remark": remark})
    return made


def _variables() -> dict[str, str]:
    """The environment variables of this package, PyTorch and the other libraries."""
    prefixes = ("CP_", "CUDA_", "CXX", "NCCL_", "NUMBA_", "PYTORCH_", "TORCH_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
