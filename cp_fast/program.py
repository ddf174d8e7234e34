"""A rank's program with every row looked up: slices, index tensors and launches, made once per batch.

What is sent and computed, step by step, is what `plan.schedule` says; `cp_fast.planning` works it out for this rank and
all sequences at once. The steps work on three things, and planning decides which row of them holds what:

    block   the K/V rows in hand: the rank's own, then what arrived during the step before
    grads   the gradients of that block: what arrives for it, plus what this rank's launches add; sent on in the next
            step
    own     the gradients of the rank's own rows

A ring hands one block on from step to step; all_gather has one large block, from everybody. In the a2a schedules "own"
means the rows of the whole group for the rank's heads, and `heads` says how they come and go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_fast.backends import Segments
from cp_fast.heads import HeadExchange
from cp_fast.rows import Rows

__all__ = ["Give", "KVStep", "Launch", "RankProgram", "Take"]


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
class Launch:
    """One kernel launch: which rows it reads and writes, and how they are segmented."""

    q_rows: Rows  # of the rank's q, out, lse, dout, which are read
    out_rows: Rows  # of its out, lse, dq, which are added to: the same rows, but for what pads a table (`spare_rows`)
    kv_rows: Rows  # of the block's k, v
    grad_rows: Rows  # of the block's dk, dv buffer, in the backward pass
    segments: Segments


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

    `real_q_rows`: the local rows that hold real query tokens; a mask of all rows in a plan that is updated in place.
    `heads`: how heads are exchanged for sequence before and after the steps, which then run on the group's rows; None
    where they are not. `spare_rows`: how many rows lie behind those of every buffer that results are added to, to be
    written and never read. Tables of a plan that is updated in place have a constant size, and what pads them is
    written to the one spare row; other plans have none. `position_ids`: see `Plan.position_ids`; int64 [t], in a plan
    that is updated in place.
    """

    forward: tuple[KVStep, ...]
    backward: tuple[KVStep, ...]
    real_q_rows: Rows
    heads: HeadExchange | None
    spare_rows: int = 0
    position_ids: torch.Tensor | None = None
