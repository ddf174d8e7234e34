"""The matrix: schedule x format x mask, once over all problems and once for each feature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.draw.case_features import CHOICES, Choice, choices_of
from conformance.draw.feature_coverage import played_cases
from conformance.judge.run_record import FAILING, RunRecord
from cp_ref.schedules.words import CP_COMM_TYPES, MASKS, QKV_FORMATS

__all__ = ["COLUMNS", "SYMBOLS", "Cell", "Panel", "counted", "matrix", "worst"]

COLUMNS: tuple[tuple[str, str], ...] = tuple((comm, fmt) for comm in CP_COMM_TYPES for fmt in QKV_FORMATS)

SYMBOLS: dict[str, str] = {  # A cell shows the first of its verdicts in this order.
    "wrong": "\u2715",
    "crashed": "!",
    "hung": "!",
    "out of memory": "!",
    "known": "\u25c6",
    "right": "\u2713",
    "unsupported": "\u2013",
    "missing": "\u25cb",
}


def worst(counts: Mapping[str, int]) -> str:
    """The verdict that a cell with these counts shows; empty without problems.

    >>> worst({"right": 8, "unsupported": 1}), worst({"right": 8, "hung": 1}), worst({})
    ('right', 'hung', '')
    """
    return next((verdict for verdict in SYMBOLS if counts.get(verdict)), "")


def counted(counts: Mapping[str, int]) -> str:
    """The counts in words.

    >>> counted({"right": 2, "wrong": 1}), counted({})
    ('1 wrong, 2 right', 'not exercised')
    """
    return ", ".join(f"{counts[v]:,} {v}" for v in SYMBOLS if counts.get(v)) or "not exercised"


@dataclass
class Cell:
    """The verdicts of the cases that have one schedule, format and mask; the first failing problem's number."""

    counts: Counter[str] = field(default_factory=Counter)
    failing: int | None = None


@dataclass
class Panel:
    """The cells of the problems that have one feature; with `choice` None those of all problems."""

    choice: Choice | None
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)  # (schedule, format, mask) -> cell

    @property
    def rows(self) -> Iterable[tuple[str, list[Cell]]]:
        """(mask, its cells in the order of `COLUMNS`), from top to bottom."""
        return ((mask, [self.cells.get((*column, mask), Cell()) for column in COLUMNS]) for mask in MASKS)

    @property
    def counts(self) -> Counter[str]:
        """Over all cells."""
        return sum((cell.counts for cell in self.cells.values()), Counter[str]())

    def to_json(self) -> dict[str, Any]:
        """Only the cells that were exercised."""
        return {
            "feature": str(self.choice or ""),
            "cells": {"/".join(key): dict(cell.counts) for key, cell in self.cells.items()},
        }


def matrix(record: RunRecord, numbers: Mapping[str, int]) -> tuple[Panel, ...]:
    """All problems first, then every feature. Problems without a case are not here.

    Args:
        numbers: text -> number of the failing problems.
    """
    everything = Panel(None)
    panels = {choice: Panel(choice) for choice in CHOICES if choice.axis not in ("schedule", "format", "mask")}
    for played in record.drawn:
        for case, verdict in played_cases(played):
            p = case.problem
            number = numbers.get(played.text) if verdict in FAILING else None
            for panel in (everything, *(panels[c] for c in choices_of(case) if c in panels)):
                cell = panel.cells.setdefault((p.cp_comm_type, p.qkv_format, p.attn_mask_type), Cell())
                cell.counts[verdict] += 1
                cell.failing = min((n for n in (cell.failing, number) if n is not None), default=None)
    return (everything, *panels.values())
