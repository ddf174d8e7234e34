"""`python -m conformance`: play an implementation against the oracle, print what failed, and how to play it again.

Exit codes, for scripts:

    0   everything that was computed is right, or a known failure
    1   something is wrong, crashed, hangs or runs out of memory; or a known failure no longer fails
    2   the command line makes no sense; the option is named
    3   the implementation cannot be loaded
    4   nothing was computed: all of it is unsupported or missing
"""

from __future__ import annotations

import os
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from conformance.commands import DEFAULT_TIME_LIMIT_S, replay_options, version_of
from conformance.draw.feature_coverage import coverage
from conformance.draw.strategies import CP_SIZES
from conformance.implementation import LoadError, load
from conformance.judge.known_failures import KnownFailures, KnownFailuresError
from conformance.judge.run_record import LEVELS, RunRecord
from conformance.levels import LEVEL_TIERS
from conformance.printing import print_coverage, print_failures, print_separating, print_table
from conformance.report import unwritable, write_report
from conformance.run.play_problem import InProcess, Runner, task_of
from conformance.run.processes import LONGEST_S
from conformance.run.run_tiers import PROFILES, TierResult
from conformance.run.suite_run import ALL_TIERS, SuiteRun, describe_run, level_of, nothing_tested
from conformance.run.workers import start_runner
from conformance.step.step_command import app as step_app
from conformance.tiers import cases_of
from cp_ref.schedules.values import MOST_RANKS

__all__ = ["app", "command_line", "cp_sizes_of"]

_EXIT_CODES = "Exit codes: 0 right or known, 1 wrong, 2 usage, 3 cannot be loaded, 4 nothing was computed."


