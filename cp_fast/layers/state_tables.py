"""One rank's part of a schedule of states, as tables of numbers: which maps are exchanged and composed.

A map is a row of tensors, whatever its form, and its number is that of its fragment among those of all documents. Every
map that the rank makes or receives has a slot in the gathered tensors: the own ones first, then those that arrive,
message by message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import torch

from cp_fast.compile.exchange_program import ExchangedRows, RowMessages
from cp_ref.schedules.linear_schedules import ALL_HEADS, DocumentFragments
from cp_ref.schedules.schedule import Message, Pieces, Step
from cp_ref.schedules.table import Column, Spans

__all__ = ["Apply", "ScanTable", "StateTables", "Wave", "scan_table", "state_tables"]

Span = tuple[int, int]


class Apply(NamedTuple):
    """Maps to apply: `slots` of the maps, `scans` whose states they act on. int64 tensors of one length."""

    slots: torch.Tensor
    scans: torch.Tensor


class Wave(NamedTuple):
    """The i-th maps of all scans. The states before them enter own fragments; then the maps act on the states.

    read: (own fragments, scans), int64 tensors, or None.
    """

    read: tuple[torch.Tensor, torch.Tensor] | None
    apply: Apply | None


class ScanTable(NamedTuple):
    """Scans as int64 tensors, for one launch: scan i has the steps first[i]:first[i + 1]."""

    first: torch.Tensor  # [n + 1]
    steps: torch.Tensor  # [steps, 2]: the slot of the map to apply, and the place of the state before it; -1 for none
    starts: torch.Tensor  # [n]: the state that a scan begins with, -1 for zeros


def scan_table(scans: Sequence[tuple[int, Sequence[tuple[int, int]]]], device: torch.device) -> ScanTable:
    """Of each scan its start and its steps (slot, place).

    >>> scan_table([(0, [(5, 1), (-1, 2)]), (3, [(4, -1)])], torch.device("cpu")).first
    tensor([0, 2, 3])
    """
    first = [0, *accumulate(len(steps) for _, steps in scans)]
    rows = [step for _, steps in scans for step in steps]
    starts = [start for start, _ in scans]
    a, b, c = (torch.tensor(x, dtype=torch.int64, device=device) for x in (first, rows, starts))
    return ScanTable(a, b.view(-1, 2), c)


@dataclass(frozen=True, eq=False)
class StateTables:
    """One pass on one rank.

    Attributes:
        chosen: the own fragments whose maps are needed, here or elsewhere; map i of them has slot i.
        chosen_index: the same, int64.
        messages: the exchange of maps.
        documents: that of each scan, int64.
        waves: in the order of composition.
        scans: the same for one launch, with the fragments of no document as scans of their own.
    """

    chosen: tuple[int, ...]
    chosen_index: torch.Tensor
    messages: RowMessages
    documents: torch.Tensor
    waves: tuple[Wave, ...]
    scans: ScanTable

    @property
    def composes(self) -> bool:
        """Whether any map enters an own fragment."""
        return any(wave.apply is not None for wave in self.waves)


def state_tables(
    kind: str, steps: Sequence[Step], everywhere: DocumentFragments, own: DocumentFragments, device: torch.device
) -> StateTables:
    """The tables of one rank's pass.

    Args:
        kind: of its messages.
        everywhere: the fragments of all ranks.
        own: those of the rank, in the order of its rows.
    """
    numbers: dict[Span, int] = {(start, stop): i for i, (*_, start, stop, _) in enumerate(own.rows())}
    scans = [
        (document, [(start, stop) for _, start, stop in maps])
        for step in steps
        for document, maps in groupby(step.scans.rows(), key=lambda row: row[0])
    ]
    needed = {span for step in steps for message in step.sends for span in _spans(message)}
    needed |= {span for _, spans in scans for span in spans[:-1]}
    made = sorted((span for span in needed if span in numbers), key=numbers.__getitem__)
    chosen = tuple(numbers[span] for span in made)
    arriving = [span for step in steps for message in step.recvs for span in _spans(message)]
    slot = {span: i for i, span in enumerate([*made, *arriving])}

    def table(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    waves = list[Wave]()
    for place in range(max((len(spans) for _, spans in scans), default=0)):
        here = [(i, spans[place], place + 1 < len(spans)) for i, (_, spans) in enumerate(scans) if place < len(spans)]
        read = [(numbers[span], i) for i, span, _ in here if span in numbers]
        apply = [(slot[span], i) for i, span, more in here if more]
        waves.append(
            Wave(
                (table(f for f, _ in read), table(i for _, i in read)) if read else None,
                Apply(table(s for s, _ in apply), table(i for _, i in apply)) if apply else None,
            )
        )
    documents = table(document for document, _ in scans)
    alone = set(range(len(own))) - {numbers.get(span) for _, spans in scans for span in spans}
    in_order: list[tuple[int, list[tuple[int, int]]]] = [
        (document, [(slot[s] if s != spans[-1] else -1, numbers.get(s, -1)) for s in spans])
        for document, spans in scans
    ]
    launch = scan_table([*in_order, *((-1, [(-1, number)]) for number in sorted(alone))], device)
    starts = np.array([start for start, _ in slot], dtype=np.int64)
    messages = _messages_of_maps(kind, steps, everywhere.start, starts[: len(made)], starts)
    return StateTables(chosen, table(chosen), messages, documents, tuple(waves), launch)


def _messages_of_maps(
    kind: str, steps: Sequence[Step], everywhere: Column, own: Column, gathered: Column
) -> RowMessages:
    """The exchange of maps. All fragments are given by the global rows where they begin, in order."""

    def maps(starts: Column) -> Spans:
        number = np.searchsorted(everywhere, starts)
        return Spans(number, number + 1)

    def of_maps(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(replace(m, pieces=Pieces.of(maps(m.pieces.start), ALL_HEADS)) for m in messages)

    there = tuple(Step(of_maps(step.sends), of_maps(step.recvs)) for step in steps if step.sends or step.recvs)
    return RowMessages({kind: ExchangedRows(maps(own), maps(gathered))}, there)


def _spans(message: Message) -> list[Span]:
    return list(zip(message.pieces.start.tolist(), message.pieces.stop.tolist(), strict=True))
