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
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

from conformance.implementation import LoadError
from conformance.problems.strategies import CP_SIZES
from conformance.record import (
    DEFAULT_TIME_LIMIT_S,
    FAILING,
    LEVELS,
    Played,
    RunRecord,
    TierResult,
    replay_command,
    replay_options,
    version_of,
)
from conformance.report import unwritable, write_report
from conformance.report.coverage import Coverage, coverage
from conformance.report.failures import separating
from conformance.runner.known_failures import KnownFailures, KnownFailuresError
from conformance.runner.play_problem import Runner
from conformance.runner.processes import LONGEST_S
from conformance.runner.run_tiers import PROFILES
from conformance.runner.suite_run import ALL_TIERS, SuiteRun, describe_run, nothing_tested
from conformance.runner.tiers import TIERS, group_sizes, tiers_of
from conformance.runner.workers import open_runner
from conformance.step.report import table_lines
from conformance.step_command import ReportOption
from conformance.step_command import app as step_app
from cp_ref.schedules.values import MOST_RANKS

__all__ = ["app", "command_line", "cp_sizes_of", "print_coverage", "print_failures", "print_separating", "print_table"]

# ---- printed output: failures with the command that plays each again, a table of tiers, and pairs of features


_MOST_FINDINGS = 8
_MOST_KINDS = 10
_CASE = " [Case("  # how a finding of a named problem says which of its cases it is about
_MOST_PAIRS = 5


def print_separating(console: Console, record: RunRecord) -> None:
    """Which features separate failing from passing problems, before the failures themselves."""
    if found := separating(record):
        console.print("\n[bold]what separates failing problems from the others[/]", highlight=False)
        for each in found:
            console.print(f"  {each}", markup=False, highlight=False)


def print_failures(console: Console, result: TierResult, meta: Mapping[str, Any]) -> None:
    """The smallest failing problems of a tier, one of each kind; `meta` is that of the record."""
    kinds: dict[tuple[str, ...], list[Played]] = {}
    for played in result.smallest:
        kinds.setdefault(_kind(played), []).append(played)
    for played, *others in list(kinds.values())[:_MOST_KINDS]:
        console.print(f"\n[bold red]{result.tier}: {played.verdict}[/]", highlight=False)
        _print_findings(console, played.findings)
        if result.tier == "known failures":
            continue
        if others:
            names = ", ".join(other.text.partition(" ")[2] or other.text for other in others)
            console.print(f"  the same in {len(others)} more: {names}", markup=False, highlight=False)
        console.print("  play it again:", highlight=False)
        console.print(f"    {replay_command(meta, played)}", markup=False, highlight=False)
    if len(kinds) > _MOST_KINDS:
        more = sum(map(len, list(kinds.values())[_MOST_KINDS:]))
        console.print(f"\n... and {more} more problems of {result.tier}; all are in the report", highlight=False)


def _kind(played: Played) -> tuple[str, ...]:
    """Failures of a table that differ only in numbers are shown once; a shrunk failure is always shown."""
    if played.shrunk:
        return (played.text,)
    finding = (played.findings or ("",))[0].partition(_CASE)[0]
    return played.verdict, re.sub(r"[-+]?\b\d[\d.e+-]*", "#", finding)


def _print_findings(console: Console, findings: tuple[str, ...]) -> None:
    """One line each; the case that several belong to once, after them."""
    shown = [finding.partition(_CASE) for finding in findings[:_MOST_FINDINGS]]
    for n, (finding, _, case) in enumerate(shown):
        console.print(f"  - {finding}", markup=False, highlight=False)
        if case and (n + 1 == len(shown) or shown[n + 1][2] != case):
            console.print(f"    in Case({case[:-1]}", markup=False, highlight=False)
    if len(findings) > _MOST_FINDINGS:
        console.print(f"  - ... and {len(findings) - _MOST_FINDINGS} more findings", highlight=False)


def print_table(console: Console, results: list[TierResult], impl: str) -> None:
    """One line a tier, and the tiers' notes."""
    table: list[tuple[str, ...]] = [("tier", "played", "right", "failed", "known", "unsup.", "missing", "s", "")]
    for r in results:
        counts = (r.run, r.passed, r.count(*FAILING), r.count("known"), r.unsupported, r.count("missing"))
        table.append((r.tier, *map(str, counts), f"{r.seconds:.{0 if r.seconds >= 10 else 1}f}", ""))
    console.print(f"\nconformance of {impl}\n", markup=False, highlight=False)
    for line, failed in zip(table_lines(table), [False, *(r.count(*FAILING) for r in results)], strict=True):
        console.print(line, style="red" if failed else None, markup=False, highlight=False)
    console.print()
    for r in results:
        if note := r.note or _why_nothing(r):
            console.print(f"{r.tier}: {note}", markup=False, highlight=False)


def _why_nothing(result: TierResult) -> str:
    """The most frequent reason, for a tier that computed nothing."""
    reasons = Counter((p.findings or ("",))[0] for p in result.drawn)
    if not reasons or result.count("right", "known", *FAILING):
        return ""
    (reason, count), *others = reasons.most_common()
    return f"nothing was computed: {reason}" + (f" ({count} of {result.run})" if others else "")


def print_coverage(console: Console, found: Coverage) -> None:
    """How many of the possible pairs of features ran, and those whose absence is the most surprising."""
    totals = found.totals
    possible = sum(totals.values()) - totals["impossible"]
    if not found.problems:
        return
    console.print(
        f"\npairs of features: {totals['played']:,} of {possible:,} possible ({totals['played'] / possible:.0%}) ran in"
        f" {found.problems:,} problems; {totals['refused']:,} were always refused, {totals['never']:,} never came",
        highlight=False,
    )
    if missed := [pair for pair in found.missed(_MOST_PAIRS) if pair[2] >= 1.0]:  # rarer ones are no surprise
        table = Table("never together", title_justify="left", box=None, padding=(0, 2))
        table.add_column("expected by chance", justify="right")
        for a, b, expected in missed:
            table.add_row(f"{a} + {b}", f"{expected:.1f}")
        console.print(table)
        console.print("all of them: report.html and report.json of --report FOLDER", highlight=False)


# ---- the command line


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
    report: ReportOption = None,
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
        problems = [] if repro is None else [problem for _, problem in tiers_of(repro)]
        return tuple(size for problem in problems for size in group_sizes(problem))
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
        return open_runner(impl, device, time_limit, sizes, isolate)
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
    found = [name for name in ALL_TIERS if name in chosen and TIERS[name].level in wanted]
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
