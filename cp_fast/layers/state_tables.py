"""One rank's part of a schedule of states, as tables of numbers: which maps are sent, received and composed.

Every map that the rank makes or receives has a slot, a row of one tensor: the own ones first, then those that arrive,
message by message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from cp_ref.schedules.linear_schedules import DocumentFragments
from cp_ref.schedules.schedule import Message, Step

__all__ = ["Apply", "ScanTable", "StateTables", "Transfer", "Wave", "scan_table", "state_tables"]

Span = tuple[int, int]


class Transfer(NamedTuple):
    """A message of maps: `count` slots from `first` on, or those of the table `scattered` (int64)."""

    peer: int
    tag: int
    first: int
    count: int
    scattered: torch.Tensor | None


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
        slots: how many slots there are.
        steps: (sends, receives) of each step with messages.
        documents: that of each scan, int64.
        waves: in the order of composition.
        scans: the same for one launch, with the fragments of no document as scans of their own.
    """

    chosen: tuple[int, ...]
    chosen_index: torch.Tensor
    slots: int
    steps: tuple[tuple[tuple[Transfer, ...], tuple[Transfer, ...]], ...]
    documents: torch.Tensor
    waves: tuple[Wave, ...]
    scans: ScanTable

    @property
    def composes(self) -> bool:
        """Whether any map enters an own fragment."""
        return any(wave.apply is not None for wave in self.waves)


def state_tables(steps: Sequence[Step], own: DocumentFragments, device: torch.device) -> StateTables:
    """The tables of one rank's pass. own: its fragments, in the order of its rows."""
    numbers: dict[Span, int] = {(start, stop): i for i, (*_, start, stop, _) in enumerate(own.rows())}
    scans = [
        (document, [(start, stop) for _, start, stop in maps])
        for step in steps
        for document, maps in groupby(step.scans.rows(), key=lambda row: row[0])
    ]
    needed = {span for step in steps for message in step.sends for span in _spans(message)}
    needed |= {span for _, spans in scans for span in spans[:-1]}
    chosen = sorted(numbers[span] for span in needed if span in numbers)
    slot = {span: i for i, span in enumerate(sorted((s for s in needed if s in numbers), key=numbers.__getitem__))}

    def table(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    def transfer(message: Message) -> Transfer:
        slots = [slot[span] for span in _spans(message)]
        together = slots == list(range(slots[0], slots[0] + len(slots)))
        return Transfer(message.peer, message.tag, slots[0], len(slots), None if together else table(slots))

    transfers: list[tuple[tuple[Transfer, ...], tuple[Transfer, ...]]] = []
    for step in steps:
        if step.sends or step.recvs:
            sends = tuple(map(transfer, step.sends))
            arriving = [span for message in step.recvs for span in _spans(message)]
            slot |= {span: len(slot) + i for i, span in enumerate(arriving)}
            transfers.append((sends, tuple(map(transfer, step.recvs))))
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
    return StateTables(tuple(chosen), table(chosen), len(slot), tuple(transfers), documents, tuple(waves), launch)


def _spans(message: Message) -> list[Span]:
    return list(zip(message.pieces.start.tolist(), message.pieces.stop.tolist(), strict=True))
