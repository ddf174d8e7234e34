"""The answer of `compare_step`, in a table and words."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from conformance.checks.budgets import Row

__all__ = [
    "CAUSES",
    "Bits",
    "Compared",
    "Evidence",
    "Finding",
    "ModuleRow",
    "StepRecord",
    "StepReport",
    "ranks_in_words",
    "shortened",
    "table_lines",
]

_MOST_ROWS = 8
_NAME = 24  # A name has at least this many characters, even on a narrow terminal.
_WIDTH = 110  # A table has this width without a terminal.
_KINDS = {  # The names of tensors' rows begin so -> the heading, and the word that counts them.
    "gradient of": ("gradients", "gradients"),
    "after two steps:": ("after two steps", "parameters after two steps"),
    "buffer": ("buffers", "buffers"),
}
_VALUE = re.compile(rf"({'|'.join(_KINDS)}) (.*?)(?:, rank (\d+))?")
_PAGE = "docs/how_to/training.md"
CAUSES = {  # By name: the heading in docs/how_to/training.md.
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
    "not-finite": "Values that are not finite",
    "tied": "Weights tied on one side alone",
    "scaled": "Values scaled on some ranks",
    "term": "Another term of the loss",
    "buffers": "Buffers updated from a rank's own tokens",
    "leak": "Packed documents that leak in one process",
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
class ModuleRow:
    """One call of a module in the forward pass, in the order in which outputs were computed.

    Attributes:
        name, kind: of the module, and of its class; the model's own name is "".
        forward: which forward pass of the step, from 0.
        ok: whether the output agrees; None if it could not be compared.
        text: what differs, or why it could not be compared.
    """

    name: str
    kind: str
    forward: int
    ok: bool | None = None
    text: str = ""


@dataclass
class Evidence:
    """The findings of one kind of evidence, or of all kinds.

    Attributes:
        first: where the step goes wrong first, in words; "" where that cannot be told.
        modules: in the order of the forward pass.
        notes: what else a reader has to know.
    """

    findings: list[Finding] = field(default_factory=list)
    first: str = ""
    modules: list[ModuleRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Compared:
    """A value of the step over all ranks: a number, or the gradient or the values of one parameter.

    Attributes:
        kind: "gradient of", "after two steps:", "buffer", or "" for numbers and losses.
        name: the parameter's, the buffer's, or the number's.
        row: errors and bounds: of the worst rank.
        wrong: the ranks whose value is wrong; () also where that is not known by rank.
    """

    kind: str
    name: str
    row: Row
    wrong: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bits:
    """A comparison with the bits of one process.

    Attributes:
        modules, same: how many calls of modules were compared, and how many of these have an output of the same bits.
        left: the calls, in the order of the forward pass, that are given the same bits and give others. What comes
            after them is given other bits, so that it cannot be judged.
        losses: of tokens, in words; "" if step returns none.
        gradients, same_gradients: how many parameters have one, and how many of these are the same on all ranks.
    """

    modules: int
    same: int
    left: tuple[str, ...]
    losses: str
    gradients: int
    same_gradients: int

    @property
    def forward(self) -> bool:
        """Whether the whole forward pass has the same bits."""
        return self.same == self.modules > 0 and not self.losses.startswith("other")

    def __str__(self) -> str:
        """Three lines, and one for each call that is left."""
        lines = [f"bits: {self.same} of {self.modules} outputs of modules are those of one process"]
        lines += [f"  other bits begin in {each}" for each in self.left]
        lines += [f"bits: losses of tokens: {self.losses}"] if self.losses else []
        lines.append(f"bits: {self.same_gradients} of {self.gradients} gradients are those of one process")
        return "\n".join(lines)


@dataclass(frozen=True)
class StepReport:
    """All compared values, and the mistakes found.

    Attributes:
        title: ranks, schedule, layout, dtype.
        rows: one for each number and tensor, with its errors and bounds (`conformance.checks.budgets.Row`). A tensor
            of a rank that has not rank 0's bits has a row of its own.
        findings: differences with a known signature.
        first: where the step goes wrong first, in words; "" where it is right, or where that cannot be told.
        ranks: how many there are.
        modules: whether their outputs agree, in the order of the forward pass; looked at where something is wrong.
        notes: what else a reader has to know: steps that were skipped, records that could not be compared.
        bits: what has the bits of one process, where that was asked for.
    """

    title: str
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...] = ()
    first: str = ""
    ranks: int = 1
    modules: tuple[ModuleRow, ...] = ()
    notes: tuple[str, ...] = ()
    bits: Bits | None = None

    @property
    def right(self) -> bool:
        """Whether everything agrees, and most gradients are larger than their own rounding errors."""
        known = [not value.row.note for value in self.values if value.kind == "gradient of"]
        return all(row.ok for row in self.rows) and 2 * sum(known) >= len(known) > 0

    @property
    def causes(self) -> tuple[str, ...]:
        """The names of the findings' causes."""
        return tuple(finding.cause for finding in self.findings)

    @cached_property
    def values(self) -> tuple[Compared, ...]:
        """The rows by value: a parameter is one, whatever its ranks."""
        rows: dict[tuple[str, str], dict[int, Row]] = {}
        for row in self.rows:
            found = _VALUE.fullmatch(row.name)
            kind, name, rank = found.groups() if found else ("", row.name, None)
            rows.setdefault((kind, name), {})[int(rank or 0)] = row
        return tuple(
            Compared(
                kind,
                name,
                max(each.values(), key=lambda row: (not row.ok, _share(row))),
                tuple(r for r in range(self.ranks) if not each.get(r, each[0]).ok) if kind else (),
            )
            for (kind, name), each in rows.items()
        )

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """The mistakes, in sentences; nothing for a step that is right."""
        if self.right:
            return ()
        lines = [str(finding) for finding in self.findings]
        lines += [f"first difference: {self.first}"] if self.first else []
        if not self.findings:
            lines.append(f"no known signature; {_PAGE}#what-has-no-signature says how to go on")
        return tuple(lines)

    def __str__(self) -> str:
        """A table that takes the terminal's width, or COLUMNS characters; numbers are never cut."""
        table: list[tuple[str, ...]] = [("", "ranks", "error", "allowed", "mean", "allowed", "")]
        for value in (value for value in self.values if not value.kind):
            table.append(self._cells("", value))
        for kind, (heading, _) in _KINDS.items():
            values = [value for value in self.values if value.kind == kind]
            wrong = [value for value in values if not value.row.ok]
            worst = sorted(values, key=lambda value: _share(value.row), reverse=True)[:1]
            table += [(heading, *[""] * 6)] if values else []
            table += [self._cells("  ", value) for value in wrong[:_MOST_ROWS] or worst]
            table += [(f"  and {len(wrong) - _MOST_ROWS} more", *[""] * 6)] if len(wrong) > _MOST_ROWS else []
        said = "right" if self.right else "WRONG"
        lines = [f"step over {self.title}: {said}", *table_lines(table), self.counts, *self.notes, *self.diagnosis]
        lines += [] if self.bits is None else [str(self.bits)]
        return "\n".join(lines)

    def _cells(self, indent: str, value: Compared) -> tuple[str, ...]:
        row = value.row
        numbers = (row.max_error, row.max_bound, row.mean_error, row.mean_bound)
        note = ": ".join(filter(None, ("" if row.ok else "WRONG", row.note)))
        return indent + value.name, ranks_in_words(value.wrong, self.ranks), *(f"{x:.1e}" for x in numbers), note

    @property
    def counts(self) -> str:
        """How many parameters agree, and on which ranks the others differ."""
        parts = []
        for kind, (_, words) in _KINDS.items():
            values = [value for value in self.values if value.kind == kind]
            if not values:
                continue
            where = Counter(ranks_in_words(value.wrong, self.ranks) for value in values if not value.row.ok)
            said = [f"{sum(value.row.ok for value in values)} of {len(values)} {words} agree"]
            said += [f"{count} differ on {_ranks(ranks)}" for ranks, count in where.most_common()]
            parts.append(", ".join(said))
        return "; ".join(parts)


