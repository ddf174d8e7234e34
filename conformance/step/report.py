"""The answer of `compare_step`, in a table and words."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from conformance.judge.budgets import Row

__all__ = ["CAUSES", "Finding", "StepReport"]

_MOST_ROWS = 8
_PAGE = "docs/how_to/training.md"
CAUSES = {  # by name: the heading in docs/how_to/training.md
    "factor": "A loss or gradients off by one factor",
    "mean-per-rank": "Losses averaged per rank",
    "labels": "Labels shifted after the batch was cut",
    "positions": "Positions that begin at 0 on each rank",
    "sinks": "Sinks: share and total",
    "reduction": "Gradients that are not reduced, or twice",
    "padding": "Tokens that must not count",
    "slice": "A layer that sees only its slice",
    "random": "Random numbers",
    "micro-batches": "Reduced or averaged per micro-batch",
    "clipping": "Gradients clipped per rank",
}


@dataclass(frozen=True)
class Finding:
    """A cause by name (of `CAUSES`), and what shows it."""

    cause: str
    text: str

    def __str__(self) -> str:
        title = CAUSES[self.cause]
        anchor = "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")
        return f"{self.text}\n  {title}: see {_PAGE}#{anchor}"


@dataclass(frozen=True)
class StepReport:
    """All compared values, and the mistakes found.

    Attributes:
        title: ranks, schedule, layout, dtype.
        rows: one for each number and tensor, with its errors and bounds (`conformance.judge.budgets.Row`).
        findings: differences with a known signature.
        first: where the step goes wrong first, in words; "" where it is right, or where that cannot be told.
    """

    title: str
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...] = ()
    first: str = ""

    @property
    def right(self) -> bool:
        """Whether everything agrees, and most gradients are larger than their own rounding errors."""
        known = [not row.note for row in self.rows if row.name.startswith("gradient of")]
        return all(row.ok for row in self.rows) and 2 * sum(known) >= len(known) > 0

    @property
    def causes(self) -> tuple[str, ...]:
        """The names of the findings' causes."""
        return tuple(finding.cause for finding in self.findings)

    def __str__(self) -> str:
        text = io.StringIO()
        out = Console(file=text, width=110, color_system=None)
        said = "right" if self.right else "WRONG"
        table = Table(title=f"step over {self.title}: {said}", box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("", no_wrap=True)
        for name in ("error", "allowed", "mean", "allowed", ""):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._shown():
            numbers = (row.max_error, row.max_bound, row.mean_error, row.mean_bound)
            table.add_row(row.name, *(f"{number:.1e}" for number in numbers), row.note or ("" if row.ok else "WRONG"))
        out.print(table)
        lines = [self._counts()]
        if not self.right:
            lines += [str(finding) for finding in self.findings]
            lines += [f"first difference: {self.first}"] if self.first else []
            if not self.findings:
                lines.append(f"no known signature; {_PAGE}#what-has-no-signature says how to go on")
        shown = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
        return "\n".join([*shown, *lines])

    def _shown(self) -> list[Row]:
        """Losses and norm; of gradients and parameters those that are wrong, or the worst."""
        few = [row for row in self.rows if not _many(row)]
        for kind in ("gradient of", "after two steps:"):
            rows = [row for row in self.rows if row.name.startswith(kind)]
            wrong = [row for row in rows if not row.ok]
            worst = sorted(rows, key=lambda row: row.max_error / (row.max_bound or 1.0), reverse=True)[:1]
            few += wrong[:_MOST_ROWS] or worst
        return few

    def _counts(self) -> str:
        parts = []
        for kind, words in (("gradient of", "gradients"), ("after two steps:", "parameters after two steps")):
            rows = [row for row in self.rows if row.name.startswith(kind)]
            if rows:
                parts.append(f"{sum(row.ok for row in rows)} of {len(rows)} {words} agree")
        return ", ".join(parts)


def _many(row: Row) -> bool:
    return row.name.startswith(("gradient of", "after two steps:"))
