"""Playing one rank's schedule of states: send maps, take maps in, compose them in the order of the scans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

import torch

from cp_ref.common.groups.process_groups import during
from cp_ref.linear.recurrence import AffineMap
from cp_ref.spec import Group, Message, Parcel, RankSchedule, Scans

__all__ = ["Span", "play_states"]

Span = tuple[int, int]  # global rows [start, stop) of a fragment


def play_states(
    direction: str,
    steps: RankSchedule,
    group: Group,
    own: Mapping[Span, Callable[[], AffineMap]],
    begin: torch.Tensor,
) -> dict[Span, torch.Tensor]:
    """The state that enters each of the rank's fragments (in the backward pass: the gradient of the state that leaves
    it).

    Args:
        direction: "forward" or "backward", for errors.
        own: computes the map of each of the rank's fragments. Only maps that somebody needs are computed.
        begin: the state that enters the first fragment of each document in the order of the scans [b, h_v, d_k, d_v].
    """
    heads, d_k, d_v = begin.shape[1:]
    maps: dict[Span, AffineMap] = {}
    entering: dict[Span, torch.Tensor] = {}

    def known(span: Span) -> AffineMap:
        if span not in maps:
            maps[span] = own[span]()
        return maps[span]

    def room(message: Message) -> AffineMap:
        n = len(message.pieces)
        return AffineMap(begin.new_empty(n, heads, d_k, d_k), begin.new_empty(n, heads, d_k, d_v))

    for number, step in enumerate(steps):
        where = f"states, {direction}, step {number} of {len(steps)}"
        sends: list[Parcel] = []
        for message in step.sends:
            matrices, shifts = zip(*(known(span) for span in _spans(message)), strict=True)
            sends += _parcels(message, AffineMap(torch.stack(matrices), torch.stack(shifts)))
        arriving = [(message, room(message)) for message in step.recvs]
        with during(where):
            pending = group.exchange(sends, [parcel for pair in arriving for parcel in _parcels(*pair)])
        for document, spans in _documents(step.scans):
            state = begin[document]
            for place, span in enumerate(spans):
                if span in own:
                    entering[span] = state
                if place + 1 < len(spans):
                    state = known(span)(state)
        with during(where):
            pending.wait()
        for message, (matrices, shifts) in arriving:
            maps.update(zip(_spans(message), map(AffineMap, matrices, shifts), strict=True))
    return entering


def _parcels(message: Message, maps: AffineMap) -> list[Parcel]:
    """The two tensors of a message: all matrices, all shifts."""
    return [Parcel(message.peer, 2 * message.tag + n, x) for n, x in enumerate(maps)]


def _spans(message: Message) -> list[Span]:
    return [(start, stop) for start, stop, *_ in message.pieces.rows()]


def _documents(scans: Scans) -> Iterator[tuple[int, list[Span]]]:
    """The maps of each document, in order."""
    for document, rows in groupby(scans.rows(), key=lambda row: row[0]):
        yield document, [(start, stop) for _, start, stop in rows]
