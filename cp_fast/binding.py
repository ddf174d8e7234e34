"""A lowered program's pass is bound (`cp_fast.bound`): for calls with the same sizes, on the first of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from cp_fast.bound import Arrival, Complete, Give, Given, Handed, Moved, Pass, Ready, Room, Step, Sum, Take
from cp_fast.exchanges import Message, Prepares, prepare
from cp_fast.merge import TotalShape
from cp_fast.program import (
    OWN,
    Contribution,
    Copy,
    Launch,
    LoweredProgram,
    LoweredStep,
    Operand,
    Recv,
    ResultRecv,
    Send,
    Sums,
)
from cp_fast.rows import Rows, count, is_all
from cp_ref.spec import Group, Problem

__all__ = ["Call", "bound"]


class Call(NamedTuple):
    """What a pass is bound for, beside the program: all else that its calls have in common."""

    group: Prepares | None  # None: any that has no exchanges of its own; a plan keeps no group alive
    backward: bool
    sizes: tuple[int, int]  # rows of q, and of k and v
    dtype: torch.dtype
    wide: torch.dtype
    device: torch.device
    has_sink: bool
    has_dlse: bool


def bound(known: dict[Any, Any], program: LoweredProgram[Rows], problem: Problem, group: Group, call: Call) -> Pass:
    """The pass of this program for such calls in this group; `known` keeps it for the next one."""
    found = known.get(call)
    if found is None:
        while len(known) >= _MOST:
            known.pop(next(iter(known)))
        found = known[call] = _Binding(program, problem, group, call).bind()
    return found


_MOST = 8  # kinds of calls that a program is bound for at a time


class _Binding:
    """A pass while it is bound."""

    def __init__(self, program: LoweredProgram[Rows], problem: Problem, group: Group, call: Call) -> None:
        self._program, self._group, self._call = program, group, call
        self._kinds = ("dq", "dkv") if call.backward else ("out",)
        self._slots = {name: n for n, name in enumerate(program.buffers)}
        self._numbers = {name: n for n, name in enumerate(program.sums)}
        self._taken: dict[int, list[Take]] = {}
        d_qk, d_v = problem.d_qk, problem.d_v
        self._dims = {"q": (d_qk,), "kv": (d_qk, d_v), "do": (d_v,), "res": (d_v,), "out": (d_v,)}
        self._dims |= {"dq": (d_qk,), "dkv": (d_qk, d_v)}
        self._sums = tuple(Sum(sums, self._shape(sums)) for sums in program.sums.values())

    def bind(self) -> Pass:
        """All steps."""
        direction = "backward" if self._call.backward else "forward"
        steps: tuple[LoweredStep[Rows], ...] = getattr(self._program, direction)
        mine = {
            kind: [n for n, s in enumerate(self._sums) if s.sums.kind == kind and s.sums.home] for kind in self._kinds
        }
        made = [
            self._step(f"{direction}, step {n} of {len(steps)}", step, last=n == len(steps) - 1)
            for n, step in enumerate(steps)
        ]
        home = {kind: tuple(numbers) for kind, numbers in mine.items()}
        return Pass(tuple(made), self._slots, self._sums, home, self._dims)

    # ---- sizes

    def _size(self, name: str) -> int:
        buffer = self._program.buffers[name]
        if name in OWN.values():
            return self._call.sizes[1 if buffer.kind == "kv" else 0]
        return buffer.size + self._program.spare_rows

    def _room(self, kind: str, heads: int, size: int, dtype: torch.dtype | None = None) -> Room:
        call = self._call
        columns = kind in ("res", "out") or (kind == "do" and call.has_dlse)
        rows = tuple((size, heads, d) for d in self._dims[kind])
        return Room(rows, ((heads, size),) if columns else (), dtype or call.dtype, call.wide, call.device)

    def _room_of(self, name: str) -> Room:
        buffer = self._program.buffers[name]
        return self._room(buffer.kind, buffer.heads[1] - buffer.heads[0], self._size(name))

    def _shape(self, sums: Sums) -> TotalShape:
        call, heads = self._call, sums.heads[1] - sums.heads[0]
        size = sums.size if not sums.home else call.sizes[1 if sums.kind == "dkv" else 0]
        rounded = sums.home or sums.complete
        final = None if not rounded or (sums.kind == "out" and call.has_sink) else call.dtype
        behind = tuple((heads, d) for d in self._dims[sums.kind])
        return TotalShape(size, behind, call.wide, final, call.device, sums.kind == "out", self._program.spare_rows)

    # ---- operands

    def _take(self, what: Operand[Rows]) -> Take:
        slot, buffer = self._slots[what.buffer], self._program.buffers[what.buffer]
        whole = what.heads == (0, buffer.heads[1] - buffer.heads[0]) and is_all(what.rows, self._size(what.buffer))
        take = Take(slot, what.rows, what.heads, whole, what.buffer in OWN.values())
        known = self._taken.setdefault(slot, [])
        if (same := next((one for one in known if _same(one, take)), None)) is None:
            known.append(take)
        return same or take

    def _move(self, copy: Copy[Rows]) -> Moved:
        target = copy.target
        buffer = self._program.buffers[target.buffer]
        heads = None if target.heads == (0, buffer.heads[1] - buffer.heads[0]) else slice(*target.heads)
        room = self._room_of(target.buffer)
        return Moved(self._take(copy.source), self._slots[target.buffer], room, target.rows, heads)

    def _given(self, send: Send[Rows]) -> Given:
        buffer = self._program.buffers[send.buffer]
        count, taken = buffer.heads[1] - buffer.heads[0], None
        if len(send.peers) == 1 and send.heads == count:
            taken = self._take(Operand(send.buffer, send.rows, (0, count)))
        return Given(self._slots[send.buffer], taken, send.rows, send.first_heads, send.heads)

    def _arrivals(self, recvs: Sequence[Recv]) -> list[tuple[Arrival, list[Recv]]]:
        by_buffer: dict[str, list[Recv]] = {}
        for recv in recvs:
            by_buffer.setdefault(recv.buffer, []).append(recv)
        found: list[tuple[Arrival, list[Recv]]] = []
        for name, some in by_buffer.items():
            rows: list[tuple[slice, ...] | None] = []
            first = 0
            for recv in some:
                behind = (slice(first, first + recv.size),)
                rows.append(None if recv.size == self._size(name) else recv.rows or behind)
                first += recv.size
            found.append((Arrival(self._slots[name], self._room_of(name), tuple(rows)), some))
        return found

    # ---- results

    def _gives(self, contributions: Iterable[Contribution[Rows]], size: int, heads: int) -> tuple[Give, ...]:
        """Contributions of a partial result with so many rows and heads."""
        found: list[Give] = []
        for c in contributions:
            number = self._numbers[c.sums]
            whole = c.heads == (0, heads) and is_all(c.rows, size)
            place = self._sums[number].shape.place(c.into, slice(*c.into_heads))
            found.append(Give(number, c.rows, c.heads, whole, place))
        return tuple(found)

    def _ready(self, launch: Launch[Rows], last_use: Sequence[str]) -> Ready:
        operands = tuple(self._take(x) for x in (launch.q, launch.kv, launch.do, launch.res) if x is not None)
        heads, heads_kv = (x.heads[1] - x.heads[0] for x in (launch.q, launch.kv))
        results = self._gives(launch.results, count(launch.q.rows), heads)
        results_kv = self._gives(launch.results_kv, count(launch.kv.rows), heads_kv)
        last = tuple(self._slots[name] for name in last_use)
        settled = tuple((give.sums, 1) for give in results)
        return Ready(operands, launch.segments, launch.first_head, results, results_kv, settled, last)

    def _complete(self, recvs: Sequence[ResultRecv[Rows]]) -> Complete:
        """Complete results for the same rows, of each peer for as many heads."""
        first, heads = recvs[0], recvs[0].heads[1] - recvs[0].heads[0]
        call = self._call
        rows = tuple((len(recvs), first.size, heads, d) for d in self._dims[first.kind])
        columns = ((heads, first.size),) * (len(recvs) if first.kind == "out" else 0)
        room = Room(rows, columns, call.dtype, call.wide, call.device)
        return Complete(first.kind, first.into[0].into, tuple(recv.heads[0] for recv in recvs), room)

    # ---- a step

    def _step(self, where: str, step: LoweredStep[Rows], *, last: bool) -> Step:
        program, sends, recvs = self._program, list[Message](), list[Message]()
        given = [self._given(send) for send in step.sends]
        alone = not step.launches  # nobody asks for memory while messages travel
        for send in step.sends:
            room = self._room(program.buffers[send.buffer].kind, send.heads, count(send.rows))
            for peer, tag in zip(send.peers, send.tags, strict=True):
                sends += _messages(peer, tag, room, held=alone or send.buffer in OWN.values())
        handed: list[Handed] = []
        for send in step.result_sends:
            sums, number = program.sums[send.sums], self._numbers[send.sums]
            rows = slice(send.start, send.start + send.size)
            handed.append(Handed(number, None if is_all(rows, sums.size) else rows))
            dtype = self._call.dtype if sums.complete or sums.narrow else self._call.wide
            heads = sums.heads[1] - sums.heads[0]
            sends += _messages(send.peer, send.tag, self._room(sums.kind, heads, send.size, dtype), held=alone)
        arrivals = self._arrivals(step.recvs)
        for arrival, some in arrivals:
            heads = arrival.room.rows[0][1]
            for recv, rows in zip(some, arrival.rows, strict=True):
                room = self._room(program.buffers[recv.buffer].kind, heads, recv.size)
                recvs += _messages(recv.peer, recv.tag, room, None if rows is None else [count(x) for x in rows])
        partial: list[tuple[Room, tuple[Give, ...]]] = []
        for recv in step.result_recvs:
            if not recv.complete:
                heads = recv.heads[1] - recv.heads[0]
                dtype = self._call.dtype if recv.narrow else self._call.wide
                room = self._room(recv.kind, heads, recv.size, dtype)
                partial.append((room, self._gives(recv.into, recv.size, heads)))
                recvs += _messages(recv.peer, recv.tag, room)
        complete: list[Complete] = []
        for group in _for_the_same_rows(step.result_recvs):
            complete.append(self._complete(group))
            for recv in group:
                recvs += _messages(recv.peer, recv.tag, self._room(recv.kind, recv.heads[1] - recv.heads[0], recv.size))
        launches = tuple(map(self._ready, step.launches, _last_uses(step)))
        gives = [give for launch in launches for give in launch.results_kv]
        gives += [give for _, some in partial for give in some]
        added = {recv.kind for recv in step.result_recvs if not recv.complete}
        return Step(
            tuple(map(self._move, step.packed)),
            tuple(given),
            tuple(handed),
            tuple({self._numbers[send.sums] for send in step.result_sends if send.sums not in program.saved_sums}),
            tuple(arrival for arrival, _ in arrivals),
            tuple(partial),
            tuple(complete),
            prepare(self._group, where, sends, recvs) if sends or recvs else None,
            tuple(map(self._move, step.copies)),
            launches,
            tuple(
                (n, 2 if self._sums[n].sums.home else 1)
                for n in sorted({give.sums for give in gives if self._sums[give.sums].sums.kind == "dkv"})
                if not (last and self._sums[n].sums.home)
            ),
            tuple(self._slots[name] for name in step.last_use),
            tuple(kind for kind in self._kinds if last and kind not in added),
        )


def _last_uses(step: LoweredStep[Rows]) -> list[list[str]]:
    """By launch, the buffers of the step's `last_use` that no later launch reads."""
    read = [{x.buffer for x in (one.q, one.kv, one.do, one.res) if x is not None} for one in step.launches]
    later = [set[str]().union(*read[n + 1 :]) for n in range(len(read))]
    last = set(step.last_use)
    return [sorted(last & its - rest) for its, rest in zip(read, later, strict=True)]


