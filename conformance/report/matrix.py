"""The matrix: schedule x format x mask, once over all problems and once for each feature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.coverage import played_cases
from conformance.features import AXES, Choice, choices_of, why_impossible
from conformance.record import FAILING, RunRecord
from conformance.report.states import State, counted, state_of
from cp_ref.spec import CP_COMM_TYPES, MASKS, QKV_FORMATS

__all__ = ["COLUMNS", "GROUPS", "Cell", "Panel", "matrix"]

COLUMNS: tuple[tuple[str, str], ...] = tuple((comm, fmt) for comm in CP_COMM_TYPES for fmt in QKV_FORMATS)

GROUPS: dict[str, tuple[str, ...]] = {  # The page's groups of panels, and the axes in each.
    "window": ("window",),
    "lengths": ("lengths",),
    "heads": ("heads",),
    "dims": ("dims",),
    "dtype": ("dtype",),
    "softmax": ("softmax", "softcap"),
    "results and gradients": ("results", "loss", "gradients"),
    "ranks": ("layout", "cp_size", "a2a split"),
    "calls": ("strides", "plan", "deterministic"),
}
_PLAIN = {  # A feature that is off gets no panel.
    *(("window", "none"), ("lengths", "plain"), ("heads", "MHA"), ("dims", "equal"), ("softmax", "vanilla")),
    *(("softcap", "off"), ("results", "out alone"), ("loss", "out"), ("gradients", "q, k, v"), ("strides", "plain")),
    *(("plan", "without"), ("deterministic", "no"), ("a2a split", "not split")),
}
_MOST_LINKS = 12  # Failing problems that a cell names.


@dataclass
class Cell:
    """The verdicts of the problems that have one schedule, format and mask, and maybe a feature."""

    counts: Counter[str] = field(default_factory=Counter)
    failing: list[int] = field(default_factory=list)  # Numbers of failing problems, smallest first.
    impossible: str = ""  # Why no problem can be here.

    @property
    def state(self) -> State:
        """The state that the cell shows."""
        return state_of(self.counts)

    @property
    def total(self) -> int:
        """How many problems."""
        return self.counts.total()

    @property
    def partly(self) -> bool:
        """Whether it is right, and also refuses some."""
        return self.state.name == "right" and bool(self.counts["unsupported"] or self.counts["missing"])

    @property
    def words(self) -> str:
        """The counts."""
        return counted(self.counts)


@dataclass
class Panel:
    """One feature's cells, or with the axis "" those of all problems."""

    choice: Choice
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)  # (schedule, format, mask) -> cell

    @property
    def rows(self) -> Iterable[tuple[str, list[tuple[str, str, Cell]]]]:
        """(mask, its (schedule, format, cell) from left to right) from top to bottom."""
        for mask in MASKS:
            yield mask, [(comm, fmt, self._cell(comm, fmt, mask)) for comm, fmt in COLUMNS]

    def _cell(self, comm: str, fmt: str, mask: str) -> Cell:
        if (found := self.cells.get((comm, fmt, mask))) is not None:
            return found
        places = (Choice("schedule", comm), Choice("format", fmt), Choice("mask", mask))
        return Cell(impossible=next(filter(None, (why_impossible(self.choice, place) for place in places)), ""))

    @property
    def counts(self) -> Counter[str]:
        """Over all cells."""
        return sum((cell.counts for cell in self.cells.values()), Counter[str]())

    @property
    def state(self) -> State:
        """The worst of its cells."""
        return state_of(self.counts)

    def to_json(self) -> dict[str, Any]:
        """Only the cells that were exercised."""
        return {
            "feature": str(self.choice) if self.choice.axis else "",
            "cells": {"/".join(key): dict(cell.counts) for key, cell in self.cells.items()},
        }


def matrix(record: RunRecord, numbers: Mapping[str, int]) -> tuple[Panel, ...]:
    """All problems first, then every feature of the axes in `GROUPS`. Problems without a case are not here.

    Args:
        numbers: text -> number of the failing problems.
    """
    everything = Panel(Choice("", "all problems"))
    choices = (
        Choice(axis, name)
        for axes in GROUPS.values()
        for axis in axes
        for name in AXES[axis][0]
        if (axis, name) not in _PLAIN
    )
    panels = {choice: Panel(choice) for choice in choices}
    for played in record.played:
        for case, verdict in played_cases(played):
            p = case.problem
            key = (p.cp_comm_type, p.qkv_format, p.attn_mask_type)
            number = numbers.get(played.text) if verdict in FAILING else None
            for panel in (everything, *(panels[c] for c in choices_of(case) if c in panels)):
                cell = panel.cells.setdefault(key, Cell())
                cell.counts[verdict] += 1
                if number is not None and number not in cell.failing:
                    cell.failing = sorted((*cell.failing, number))[:_MOST_LINKS]
    return (everything, *panels.values())