class _Commands(TyperGroup):
    """The commands that are named; without one, the options are of a run of the suite."""

    def list_commands(self, ctx: Any) -> list[str]:
        return ["step"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return typer.main.get_command(step_app) if cmd_name == "step" else None


def command_line(completion: bool = False) -> typer.Typer:
    """The command line; with `completion` it has --install-completion, for a console script."""
    made = typer.Typer(cls=_Commands, add_completion=completion, pretty_exceptions_enable=False)
    made.callback(invoke_without_command=True, epilog=_EXIT_CODES)(main)
    return made


def main(
    ctx: typer.Context,
    impl: Annotated[
        str, typer.Option(help="The implementation: pkg.module, pkg.module:object, or an entry point's name.")
    ] = "cp_fast",
    profile: Annotated[str, typer.Option(help=f"How much: {', '.join(PROFILES)}.")] = "quick",
    level: Annotated[
        list[str] | None, typer.Option(help=f"Only this level; may be repeated. {', '.join(LEVELS)}.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help=f"Only this tier; may be repeated. {', '.join(ALL_TIERS)}.")
    ] = None,
    max_examples: Annotated[
        int | None, typer.Option(min=1, help="Problems per tier, instead of the profile's.")
    ] = None,
    max_failures: Annotated[int, typer.Option(min=1, help="How many different failures a tier looks for.")] = 4,
    shrink_time: Annotated[float, typer.Option(min=0.0, help="Seconds to make each of them smaller.")] = 30.0,
    seed: Annotated[int | None, typer.Option(help="Draw other problems; nightly draws its own seed.")] = None,
    repro: Annotated[str | None, typer.Option(help="Play just this problem: the text that a failure printed.")] = None,
    cp_size: Annotated[str | None, typer.Option(help="Only these group sizes, such as 2,3.")] = None,
    device: Annotated[str, typer.Option(help="Where the tensors lie: cpu, or cuda (all ranks on one GPU).")] = "cpu",
    isolate: Annotated[
        bool, typer.Option("--isolate/--in-process", help="Play in worker processes, which may crash, or in this one.")
    ] = True,
    time_limit: Annotated[
        float, typer.Option(min=0.1, max=LONGEST_S, help="Seconds until a problem is taken for hanging.")
    ] = DEFAULT_TIME_LIMIT_S,
    known_failures: Annotated[Path | None, typer.Option(help="Known failures, a TOML file.")] = None,
    report: Annotated[Path | None, typer.Option(help="A folder for report.html and report.json.")] = None,
    junit: Annotated[Path | None, typer.Option(help="A file for JUnit's XML, which CI servers show.")] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Play an implementation of context-parallel attention against the oracle."""
    if ctx.invoked_subcommand is not None:
        return
    if version:
        typer.echo(f"cp-attention {version_of('cp-attention') or 'of a checkout that is not installed'}")
        raise typer.Exit
    sizes_of_problem = _sizes_of_problem(repro)
    if problem := unwritable(report, junit):
        raise typer.BadParameter(problem)
    tiers = _tiers(level, tier)
    _check_device(device)
    (profile,) = _choices("--profile", [profile], tuple(PROFILES))
    drawn = replace(PROFILES[profile], most_failures=max_failures, shrink_s=shrink_time, seed=seed)
    if seed is None and not drawn.derandomize:
        drawn = replace(drawn, seed=random.SystemRandom().randrange(2**32))
    drawn = replace(drawn, max_examples=max_examples or drawn.max_examples)
    known = _known_failures(known_failures)
    torch.set_num_threads(1)  # the tensors are tiny
    console = Console(soft_wrap=True)
    runner = _runner(impl, device, isolate, time_limit, cp_size, sizes_of_problem)
    sizes = cp_sizes_of(cp_size, runner.info.group_kind, device)
    suite_run = SuiteRun(runner, drawn, tiers, sizes, device, known)
    try:
        with closing(runner):
            if repro is not None:
                results = suite_run.replay(repro, tier or ())
            else:
                results = _run(suite_run, console)
                results += suite_run.strict(results)
            options = replay_options(runner.info.group_kind, cp_size, time_limit, isolate)
            meta = describe_run(impl, profile, suite_run, options)
    except LoadError as error:  # it does not load again after a crash
        _not_loaded(error)
    except KnownFailuresError as error:
        raise typer.BadParameter(str(error), param_hint="--known-failures") from error
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--impl" if repro is None else "--repro") from error
    record = RunRecord(meta, tuple(p for result in results for p in result.played))
    if repro is None:
        print_separating(console, record)
    for result in results:
        print_failures(console, result, meta)
    print_table(console, results, impl)
    if repro is None:
        print_coverage(console, coverage(record.played))
    for path in write_report(record, report, junit):
        console.print(f"wrote {path}", highlight=False)
    code = 1 if any(result.smallest for result in results) else 4 if nothing_tested(results) else 0
    if code == 4:
        console.print("nothing was computed: all of it is unsupported or missing", highlight=False)
    if not isolate and any(p.verdict == "hung" for r in results for p in r.played):
        console.file.flush()
        os._exit(code)  # threads of a hanging implementation would keep the process alive
    raise typer.Exit(code)


def _run(suite_run: SuiteRun, console: Console) -> list[TierResult]:
    columns = (TextColumn("{task.description:17}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as progress:

        def advance(tier: str) -> None:
            if tier not in bars:
                bars[tier] = progress.add_task(tier, total=suite_run.expected(tier))
            progress.advance(bars[tier])

        return list(suite_run.results(advance))


def _sizes_of_problem(repro: str | None) -> tuple[int, ...]:
    """The group sizes of the problem to play again, whose text means something."""
    try:
        tasks = [] if repro is None else task_of(repro)
        layers = [LEVEL_TIERS[task.tier].parse(task.text) for task in tasks if task.level == "linear"]
        return tuple(case.problem.cp_size for case in [*layers, *(c for task in tasks for c in cases_of(task.text))])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--repro") from error


def _runner(
    impl: str, device: str, isolate: bool, time_limit: float, cp_size: str | None, needed: tuple[int, ...]
) -> Runner:
    """The runner, with --cp-size processes or the number that one problem needs. Exits with 3 if the implementation
    does not exist.
    """

    def sizes(kind: str) -> tuple[int, ...]:
        return cp_sizes_of(cp_size, kind, device) + (needed if cp_size is None and device == "cpu" else ())

    try:
        if not isolate:
            return InProcess(load(impl), device, time_limit)
        return start_runner(impl, device, time_limit, sizes)
    except LoadError as error:
        _not_loaded(error)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--in-process") from error


def _not_loaded(error: LoadError) -> NoReturn:
    typer.echo(str(error), err=True)
    raise typer.Exit(3) from error


def _known_failures(path: Path | None) -> KnownFailures:
    try:
        return KnownFailures() if path is None else KnownFailures.load(path)
    except KnownFailuresError as error:
        raise typer.BadParameter(str(error), param_hint="--known-failures") from error


def _tiers(levels: list[str] | None, tiers: list[str] | None) -> list[str]:
    """The tiers that were asked for: those named, or those of the levels named, or all."""
    chosen = _choices("--tier", tiers or list(ALL_TIERS), ALL_TIERS)
    wanted = _choices("--level", levels or list(LEVELS), LEVELS)
    found = [name for name in ALL_TIERS if name in chosen and level_of(name) in wanted]
    if not found:
        raise typer.BadParameter(f"the tiers {', '.join(chosen)} are none of {', '.join(wanted)}", param_hint="--level")
    return found


def _check_device(name: str) -> None:
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number.isdecimal() or name == kind):
        raise typer.BadParameter(f"{name!r} is neither cpu nor cuda", param_hint="--device")
    if kind == "cuda" and not torch.cuda.device_count():
        raise typer.BadParameter(f"{name!r}, but PyTorch sees no CUDA device", param_hint="--device")


def _choices(option: str, given: list[str], choices: tuple[str, ...]) -> list[str]:
    for value in given:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(choices)}", param_hint=option)
    return given


def cp_sizes_of(text: str | None, group_kind: str, device: str) -> tuple[int, ...]:
    """The group sizes. Without --cp-size: those of the suite, or fewer if every rank is a process; on one GPU two
    processes share it.
    """
    if text is None:
        most = max(torch.cuda.device_count(), 2) if device.startswith("cuda") else 4
        return CP_SIZES if group_kind == "member" else tuple(n for n in (1, 2, 4) if n <= most)
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) > MOST_RANKS:
        rule = f"no list of group sizes such as 2,3, from 1 to {MOST_RANKS}"
        raise typer.BadParameter(f"{text!r} is {rule}", param_hint="--cp-size")
    return sizes


app = command_line()
