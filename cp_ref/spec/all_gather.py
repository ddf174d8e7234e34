"""The all_gather schedule: every rank gets the keys that its queries see, and attends at once (Llama 3).

    step 0    keys travel, everyone to everyone        tiles with the own keys
    step 1                                             tiles with everybody else's
    step 2    (backward) dK/dV go home and are added up: a reduce-scatter

Only rows that the receiver sees are sent: under a causal mask, or a window, that is less than all of K and V. The
backward pass gathers again, so that nothing but the own slices is kept between the passes.

From Llama 3 (Grattafiori et al., 2024).
"""

from __future__ import annotations

from cp_ref.spec.schedule import Message, Piece, Program, Step, Tile, tag
from cp_ref.spec.units import Units

__all__ = ["plan_all_gather_rank"]


def plan_all_gather_rank(units: Units, rank: int) -> tuple[Program, Program]:
    """One rank's forward and backward program."""
    peers = [(rank + n) % units.count for n in range(1, units.count)]
    gather_sends = tuple(m for p in peers for m in _message("kv", units.seen(p, rank), p, 0))
    gather_recvs = tuple(m for p in peers for m in _message("kv", units.seen(rank, p), p, 0))
    remote: tuple[Tile, ...] = tuple(t for p in peers for t in units.tiles(rank, p))
    attend = (Step(gather_sends, gather_recvs, units.tiles(rank, rank)), Step(tiles=remote))
    scatter_sends = tuple(m for p in peers for m in _message("dkv", units.seen(rank, p), p, 2))
    scatter_recvs = tuple(m for p in peers for m in _message("dkv", units.seen(p, rank), p, 2))
    return attend, (*attend, Step(scatter_sends, scatter_recvs))


def _message(what: str, pieces: tuple[Piece, ...], peer: int, number: int) -> tuple[Message, ...]:
    return (Message(what, pieces, peer, tag(number, what)),) if pieces else ()