@dataclass(frozen=True)
class StepRecord:
    """The reports of one command, as data. `meta` is that of a `RunRecord`. `error` says why a step could not be run or
    compared.
    """

    meta: dict[str, Any]
    reports: tuple[StepReport, ...]
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists; `from_json` reads it back.

        >>> row = Row("loss", 0.0, 1e-7, 0.0, 1e-7, True)
        >>> record = StepRecord({}, (StepReport("2 ranks", (row,), (Finding("labels", "wrong"),), ranks=2),))
        >>> StepRecord.from_json(record.to_json()) == record
        True
        """
        return {"meta": self.meta, "steps": [asdict(report) for report in self.reports], "error": self.error}

    @staticmethod
    def from_json(data: dict[str, Any]) -> StepRecord:
        """The record that `to_json` wrote."""
        return StepRecord(data["meta"], tuple(_report(step) for step in data["steps"]), data["error"])


def _report(data: dict[str, Any]) -> StepReport:
    """Infinities and NaN are text in JSON."""
    kinds: dict[str, Any] = {"rows": _row, "findings": Finding, "modules": ModuleRow}
    fields: dict[str, Any] = data | {"notes": tuple(data["notes"])}
    for name, make in kinds.items():
        fields[name] = tuple(make(**each) for each in data[name])
    bits = data.get("bits")
    fields["bits"] = bits and Bits(**bits | {"left": tuple(bits["left"])})
    return StepReport(**fields)


def _row(**fields: Any) -> Row:
    numbers: dict[str, Any] = {n: float(x) for n, x in fields.items() if n.endswith(("_error", "_bound"))}
    return Row(**fields | numbers)


def table_lines(table: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table: its first column is as wide as the terminal allows, the others as they must be.

    Args:
        table: a name, numbers, and a remark in each row; the first row is the heading.
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    room = shutil.get_terminal_size((_WIDTH, 24)).columns - sum(2 + width for width in widths[1:])
    first = min(widths[0], max(room, _NAME))
    lines = []
    for name, *numbers, note in table:
        cells = "".join(f"  {cell:>{width}}" for cell, width in zip(numbers, widths[1:-1], strict=True))
        lines.append(f"{shortened(name, first):{first}}{cells}  {note}".rstrip())
    return lines


def shortened(name: str, width: int) -> str:
    """A name without its middle, where it is longer than `width`.

    >>> shortened("model.layers.10.attention.q_proj.weight", 30)
    'model.lay...tion.q_proj.weight'
    """
    if len(name) <= width:
        return name
    front = (width - 3) // 3
    return f"{name[:front]}...{name[len(name) - (width - 3 - front) :]}"


def _share(row: Row) -> float:
    """The part of its bound that an error takes."""
    return row.max_error / (row.max_bound or 1.0)


def ranks_in_words(ranks: Sequence[int], size: int) -> str:
    """
    >>> ranks_in_words([0, 1, 2, 5], 8), ranks_in_words([0, 1], 2), ranks_in_words([], 2)
    ('0-2, 5', 'all', '')
    """
    if len(ranks) == size:
        return "all"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _ranks(words: str) -> str:
    return "all ranks" if words == "all" else f"rank{'s' * (not words.isdecimal())} {words}"
