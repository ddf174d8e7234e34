"""Proof by integers that a schedule of states computes a linear layer.

A map is known by the fragment whose rows make it, and a composition by the tuple of these fragments. The messages of
all ranks are played as `verify` plays those of attention. It finds

    a fragment that is never scanned, or twice           a receive without a send, a send without a receive
    a fragment that gets other maps than those before    a map that is scanned, or sent, where it is not
      it in its document, in another order, or twice     a map that arrives twice, or goes back to its owner
    a span that is no fragment: padding, two documents   messages that do not agree, and a deadlock

In the backward pass "before" means behind it in the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Literal

from cp_ref.schedules.areas import Areas
from cp_ref.schedules.linear_schedules import document_fragments
from cp_ref.schedules.problem import Problem, Workload
from cp_ref.schedules.schedule import STATES, RankSchedule, Schedule
from cp_ref.schedules.verify.coverage import grids
from cp_ref.schedules.verify.proof import InvalidSchedule
from cp_ref.schedules.verify.rehearsal import Rehearsal
from cp_ref.schedules.verify.well_formed import malformed

__all__ = [
    "verify_states",
]

Span = tuple[int, int]
_PASSES: tuple[tuple[Literal["forward", "backward"], str], ...] = (("forward", STATES[0]), ("backward", STATES[1]))


def verify_states(problem: Problem, schedule: Schedule) -> None:
    """Check that every fragment of a problem gets the composition of exactly the maps before it in its document, in
    order, each once; and in the backward pass of those behind it, in reverse order.

    Raises:
        InvalidSchedule: with every finding, which names the pass, the rank and the fragment.

    >>> from cp_ref.schedules.linear_schedules import make_states
    >>> from cp_ref.schedules.problem import Sequence
    >>> one = Problem(2, (Sequence(8, 8, 8, 8),), qkv_format="thd")
    >>> good = str(make_states(one))
    >>> verify_states(one, Schedule.parse(good))
    >>> verify_states(one, Schedule.parse(good.replace("scan 0 [0:2] [2:6] [6:8]", "scan 0 [2:6] [0:2] [6:8]")))
    Traceback (most recent call last):
        ...
    cp_ref.schedules.verify.proof.InvalidSchedule: the schedule is wrong:
    forward rank 0: fragment [0:2] of document 0 gets the maps [2:6], but before it lie none
    forward rank 0: fragment [6:8] of document 0 gets the maps [2:6] [0:2], but before it lie [0:2] [2:6]
    """
    work = Workload(Areas.of_rows([]), problem.workload.ownership)
    documents = _Documents(problem)
    if errors := [*malformed(work, schedule, STATES)] or [*documents.odd_lines(schedule)]:
        raise InvalidSchedule(errors)
    cells = grids(work.ownership, schedule)
    for name, kind in _PASSES:
        has = [{kind: cells["q"].owned(work.ownership.q.of(rank))} for rank in range(work.cp_size)]
        rehearsal = Rehearsal(name, schedule, cells, has, _words)
        rehearsal.run()
        errors += rehearsal.errors
        for rank, state in enumerate(rehearsal.ranks):
            errors += documents.composed(name, rank, state.rank_schedule)
            errors += documents.received(name, rank, state.rank_schedule)
    if errors:
        raise InvalidSchedule(errors)


class _Documents:
    """The fragments of a problem, to compare the lines of a schedule with."""

    def __init__(self, problem: Problem) -> None:
        self.rank_of: dict[Span, int] = {}
        self.of_document: dict[int, list[Span]] = {}
        for document, _, rank, start, stop, _ in document_fragments(problem).rows():
            self.rank_of[start, stop] = rank
            self.of_document.setdefault(document, []).append((start, stop))

    def odd_lines(self, schedule: Schedule) -> Iterator[str]:
        """Lines that mean nothing: tiles, operands saved, kinds of the other pass, spans that are no fragment."""
        if schedule.saved:
            yield f"the schedule saves {', '.join(schedule.saved)}, but a schedule of states saves nothing"
        for name, rank, number, step in schedule.steps():
            where, kind = f"{name} rank {rank} step {number}", dict[str, str](_PASSES)[name]
            if len(step.tiles):
                yield f"{where}: a schedule of states has no tiles"
            for message in (*step.sends, *step.recvs):
                if message.kind != kind:
                    yield f"{where}: a message carries {message.kind}; in this pass it must be {kind}"
                for start, stop, *_ in message.pieces.rows():
                    if (start, stop) not in self.rank_of:
                        yield f"{where}: a message has [{start}:{stop}], which is no fragment"
            for document, start, stop in step.scans.rows():
                if (start, stop) not in self.of_document.get(document, ()):
                    yield f"{where}: a scan has [{start}:{stop}], which is no fragment of document {document}"

    def composed(self, name: str, rank: int, steps: RankSchedule) -> Iterator[str]:
        """Each fragment of the rank is scanned once, behind the maps before it."""
        found: dict[Span, list[tuple[Span, ...]]] = {}
        for step in steps:
            for _, rows in groupby(step.scans.rows(), key=lambda row: row[0]):
                maps = [(start, stop) for _, start, stop in rows]
                for place, span in enumerate(maps):
                    found.setdefault(span, []).append(tuple(maps[:place]))
        for document, spans in self.of_document.items():
            ordered = spans if name == "forward" else spans[::-1]
            for place, span in enumerate(ordered):
                if self.rank_of[span] != rank:
                    continue
                here = f"{name} rank {rank}: fragment {_text([span])} of document {document}"
                got = found.get(span, [])
                if len(got) != 1:
                    yield f"{here} is scanned {len(got) or 'no'} times"
                elif got[0] != tuple(ordered[:place]):
                    before = _text(ordered[:place])
                    yield f"{here} gets the maps {_text(got[0])}, but before it lie {before}"

    def received(self, name: str, rank: int, steps: RankSchedule) -> Iterator[str]:
        """Each map arrives once, and not where its rows lie."""
        seen: set[Span] = set()
        for message in (message for step in steps for message in step.recvs):
            for start, stop, *_ in message.pieces.rows():
                again = (start, stop) in seen or self.rank_of[start, stop] == rank
                seen.add((start, stop))
                if again:
                    yield f"{name} rank {rank}: receives {message.kind} [{start}:{stop}], which it has"


def _words(kind: str, start: int, stop: int) -> str:
    return f"{kind} [{start}:{stop}]"


def _text(spans: list[Span] | tuple[Span, ...]) -> str:
    return " ".join(f"[{start}:{stop}]" for start, stop in spans) or "none"
