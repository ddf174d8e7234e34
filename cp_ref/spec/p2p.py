"""The p2p schedule: K/V blocks visit the ranks while every rank computes on the block it has (ring attention).

Without a window the blocks travel round a ring. At step s unit u has the block of unit u - s and passes it on:

    step      unit 0    unit 1    unit 2    unit 3          4 units, the number is the owner of the block in hand;
      0          0         1         2         3            on its way meanwhile: every block to the next unit
      1          3         0         1         2
      2          2         3         0         1
      3          1         2         3         0

In the backward pass the gradients of a block travel one step behind it, collecting what each unit adds, and end at its
owner.

With a window on both sides a unit sees little of most blocks and nothing of many. Then every unit receives just the
rows that it sees (the halo), straight from their owner: unit u hears from unit u - s at step s - 1, and its gradients
of these rows go straight back. In both cases rows that nobody needs any more are not sent, and a tile that sees nothing
is not computed.

A unit is a rank; in `a2a+p2p` it is a group of ranks, and each rank of it takes part in a ring of its own with its
heads.

From Ring Attention (Liu et al., 2023); the dual_chunk balance from Striped Attention and from Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cp_ref.spec.schedule import Message, Piece, Program, Step, Tile, tag
from cp_ref.spec.units import Units

__all__ = ["Place", "ring_programs"]

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its unit, the rank of its ring in another unit, its heads (None for all), the first
    step's number.
    """

    unit: int
    rank_of: Callable[[int], int]
    q_heads: tuple[int, int] | None = None
    kv_heads: tuple[int, int] | None = None
    first_step: int = 0


def ring_programs(units: Units, place: Place) -> tuple[Program, Program]:
    """The forward and backward steps of one rank: at step s it computes on the block of unit - s."""
    route = _halo if units.windowed else _ring
    unit, last = place.unit, units.count - 1
    forward: list[Step] = []
    backward: list[Step] = []
    for s in range(units.count):
        tiles = tuple(_with_heads(tile, place) for tile in units.tiles(unit, unit - s))
        sends, recvs = route(units, place, s) if s < last else ((), ())
        forward.append(Step(sends, recvs, tiles))
        grad_sends, grad_recvs = _gradients(units, place, s) if s >= 2 else ((), ())
        backward.append(Step(sends + grad_sends, recvs + grad_recvs, tiles))
    if last > 0:
        backward.append(Step(*_gradients(units, place, units.count)))
    return tuple(forward), tuple(backward)


def _ring(units: Units, place: Place, s: int) -> tuple[Messages, Messages]:
    """Pass the block in hand to the next unit: the rows that it or a unit behind it still needs."""
    unit, last = place.unit, units.count - 1
    out = _message(units, place, "kv", units.seen_by_some(unit - s, s + 1, last), unit + 1, s)
    back = _message(units, place, "kv", units.seen_by_some(unit - 1 - s, s + 1, last), unit - 1, s)
    return out, back


def _halo(units: Units, place: Place, s: int) -> tuple[Messages, Messages]:
    """Give the unit that is s + 1 ahead what it sees of the own block."""
    unit = place.unit
    out = _message(units, place, "kv", units.seen(unit + s + 1, unit), unit + s + 1, s)
    back = _message(units, place, "kv", units.seen(unit, unit - s - 1), unit - s - 1, s)
    return out, back


def _gradients(units: Units, place: Place, s: int) -> tuple[Messages, Messages]:
    """What was added at step s - 1: on to the next unit with the ring's sum so far, or straight home."""
    unit, hop = place.unit, s - 1
    if units.windowed:
        out = _message(units, place, "dkv", units.seen(unit, unit - hop), unit - hop, s)
        back = _message(units, place, "dkv", units.seen(unit + hop, unit), unit + hop, s)
    else:
        out = _message(units, place, "dkv", units.seen_by_some(unit - hop, 1, hop), unit + 1, s)
        back = _message(units, place, "dkv", units.seen_by_some(unit - 1 - hop, 1, hop), unit - 1, s)
    return out, back


def _message(units: Units, place: Place, what: str, pieces: tuple[Piece, ...], unit: int, s: int) -> Messages:
    """A message to or from this rank's ring in another unit; none where there is nothing to say."""
    if not pieces:
        return ()
    mine = tuple(replace(p, heads=place.kv_heads) for p in pieces)
    return (Message(what, mine, place.rank_of(unit % units.count), tag(place.first_step + s, what)),)


def _with_heads(tile: Tile, place: Place) -> Tile:
    return replace(tile, heads=place.q_heads)
