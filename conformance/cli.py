"""`python -m conformance`: play an implementation against the oracle, print what failed, and how to play it again."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from conformance.capabilities import Capabilities, probe
from conformance.implementation import Implementation, load
from conformance.session import PROFILES, Profile, TierResult, replay, run_errors, run_tier
from conformance.strategies import CP_SIZES
from conformance.tiers import TIER_NAMES, errors

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_MOST_FINDINGS = 8


@app.command()
def main(
    impl: Annotated[str, typer.Option(help="The implementation: pkg.module, or pkg.module:object.")] = "cp_fast",
    profile: Annotated[str, typer.Option(help=f"How much: {', '.join(PROFILES)}.")] = "quick",
    tier: Annotated[
        list[str] | None, typer.Option(help=f"Only this tier; may be repeated. {', '.join(TIER_NAMES)}.")
    ] = None,
    max_examples: Annotated[
        int | None, typer.Option(min=1, help="Problems per tier, instead of the profile's.")
    ] = None,
    repro: Annotated[str | None, typer.Option(help="Play just this case: the text that a failure printed.")] = None,
    cp_size: Annotated[str | None, typer.Option(help="Only these group sizes, such as 2,3.")] = None,
    device: Annotated[str, typer.Option(help="Where the tensors lie: cpu, or cuda (all ranks on one GPU).")] = "cpu",
) -> None:
    """Play an implementation of context-parallel attention against the oracle. Exits with 1 when something is wrong."""
    tier_names = _choices("--tier", tier or list(TIER_NAMES), TIER_NAMES)
    (profile,) = _choices("--profile", [profile], tuple(PROFILES))
    cp_sizes = _cp_sizes(cp_size)
    torch.set_num_threads(1)  # the tensors are tiny
    console = Console(soft_wrap=True)
    try:
        implementation = load(impl)
        if repro is not None:
            results = replay(implementation, repro, tier_names, device)
        else:
            chosen = replace(PROFILES[profile], max_examples=max_examples or PROFILES[profile].max_examples)
            results = _run(implementation, tier_names, chosen, cp_sizes, probe(implementation, device), console)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for result in results:
        _print_failures(console, result, impl, device)
    _print_table(console, results, impl)
    failed = any(result.failures for result in results)
    hung = any("did not finish" in finding for r in results for f in r.failures for finding in f.findings)
    if hung:  # threads of a hanging implementation would keep the process alive
        console.file.flush()
        os._exit(1)
    raise typer.Exit(1 if failed else 0)


def _run(
    impl: Implementation,
    tier_names: list[str],
    profile: Profile,
    cp_sizes: tuple[int, ...],
    capabilities: Capabilities,
    console: Console,
) -> list[TierResult]:
    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console, transient=True) as progress:
        for name in tier_names:
            total = len(errors.error_ids(capabilities)) if name == "errors" else profile.max_examples
            task = progress.add_task(name, total=total)

            def advance(task=task) -> None:
                progress.advance(task)

            if name == "errors":
                results.append(run_errors(impl, capabilities, on_problem=advance))
            else:
                results.append(run_tier(impl, name, capabilities, profile, cp_sizes=cp_sizes, on_problem=advance))
    return results


def _print_failures(console: Console, result: TierResult, impl: str, device: str) -> None:
    for failure in result.failures:
        console.print(f"\n[bold red]{result.tier} failed[/]", highlight=False)
        for finding in failure.findings[:_MOST_FINDINGS]:
            console.print(f"  - {finding}", markup=False, highlight=False)
        if len(failure.findings) > _MOST_FINDINGS:
            console.print(f"  - ... and {len(failure.findings) - _MOST_FINDINGS} more findings", highlight=False)
        where = "" if device == "cpu" else f" --device {device}"
        command = f"python -m conformance --impl {impl}{where} --tier {result.tier} --repro {shlex.quote(failure.text)}"
        console.print("  play it again:", highlight=False)
        console.print(f"    {command}", markup=False, highlight=False)


def _print_table(console: Console, results: list[TierResult], impl: str) -> None:
    table = Table(title=f"conformance of {impl}")
    table.add_column("tier")
    for name in ("problems", "passed", "failed", "unsupported", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("note")
    for r in results:
        failed = f"[bold red]{len(r.failures)}[/]" if r.failures else "0"
        table.add_row(r.tier, str(r.run), str(r.passed), failed, str(r.unsupported), f"{r.seconds:.1f}", escape(r.note))
    console.print()
    console.print(table)


def _choices(option: str, given: list[str], choices: tuple[str, ...]) -> list[str]:
    for value in given:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(choices)}", param_hint=option)
    return given


def _cp_sizes(text: str | None) -> tuple[int, ...]:
    if text is None:
        return CP_SIZES
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise typer.BadParameter(f"{text!r} is no list of group sizes such as 2,3", param_hint="--cp-size")
    return sizes
