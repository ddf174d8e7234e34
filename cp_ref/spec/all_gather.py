"""The all_gather schedule: every rank gets the keys that its queries see, and attends at once (Llama 3).

    step 0    keys travel, everyone to everyone        tiles with the own keys
    step 1                                             tiles with everybody else's
    step 2    (backward) dK/dV go home and are added up: a reduce-scatter

Only rows that the receiver sees are sent: under a causal mask, or a window, that is less than all of K and V. The
backward pass gathers again, so that nothing but the own slices is kept between the passes.

From Llama 3 (Grattafiori et al., 2024).
"""

from __future__ import annotations

import numpy as np

from cp_ref.spec.p2p import tiles_of
from cp_ref.spec.schedule import Message, Pieces, Program, Step, tag
from cp_ref.spec.units import Spans, Units, spans_by

__all__ = ["plan_all_gather_rank"]


def plan_all_gather_rank(units: Units, rank: int) -> tuple[Program, Program]:
    """One rank's forward and backward program."""
    work, sees, seen = units.workload, units.sees(rank), units.seen(rank)
    own, remote = tiles_of(sees, np.where(sees.owner == rank, 0, 1), 2, (0, work.heads_q))
    received = spans_by(sees.owner, sees.k_start, sees.k_stop)
    given = spans_by(seen.reader, seen.k_start, seen.k_stop)
    peers = [(rank + n) % units.count for n in range(1, units.count)]

    def messages(kind: str, rows: Spans, step: int) -> tuple[Message, ...]:
        pieces = {peer: Pieces.spans(*rows.of(peer), (0, work.heads_kv)) for peer in peers}
        return tuple(Message(kind, peer, tag(step, kind), pieces[peer]) for peer in peers if len(pieces[peer]))

    attend = Step(messages("kv", given, 0), messages("kv", received, 0), own), Step(tiles=remote)
    return attend, (*attend, Step(messages("dkv", received, 2), messages("dkv", given, 2)))
