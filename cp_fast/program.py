"""A rank's program with every row looked up: the spec's schedule compiled to slices, index tensors and launches, once
per batch.

The steps work on three things, and this file decides which row of them holds what:

    block   the K/V rows in hand: the rank's own, then what arrived during the step before
    grads   the gradients of that block: what arrives for it, plus what this rank's launches add; sent on in the next
        step
    own     the gradients of the rank's own rows

A ring hands one block on from step to step; all_gather has one large block, from everybody. In the a2a schedules "own"
means the rows of the whole group for the rank's heads, and `heads` says how they come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cp_fast.heads import HeadExchange
from cp_fast.launches import Launch, batch, local_tiles
from cp_fast.rows import Frame, Rows, Span, rows_of
from cp_ref.spec import Message, Problem, Program, Step, Units, kv_fragments, make_program, q_fragments

__all__ = ["Give", "KVStep", "RankProgram", "Take", "compile_program"]


@dataclass(frozen=True, slots=True)
class Give:
    """A send: rows of the block, or of the rank's own K/V if `own` (kv); or of the grads of the step before (dkv)."""

    peer: int
    tag: int
    rows: Rows
    own: bool


@dataclass(frozen=True, slots=True)
class Take:
    """A receive of `size` rows: `rows` of the next block (kv); or what is added to `rows` of the grads, of the own ones
    if `home` (dkv).
    """

    peer: int
    tag: int
    size: int
    rows: Rows
    home: bool


@dataclass(frozen=True, slots=True)
class KVStep:
    """One step: its messages, and the launches that run meanwhile."""

    give_kv: tuple[Give, ...]
    take_kv: tuple[Take, ...]
    give_dkv: tuple[Give, ...]
    take_dkv: tuple[Take, ...]
    launches: tuple[Launch, ...]
    own: bool  # whether the block in hand is the rank's own, so that its grads are the own gradients
    grad_size: int  # rows of the grads

    @property
    def block_size(self) -> int:
        """Rows of the block that arrives."""
        return sum(t.size for t in self.take_kv)


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Both passes of one rank.

    `real_q_rows`: the local rows that hold real query tokens. `heads`: how heads are exchanged for sequence before and
    after the steps, which then run on the group's rows; None where they are not.
    """

    forward: tuple[KVStep, ...]
    backward: tuple[KVStep, ...]
    real_q_rows: Rows
    heads: HeadExchange | None


def compile_program(problem: Problem, rank: int, device: torch.device) -> RankProgram:
    """The program of one rank, with its tables on the device."""
    forward, backward = make_program(problem, rank)
    q_frame, kv_frame = Frame(q_fragments(problem, rank)), Frame(kv_fragments(problem, rank))
    if problem.cp_comm_type not in ("a2a", "a2a+p2p"):
        compiler = _Compiler(problem, q_frame, kv_frame, device)
        return RankProgram(
            compiler.compile(forward), compiler.compile(backward), _real_rows(problem, q_frame, device), None
        )
    units, unit = Units(problem), rank // problem.a2a_size
    group_q, group_kv = (Frame.of_pieces(units.active(unit, side)) for side in ("q", "kv"))
    heads = HeadExchange.compile(units, rank, (q_frame, kv_frame), (group_q, group_kv), device)
    compiler = _Compiler(problem, group_q, group_kv, device)
    steps_forward, steps_backward = compiler.compile(forward[1:-1]), compiler.compile(backward[1:-1])
    return RankProgram(steps_forward, steps_backward, _real_rows(problem, q_frame, device), heads)


class _Compiler:
    def __init__(self, problem: Problem, q_frame: Frame, own_frame: Frame, device: torch.device) -> None:
        self.problem, self.q_frame, self.own_frame, self.device = problem, q_frame, own_frame, device

    def compile(self, program: Program) -> tuple[KVStep, ...]:
        """Follow the block from step to step. Its grads have the rows that the next step sends (forward: none,
        unused).
        """
        steps, block, grads_before = [], self.own_frame, self.own_frame
        for number, step in enumerate(program):
            sent_next = _of(program[number + 1].sends, "dkv") if number + 1 < len(program) else []
            grads = block if number == 0 or not sent_next else _frame(sent_next)
            steps.append(self._step(step, block, grads_before, grads))
            block, grads_before = _frame(_of(step.recvs, "kv")), grads
        return tuple(steps)

    def _step(self, step: Step, block: Frame, grads_before: Frame, grads: Frame) -> KVStep:
        tiles = local_tiles(self.problem, step.tiles, self.q_frame, block)
        return KVStep(
            give_kv=tuple(self._give_kv(m, block) for m in _of(step.sends, "kv")),
            take_kv=tuple(self._take_kv(_of(step.recvs, "kv"))),
            give_dkv=tuple(Give(m.peer, m.tag, self._rows(m, grads_before), False) for m in _of(step.sends, "dkv")),
            take_dkv=tuple(self._take_dkv(m, grads) for m in _of(step.recvs, "dkv")),
            launches=tuple(batch(tiles, self.device, block, grads)),
            own=grads is self.own_frame,
            grad_size=grads.size,
        )

    def _give_kv(self, message: Message, block: Frame) -> Give:
        own = self.own_frame.holds(message.pieces[0])
        return Give(message.peer, message.tag, self._rows(message, self.own_frame if own else block), own)

    def _take_kv(self, messages: Sequence[Message]) -> list[Take]:
        """The messages lie in the next block one after the other."""
        takes, start = [], 0
        for m in messages:
            size = _frame([m]).size
            takes.append(Take(m.peer, m.tag, size, slice(start, start + size), False))
            start += size
        return takes

    def _take_dkv(self, message: Message, grads: Frame) -> Take:
        home = self.own_frame.holds(message.pieces[0])
        rows = self._rows(message, self.own_frame if home else grads)
        return Take(message.peer, message.tag, _frame([message]).size, rows, home)

    def _rows(self, message: Message, frame: Frame) -> Rows:
        return rows_of([span for piece in message.pieces for span in frame.spans(piece)], self.device)


def _real_rows(problem: Problem, q_frame: Frame, device: torch.device) -> Rows:
    """Local rows of real query tokens, in order."""
    spans = []
    for f in q_frame.fragments:
        real = min(f.stop, problem.sequences[f.seq].len_q) - f.start
        spans.append(Span(f.row, f.row + max(real, 0)))
    return rows_of(spans, device)


def _of(messages: Sequence[Message], what: str) -> list[Message]:
    return [m for m in messages if m.what == what]


def _frame(messages: Sequence[Message]) -> Frame:
    return Frame.of_pieces(piece for m in messages for piece in m.pieces)
