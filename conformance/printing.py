"""The printed output of a run: failures with the command that plays each again, a table of tiers, and the pairs it
exercised.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from conformance.commands import replay_command
from conformance.draw.feature_coverage import Coverage
from conformance.judge.run_record import FAILING, Played, RunRecord
from conformance.report.failures import separating
from conformance.run.run_tiers import TierResult
from conformance.step.report import table_lines

__all__ = ["print_coverage", "print_failures", "print_separating", "print_table"]

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
