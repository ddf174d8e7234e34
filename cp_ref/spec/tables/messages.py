"""The messages of schedules: pieces of rows of one kind, from one rank to another.

Kinds of rows in messages:
    operands, copied to the receiver:    q      query rows                   kv     key and value rows
                                         do     rows of the output's gradient, with the final lse and delta
    results, sent once and added up:     out    partial output rows with their lse (the receiver merges them by lse)
                                         dq     gradient of query rows       dkv    gradient of key and value rows
    maps of fragments, copied:           state  the map of the state that a fragment's rows make: see
                                                `cp_ref.spec.linear`
                                         dstate the same of the state's gradient, in the backward pass
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from cp_ref.spec.tables.table import Column, Table, constant, one_value

__all__ = ["KINDS", "OPERANDS", "RESULTS", "STATES", "Heads", "Message", "Pieces", "side_of", "tag"]

OPERANDS = ("kv", "q", "do")
RESULTS = ("out", "dq", "dkv")
KINDS = OPERANDS + RESULTS  # of attention
STATES = ("state", "dstate")  # of linear layers

Heads = tuple[int, int]


def side_of(name: str) -> str:
    """Which buffer the rows of a kind of message, or of a tensor, are of: "q" or "kv".

    >>> [side_of(name) for name in ("dkv", "dk", "out")]
    ['kv', 'kv', 'q']
    """
    return "kv" if name in ("kv", "k", "v", "dkv", "dk", "dv") else "q"


def tag(step: int, kind: str) -> int:
    """The tag of a step's messages of one kind.

    >>> tag(0, "kv"), tag(1, "kv")
    (0, 6)
    """
    return step * len(KINDS) + KINDS.index(kind)


@dataclass(frozen=True, eq=False)
class Pieces(Table):
    """Pieces of messages: rows [start, stop) of a global buffer, for heads [head_start, head_stop).

    Heads count query heads in q, do, out and dq, and kv heads in kv and dkv.
    """

    start: Column
    stop: Column
    head_start: Column
    head_stop: Column

    @staticmethod
    def spans(start: Column, stop: Column, heads: Heads) -> Pieces:
        """Pieces of the same heads."""
        return Pieces(start, stop, *(constant(head, start) for head in heads))

    @property
    def size(self) -> int:
        """The number of rows of all pieces; a row of some of the heads counts as one."""
        return int((self.stop - self.start).sum())

    @property
    def row_heads(self) -> int:
        """The number of rows of all pieces, each times its heads."""
        return int(((self.stop - self.start) * (self.head_stop - self.head_start)).sum())


@dataclass(frozen=True, eq=False)
class Message:
    """Pieces of one kind to, or from, one peer. A send and its receive differ only in the peer.

    `complete`: these are the whole results of their rows and heads, on the way to their owner. They may be rounded to
    the input's dtype before they travel, because nothing is added to them any more. `verify` proves it.

    `tag`: the same at both ends. Messages are in the order of the steps, whatever their tags: between two ranks the
    n-th message sent is the n-th received.
    """

    kind: str
    peer: int
    tag: int
    pieces: Pieces
    complete: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        mine, theirs = ((m.kind, m.peer, m.tag, m.complete) for m in (self, other))
        return mine == theirs and self.pieces == other.pieces

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # pieces are arrays

    @cached_property
    def by_heads(self) -> list[tuple[Heads, Column, Column]]:
        """(heads, start, stop) of the pieces; neighbours of the same heads are one entry."""
        p = self.pieces
        if one_value(p.head_start) and one_value(p.head_stop):
            return [((int(p.head_start[0]), int(p.head_stop[0])), p.start, p.stop)] if len(p) else []
        new = (p.head_start[1:] != p.head_start[:-1]) | (p.head_stop[1:] != p.head_stop[:-1])
        edges = [0, *(np.flatnonzero(new) + 1).tolist(), len(p)]
        return [((int(p.head_start[a]), int(p.head_stop[a])), p.start[a:b], p.stop[a:b]) for a, b in pairwise(edges)]
