"""Passes on instructions: functions from program to program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from cp_fast.compile.index_tables import RowKey, Tables
from cp_fast.compile.program import (
    OWN,
    Accumulate,
    Copy,
    Free,
    Heads,
    Instruction,
    Launch,
    Program,
    Programs,
    Recv,
    Send,
    View,
    Wait,
    reads,
    writes,
)
from cp_ref.groups.group import Group
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.table import Spans, runs, starts_of

__all__ = [
    "PIECES",
    "accumulate_late",
    "copy_early",
    "free_early",
    "in_input_dtype",
    "low_precision_grads",
    "may_have_low_precision",
    "of_one_launch",
    "recv_in_place",
    "write_in_place",
]

R = TypeVar("R")  # Rows.


# ---- accumulate_late
#
# Accumulate partial results late, while messages travel, and those of one sum together.
#
# Lowering accumulates a partial result right after its launch, so nothing hides the work and the next messages wait for
# it. This pass moves each accumulation down:
#
#     out, dq   to the next launch with a result for the same sum: the messages of its step are then on their way
#     dkv       to the end of the step, when the partial results of other ranks are there too; for a local sum, until
#               two partial results are waiting, and all that other ranks send are there
#
# Nothing is moved past an instruction that reads the sum. Of several partial results the first becomes the sum without
# an addition, so the pass puts one first whose dtype is that of the sum. A row's partial results are then added in an
# order that depends on steps, windows and dtypes alone. So a row has the same bits whatever else is in the batch.


def accumulate_late(program: Program[RowKey]) -> Program[RowKey]:
    """The same accumulations, later."""
    return replace(program, instructions=_Moving(program).instructions())


@dataclass
class _Moving:
    program: Program[RowKey]
    waiting: list[Accumulate[RowKey]] = field(default_factory=list)
    found: list[Instruction[RowKey]] = field(default_factory=list)
    step: int = 0
    begun: set[int] = field(default_factory=set)  # Sums with a partial result.

    def instructions(self) -> tuple[Instruction[RowKey], ...]:
        program = self.program
        parts = [one for one in program.of(Accumulate) if not one.of_sink]
        self.parts = Counter(one.target.buffer for one in parts)
        self.to_come = Counter(one.target.buffer for one in parts if self._is_wide(one))
        sums_of: dict[int, set[int]] = {}
        for one in parts:
            sums_of.setdefault(one.source.buffer, set()).add(one.target.buffer)
        for one in program.instructions:
            if one.step != self.step:
                self._end_step()
                self.step = one.step
            if isinstance(one, Accumulate) and not one.of_sink:
                self.waiting.append(one)
                self.to_come[one.target.buffer] -= self._is_wide(one)
                continue
            if isinstance(one, Launch):
                more = set[int]().union(*(sums_of.get(result, set()) for result in one.results))
                self._flush(lambda total, more=more: total in more and program.buffers[total].kind != "dkv")
            elif isinstance(one, Accumulate):
                self._flush(lambda total, one=one: total == one.target.buffer)
            elif isinstance(one, Copy):
                self._flush(lambda total, one=one: total == one.source.buffer)
            self.found.append(one)
        self._flush(lambda total: True)
        return tuple(self.found)

    def _end_step(self) -> None:
        waiting = Counter(one.target.buffer for one in self.waiting)

        def ready(total: int) -> bool:
            spec = self.program.buffers[total]
            if spec.kind != "dkv" or spec.rows is not None:
                return spec.kind == "dkv"
            return waiting[total] >= 2 and not self.to_come[total]

        self._flush(ready)

    def _flush(self, wanted: Callable[[int], bool]) -> None:
        """Accumulate the waiting partial results of these sums."""
        by_sum: dict[int, list[Accumulate[RowKey]]] = {}
        for one in self.waiting:
            if wanted(one.target.buffer):
                by_sum.setdefault(one.target.buffer, []).append(one)
        self.waiting = [one for one in self.waiting if one.target.buffer not in by_sum]
        for total, some in by_sum.items():
            two = self.parts[total] == 2
            if two and total not in self.begun:
                some.sort(key=self._first_of_two)
            elif not two and self.program.buffers[total].kind == "dkv":  # Of the others, messages have whole results.
                some.sort(key=lambda one: not self._is_wide(one))
            self.begun.add(total)
            self.found += [replace(one, step=self.step, made_by="accumulate_late") for one in some]

    def _is_wide(self, one: Accumulate[RowKey]) -> bool:
        """Whether the partial result has the dtype of a sum of three or more."""
        return self.program.buffers[one.source.buffer].dtype == "wide"

    def _first_of_two(self, one: Accumulate[RowKey]) -> tuple[bool, bool]:
        """The sort key for a sum of two, which has the same bits in either order: first is a partial result with all
        rows, in the dtype that the sum is rounded to.
        """
        spec, rows = self.program.buffers[one.target.buffer], one.target.rows
        whole = spec.rows is None or rows is None or (isinstance(rows, slice) and rows == slice(0, spec.rows))
        return not whole, self.program.buffers[one.source.buffer].dtype != spec.dtype


# ---- recv_in_place
#
# Receive rows where a launch reads them, instead of copying them there later.
#
# In a head exchange the received rows join the rank's own in a buffer of all rows, in their order. If the rows of a
# message form a few pieces there, the message is received into them, and the copy is dropped.


PIECES = 4  # of a message: each is a separate copy, and more cost the host more than one kernel for all of them


def recv_in_place(program: Program[RowKey], tables: Tables, kept: Sequence[int], most: int = PIECES) -> Program[RowKey]:
    """Receive such messages in place, if they form at most so many pieces. `kept`: buffers that are needed after the
    program.
    """
    found = list(program.instructions)
    times = Counter(number for one in found for number in reads(one))
    received = dict.fromkeys(one.buffer for one in found if isinstance(one, Recv) and one.part is None)
    for number in received:
        copies = [one for one in found if isinstance(one, Copy) and one.source.buffer == number]
        if times[number] != 1 or len(copies) != 1 or number in kept:
            continue
        copy = copies[0]
        recvs = [one for one in found if isinstance(one, Recv) and one.buffer == number]
        pieces = _pieces(program, copy, [recv.size for recv in recvs], tables, most)
        at, posted = (next(n for n, one in enumerate(found) if one is wanted) for wanted in (copy, recvs[0]))
        if pieces is None or _is_written(program, found[:at], copy, recvs[0].step) or at < posted:
            continue
        where = dict(zip(map(id, recvs), pieces, strict=True))
        target = copy.target.buffer
        found = [
            replace(one, buffer=target, rows=where[id(one)], made_by="recv_in_place")
            if isinstance(one, Recv) and id(one) in where
            else one
            for one in found
            if one is not copy
        ]
    return replace(program, instructions=tuple(found))


def _is_written(program: Program[RowKey], before: Sequence[Instruction[RowKey]], copy: Copy[RowKey], step: int) -> bool:
    """Whether a copy or message of another step has written to the target of a copy."""
    target = copy.target.buffer
    if program.buffers[target].role == "own":
        return True
    return any(
        (isinstance(one, Copy) and one.target.buffer == target and one.step != copy.step)
        or (isinstance(one, Recv) and one.buffer == target and one.step != step)
        for one in before
    )


def _pieces(
    program: Program[RowKey], copy: Copy[RowKey], sizes: Sequence[int], tables: Tables, most: int
) -> list[tuple[slice, ...]] | None:
    """The target rows of each message, for consecutive messages of these sizes that one copy moves. None if there are
    too many pieces, or if the copy moves only some rows or heads.
    """
    for view in (copy.source, copy.target):
        spec = program.buffers[view.buffer]
        if view.heads != spec.all_heads or spec.parts:
            return None
    if copy.source.rows != slice(0, sum(sizes)) or copy.target.rows is None:
        return None
    spans = tables.spans(copy.target.rows)
    if len(spans) > most * len(sizes):
        return None
    part, spans = spans.cut(starts_of(sizes)[:-1])
    begin, size = runs((part[1:] != part[:-1]) | (spans.start[1:] != spans.stop[:-1]), len(part))  # Not touching.
    edges = part[begin], spans.start[begin], spans.stop[begin + size - 1]
    found: list[list[slice]] = [[] for _ in sizes]
    for n, start, stop in zip(*(column.tolist() for column in edges), strict=True):
        found[n].append(slice(start, stop))
    return [tuple(pieces) for pieces in found] if all(0 < len(pieces) <= most for pieces in found) else None


# ---- write_in_place
#
# Write the outs of forward launches where they belong in the rank's result, where nothing is added to them.
#
# Lowering gives each launch its own buffer. Its rows then go to a sum, and the sums of all heads to the result.
# Where launches have different rows or heads, these are copies alone.


def write_in_place(program: Program[RowKey], tables: Tables) -> Program[RowKey]:
    """The forward program with outs that are written in place: all of them, or none."""
    result = program.results.get("out")
    places = None if result is None else _in_place(program, tables, result)
    if places is None:
        return program
    found: list[Instruction[RowKey]] = []
    for one in program.instructions:
        if isinstance(one, Launch):
            assert result is not None
            made_by = "write_in_place" if one.made_by == "lower" else f"{one.made_by}, write_in_place"
            into = View(result, *places[one.results[0]])
            found.append(replace(one, results=(result,), into=into, made_by=made_by))
        elif not (isinstance(one, Accumulate | Copy) and program.buffers[one.source.buffer].kind == "out"):
            found.append(one)
    return replace(program, instructions=tuple(found))


def _in_place(program: Program[RowKey], tables: Tables, result: int) -> dict[int, tuple[slice, Heads]] | None:
    """The rows and heads of the result that each partial result is, by buffer. None if some of them are added, if rows
    come from or go to others, or if a launch gathers its queries.
    """
    specs = program.buffers
    messages = [n for one in program.instructions if isinstance(one, Send | Recv) for n in (*reads(one), *writes(one))]
    if program.direction != "forward" or any(specs[number].kind == "out" for number in messages):
        return None
    copies = [one for one in program.of(Copy) if specs[one.source.buffer].kind == "out"]
    if any(one.target.buffer != result or one.source.rows is not None for one in copies):
        return None
    sums = {one.source.buffer for one in copies}
    places: dict[int, tuple[slice, Heads]] = {}
    for one in program.of(Launch):
        q, (partial,) = one.operands[0], one.results
        rows = slice(0, specs[partial].rows) if q.rows is None else q.rows
        if q.buffer != OWN["q"] or not isinstance(rows, slice):
            return None
        places[partial] = rows, specs[partial].heads
    cells: list[tuple[Spans, Heads]] = []
    for one in program.of(Accumulate):
        spec, part = specs[one.target.buffer], places.get(one.source.buffer)
        if one.of_sink or part is None or one.target.buffer not in sums or spec.dtype != "input":
            return None
        assert one.source.rows is not None
        assert one.target.rows is not None
        source, target = tables.spans(one.source.rows), tables.spans(one.target.rows)
        if not np.array_equal(source.start + part[0].start, target.start):
            return None
        cells.append((target, (spec.heads[0] + one.target.heads[0], spec.heads[0] + one.target.heads[1])))
    for n, (rows, heads) in enumerate(cells):
        for others, its in cells[:n]:
            if max(heads[0], its[0]) < min(heads[1], its[1]) and len(rows.overlaps(others)[0]):
                return None
    return places


# ---- copy_early
#
# Copy own rows while the first messages travel.
#
# All keys of all_gather, and all rows of an a2a, lie in one buffer: those that arrive and the own ones. The own ones
# are here from the beginning, and so are the rows that leave at the second step, packed by heads. Where a launch hides
# the messages anyway, only rows for buffers that are there already are copied early.


_STEPS = 2  # The last step whose copies are made early: further ones would hold memory for long.


def copy_early(program: Program[RowKey]) -> Program[RowKey]:
    """The same copies of own rows, some of them before the first wait."""
    found, specs = program.instructions, program.buffers
    wait = next((n for n, one in enumerate(found) if isinstance(one, Wait)), len(found))
    there = {number for one in found[:wait] for number in writes(one)}
    hidden = any(isinstance(one, Launch) for one in found[:wait])

    def moves(one: Instruction[RowKey]) -> bool:
        if not isinstance(one, Copy) or one.step > _STEPS or (hidden and one.target.buffer not in there):
            return False
        return (specs[one.source.buffer].role, specs[one.target.buffer].role) == ("own", "operand")

    moved = [replace(one, step=found[wait].step, made_by="copy_early") for one in found[wait:] if moves(one)]
    rest = [one for one in found[wait:] if not moves(one)]
    return replace(program, instructions=(*found[:wait], *moved, *rest))


# ---- free_early
#
# Free every buffer after its last use. Without this pass all buffers live until the end of the program.
#
# An operand last used by a backward launch is freed before its gradients are allocated (`cp_fast.runtime`). Messages
# keep their tensors alive, so a sent buffer is freed when its messages are posted. A buffer that is only received is
# freed when its messages have arrived.


def free_early(program: Program[R], kept: Collection[int]) -> Program[R]:
    """Add the frees. `kept`: buffers that are needed after the program."""
    keep = {*kept, *program.results.values()}
    keep |= {number for number, spec in enumerate(program.buffers) if spec.role in ("own", "result")}
    after: dict[int, list[int]] = {}
    for place, one in reversed(list(enumerate(program.instructions))):
        for number in (*reads(one), *writes(one)):
            if number not in keep:
                keep.add(number)
                after.setdefault(_end(program.instructions, place), []).append(number)
    found: list[Instruction[R]] = []
    for place, one in enumerate(program.instructions):
        found.append(one)
        if place in after:
            found.append(Free(one.step, tuple(sorted(after[place]))))
    return replace(program, instructions=tuple(found))


def _end(instructions: tuple[Instruction[R], ...], place: int) -> int:
    """The end of the use at this place: messages are posted together, and received at the next wait."""
    if isinstance(instructions[place], Recv):
        while not isinstance(instructions[place], Wait):
            place += 1
    while isinstance(instructions[place], Send | Recv) and isinstance(instructions[place + 1], Send | Recv):
        place += 1
    return place


# ---- low_precision_grads
#
# Send gradients from a single launch in the launch's dtype: half the bytes, and the same bits.
#
# A partial result travels in float32, since it may be a sum. Where it is just what one launch yielded in the inputs'
# dtype, widening it adds nothing: its receiver adds it in float32 all the same. Only the sender knows from how many
# launches its rows come, so the ranks tell each other once, when a plan is made.


def may_have_low_precision(problem: Problem) -> bool:
    """Whether partial gradients of a planner's schedule travel, and in a wider dtype than the inputs'. It is the same
    on all ranks. In a2a gradients arrive complete.
    """
    half = problem.dtype in ("float16", "bfloat16")
    return half and problem.cp_size > 1 and problem.a2a_size < problem.cp_size


def of_one_launch(program: Program[R]) -> frozenset[int]:
    """The buffers of gradients that are sent, not complete, and hold the result of one launch and nothing else."""
    parts = Counter(one.target.buffer for one in program.of(Accumulate))
    launched = {result for one in program.of(Launch) for result in one.results}
    single = {
        one.target.buffer
        for one in program.of(Accumulate)
        if one.source.buffer in launched and parts[one.target.buffer] == 1
    }
    sent = [
        (one.target.buffer, program.buffers[one.target.buffer])
        for one in program.of(Copy)
        if one.source.buffer in single
    ]
    return frozenset(n for n, spec in sent if (spec.role, spec.dtype) == ("message", "wide") and spec.kind != "out")


def low_precision_grads(programs: Programs[R], group: Group, *, rounded: bool) -> Programs[R]:
    """The programs with such gradients, and those that arrive from the other ranks, in the inputs' dtype. Collective.

    Args:
        rounded: whether this rank's kernel library always yields gradients in the inputs' dtype.
    """
    single = of_one_launch(programs.backward) if rounded else frozenset[int]()
    mine = [(one.peer, one.tag) for one in programs.backward.of(Send) if one.source.buffer in single]
    arriving = {
        (rank, tag) for rank, its in enumerate(group.all_gather_object(mine)) for peer, tag in its if peer == group.rank
    }
    received = {one.buffer for one in programs.backward.of(Recv) if (one.peer, one.tag) in arriving}
    return replace(programs, backward=in_input_dtype(programs.backward, single | received))


def in_input_dtype(program: Program[R], numbers: Collection[int]) -> Program[R]:
    """The program with these buffers, which are sent or received, in the inputs' dtype."""
    buffers = [replace(spec, dtype="input") if n in numbers else spec for n, spec in enumerate(program.buffers)]
    instructions = [
        replace(one, made_by="low_precision_grads")
        if isinstance(one, Send | Recv) and not {*reads(one), *writes(one)}.isdisjoint(numbers)
        else one
        for one in program.instructions
    ]
    return replace(program, buffers=tuple(buffers), instructions=tuple(instructions))
