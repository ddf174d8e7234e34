"""The items of a trace: one tensor each, with its place in the schedule and in the global buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["DIRECTIONS", "KINDS", "PER_HEAD", "WHOLE", "Item", "Piece"]

DIRECTIONS = ("forward", "backward")
KINDS = ("given", "received", "tile", "merged", "final")
PER_HEAD = ("max_logit", "softmax_offset", "dsoftmax_offset")  # names of items of one value a head
WHOLE = {  # the places of a call's inputs and results
    **dict.fromkeys(("q", "k", "v", "softmax_offset"), ("forward", "given")),
    **dict.fromkeys(("out", "lse", "max_logit"), ("forward", "final")),
    "dout": ("backward", "given"),
    **dict.fromkeys(("dq", "dk", "dv", "dsoftmax_offset"), ("backward", "final")),
}


class Piece(NamedTuple):
    """Rows [start, stop) of the packed global buffer of queries, or of keys, for heads [head_start, head_stop).

    >>> str(Piece(2, 4, 0, 1))
    '[2:4]h0:1'
    """

    start: int
    stop: int
    head_start: int
    head_stop: int

    def __str__(self) -> str:
        return f"[{self.start}:{self.stop}]h{self.head_start}:{self.head_stop}"


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One recorded tensor.

    Attributes:
        direction: "forward" or "backward".
        step: from 0; items after the last step have the number of steps.
        rank: who had it.
        kind: "given", "received", "tile", "merged" or "final".
        source: the line of the schedule that it comes from, a message or a tile; "" for the rank's own rows.
        name: "q", "k", "v", "out", "lse", "dout", "delta", "dq", "dk", "dv"; "max_logit" and the like.
        piece: which rows and heads it is; None for one value a head.
        tensor: [n, h, d] or [n, h]; [h] where `piece` is None. On the CPU, in its own dtype.
    """

    direction: str
    step: int
    rank: int
    kind: str
    source: str
    name: str
    piece: Piece | None
    tensor: torch.Tensor

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Forward before backward, by step, by rank, by kind; as recorded within that."""
        return DIRECTIONS.index(self.direction), self.step, self.rank, KINDS.index(self.kind)

    @property
    def key(self) -> tuple[str, int, int, str, str, str, str]:
        """The item's identity, without its value: equal in two runs of one schedule."""
        return self.direction, self.step, self.rank, self.kind, self.source, self.name, str(self.piece or "")

    def __str__(self) -> str:
        of = f" of {self.source}" if self.source else ""
        at = f" {self.piece}" if self.piece else ""
        return (
            f"{self.direction} step {self.step} rank {self.rank}: {self.kind} {self.name}{at}{of}, "
            f"{str(self.tensor.dtype).removeprefix('torch.')} {list(self.tensor.shape)}"
        )
