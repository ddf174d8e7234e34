"""Which outs both ends of an exchange have in the end, so that they need not travel again beside the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cp_fast.planning.results import Parcels, parcels_of
from cp_fast.planning.rows import SpanSets
from cp_ref.spec import Program

__all__ = ["CompleteOuts"]


@dataclass(frozen=True)
class CompleteOuts:
    """The rows and heads of which this rank got complete outs from a peer, or gave them to one: for these the peer, or
    this rank, has the final out and lse, so that a `do` message need not carry them.
    """

    received: dict[int, list[Parcels]]
    sent: dict[int, list[Parcels]]

    @staticmethod
    def of(forward: Program, sets: SpanSets) -> CompleteOuts:
        """The complete outs of the forward pass's steps."""
        received: dict[int, list[Parcels]] = {}
        sent: dict[int, list[Parcels]] = {}
        for step in forward:
            for messages, found in ((step.recvs, received), (step.sends, sent)):
                for message in messages:
                    if message.kind == "out" and message.complete:
                        found.setdefault(message.peer, []).extend(parcels_of(message, sets))
        return CompleteOuts(received, sent)

    @staticmethod
    def cover(outs: Sequence[Parcels], parcels: Parcels) -> bool:
        """Whether these have all rows and heads of a message."""
        return any(
            out.heads[0] <= parcels.heads[0]
            and parcels.heads[1] <= out.heads[1]
            and out.spans.packed.covers(parcels.spans)
            for out in outs
        )