def _messages(
    peer: int, tag: int, room: Room, pieces: Sequence[int] | None = None, *, held: bool = False
) -> list[Message]:
    """A message for each tensor, with tags of their own: no copy into a common buffer. pieces: the numbers of rows that
    they are received in, but for those by column.
    """
    found: list[Message] = []
    for n, shape in enumerate(room.rows):
        row = math.prod(shape[1:]) * room.dtype.itemsize
        found.append(Message(peer, tag + n, tuple(row * size for size in pieces or [shape[0]]), held))
    return found + [
        Message(peer, tag + 2 + n, (math.prod(shape) * room.wide.itemsize,), held)
        for n, shape in enumerate(room.columns)
    ]


def _for_the_same_rows(recvs: Sequence[ResultRecv[Rows]]) -> list[list[ResultRecv[Rows]]]:
    """Complete results by the own rows that they go to."""
    groups: dict[tuple[object, ...], list[ResultRecv[Rows]]] = {}
    for recv in recvs:
        if recv.complete:
            into = recv.into[0].into
            rows = (into.start, into.stop) if isinstance(into, slice) else id(into)
            groups.setdefault((recv.kind, rows, recv.size, recv.heads[1] - recv.heads[0]), []).append(recv)
    return list(groups.values())


def _same(one: Take, other: Take) -> bool:
    slices = isinstance(one.rows, slice) and isinstance(other.rows, slice) and one.rows == other.rows
    return one.heads == other.heads and (one.rows is other.rows or slices)
