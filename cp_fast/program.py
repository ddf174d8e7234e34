"""A rank's program with every row looked up: the spec's schedule compiled to slices, index tensors and launches, once
per batch.

The ring works on three things, and this file decides which row of them holds what:

    block   the K/V rows in hand: the rank's own, then what arrived during the step before
    grads   the gradients of that block: what arrives for it, plus what this rank's launches add; they are sent on in
        the next step
    own     the gradients of the rank's own rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cp_fast.launches import Launch, batch, local_tiles
from cp_fast.rows import Frame, Rows, Span, rows_of
from cp_ref.spec import Message, Problem, Program, Step, kv_fragments, make_program, q_fragments

__all__ = ["Give", "RankProgram", "RingStep", "Take", "compile_p2p"]


@dataclass(frozen=True, slots=True)
class Give:
    """A send: these rows of the block, or of the rank's own K/V if `own` (kv); or of the grads of the step before
    (dkv).
    """

    peer: int
    tag: int
    rows: Rows
    own: bool


@dataclass(frozen=True, slots=True)
class Take:
    """A receive of `size` rows: the next block (kv); or what is added to `rows` of the grads, of the own ones if
    `home` (dkv).
    """

    peer: int
    tag: int
    size: int
    rows: Rows
    home: bool


@dataclass(frozen=True, slots=True)
class RingStep:
    """One step: at most one message of each kind in each direction, and the launches that run meanwhile."""

    give_kv: Give | None
    take_kv: Take | None
    give_dkv: Give | None
    take_dkv: Take | None
    launches: tuple[Launch, ...]
    own: bool  # whether the block in hand is the rank's own, so that its grads are the own gradients
    grad_size: int  # rows of the grads


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Both passes of one rank. `real_q_rows`: its local rows of real query tokens. `max_block`: rows of the largest
    block to arrive.
    """

    forward: tuple[RingStep, ...]
    backward: tuple[RingStep, ...]
    real_q_rows: Rows
    max_block: int


def compile_p2p(problem: Problem, rank: int, device: torch.device) -> RankProgram:
    """The p2p program of one rank, with its tables on the device."""
    forward, backward = make_program(problem, rank)
    compiler = _Compiler(problem, rank, device)
    steps_forward, steps_backward = compiler.compile(forward), compiler.compile(backward)
    takes = [step.take_kv.size for step in steps_forward if step.take_kv is not None]
    return RankProgram(steps_forward, steps_backward, compiler.real_q_rows(), max(takes, default=0))


class _Compiler:
    def __init__(self, problem: Problem, rank: int, device: torch.device) -> None:
        self.problem, self.device = problem, device
        self.q_frame = Frame(q_fragments(problem, rank))
        self.own_frame = Frame(kv_fragments(problem, rank))

    def compile(self, program: Program) -> tuple[RingStep, ...]:
        """Follow the block from step to step. Its grads have the rows that the next step sends (in the forward pass
        none: unused).
        """
        steps, block, grads_before = [], self.own_frame, self.own_frame
        for number, step in enumerate(program):
            sent_next = _only(program[number + 1].sends, "dkv") if number + 1 < len(program) else None
            grads = block if number == 0 or sent_next is None else _frame(sent_next)
            steps.append(self._step(step, block, grads_before, grads))
            block, grads_before = _frame(_only(step.recvs, "kv")), grads
        return tuple(steps)

    def _step(self, step: Step, block: Frame, grads_before: Frame, grads: Frame) -> RingStep:
        tiles = local_tiles(self.problem, step.tiles, self.q_frame, block)
        give_kv, take_kv = _only(step.sends, "kv"), _only(step.recvs, "kv")
        give_dkv, take_dkv = _only(step.sends, "dkv"), _only(step.recvs, "dkv")
        return RingStep(
            give_kv=give_kv and self._give_kv(give_kv, block),
            take_kv=take_kv and Take(take_kv.peer, take_kv.tag, _frame(take_kv).size, slice(None), home=False),
            give_dkv=give_dkv and Give(give_dkv.peer, give_dkv.tag, self._rows(give_dkv, grads_before), own=False),
            take_dkv=take_dkv and self._take_dkv(take_dkv, grads),
            launches=tuple(batch(tiles, self.device, block, grads)),
            own=grads is self.own_frame,
            grad_size=grads.size,
        )

    def _give_kv(self, message: Message, block: Frame) -> Give:
        own = self.own_frame.holds(message.pieces[0])
        return Give(message.peer, message.tag, self._rows(message, self.own_frame if own else block), own)

    def _take_dkv(self, message: Message, grads: Frame) -> Take:
        home = self.own_frame.holds(message.pieces[0])
        rows = self._rows(message, self.own_frame if home else grads)
        return Take(message.peer, message.tag, _frame(message).size, rows, home)

    def _rows(self, message: Message, frame: Frame) -> Rows:
        return rows_of([span for piece in message.pieces for span in frame.spans(piece)], self.device)

    def real_q_rows(self) -> Rows:
        """Local rows of real query tokens, in order."""
        spans = []
        for f in self.q_frame.fragments:
            real = min(f.stop, self.problem.sequences[f.seq].len_q) - f.start
            spans.append(Span(f.row, f.row + max(real, 0)))
        return rows_of(spans, self.device)


def _only(messages: Sequence[Message], what: str) -> Message | None:
    """The step's message of this kind; a ring has at most one."""
    found = [m for m in messages if m.what == what]
    assert len(found) <= 1, f"more than one {what} message in a step of a ring"
    return found[0] if found else None


def _frame(message: Message | None) -> Frame:
    return Frame.of_pieces(message.pieces if message is not None else ())
