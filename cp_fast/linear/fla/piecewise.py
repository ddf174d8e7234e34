"""Long fragments in pieces, each with its own affine map, so that a few long documents fill a GPU.

A kernel of states walks through the chunks of a sequence one after the other, in one program for each head and block
of columns. So the maps of all pieces are made at once, composed, and every piece begins with its own state. The other
kernels see the same chunks: pieces are cut at multiples of 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.fla.fla_run import CHUNK
from cp_fast.linear.fla.scan_kernel import compose_pieces, states_of_pieces
from cp_fast.linear.linear_kernels import BackwardRun, ForwardRun, FragmentRows, LinearGradients, LinearInputs

__all__ = ["PiecewiseBackward", "PiecewiseForward"]

PROGRAMS = 128  # about as many pieces times heads as a GPU has multiprocessors
LEAST = 16  # chunks of a piece
_LARGEST = 128  # head dim of keys whose M fits in the memory of a multiprocessor


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Attributes:
    rows: the pieces, in the order of the rows.
    first: the first piece of each fragment, and the number of pieces, int64 [f + 1].
    last: the last piece of each fragment, int64 [f].
    """

    rows: FragmentRows
    first: torch.Tensor
    last: torch.Tensor


def _cut(inputs: LinearInputs, fragments: FragmentRows) -> _Pieces | None:
    """None where no fragment is worth cutting."""
    if inputs.q.shape[-1] > _LARGEST:
        return None
    heads = inputs.v.shape[1]
    key = "pieces", heads
    if key not in fragments.kept:
        target = max(LEAST, fragments.cu[-1] * heads // (PROGRAMS * CHUNK))
        cuts = [_even(start, stop, target) for start, stop in pairwise(fragments.cu)]
        first = [0, *accumulate(map(len, cuts))]
        found = None
        if first[-1] > len(fragments):
            rows = FragmentRows((0, *(stop for cut in cuts for stop in cut)), fragments.device)
            table = torch.tensor(first, dtype=torch.int64, device=fragments.device)
            found = _Pieces(rows, table, table[1:] - 1)
        fragments.kept[key] = found
    return fragments.kept[key]


def _even(start: int, stop: int, target: int) -> list[int]:
    """Where the pieces of a fragment end, of about `target` chunks each.

    >>> _even(100, 400, 2)  # five chunks
    [228, 400]
    """
    chunks = -(-(stop - start) // CHUNK)
    pieces = max(1, round(chunks / target))
    return [*(start + chunks * i // pieces * CHUNK for i in range(1, pieces)), stop]


def _chosen(fragments: FragmentRows, chosen: Sequence[int]) -> torch.Tensor:
    key = "chosen", tuple(chosen)
    if key not in fragments.kept:
        fragments.kept[key] = torch.tensor(chosen, dtype=torch.int64, device=fragments.device)
    return fragments.kept[key]


class PiecewiseForward:
    """See `ForwardRun`. kind: the run of a kind whose maps have matrices."""

    def __init__(
        self, kind: Callable[[LinearInputs, FragmentRows], ForwardRun], inputs: LinearInputs, fragments: FragmentRows
    ) -> None:
        self._fragments, self._pieces = fragments, _cut(inputs, fragments)
        self._run = kind(inputs, fragments if self._pieces is None else self._pieces.rows)
        self._maps: Maps | None = None
        self.kept: tuple[torch.Tensor, ...] = ()

    def maps(self, chosen: Sequence[int]) -> Maps:
        if (pieces := self._pieces) is None:
            return self._run.maps(chosen)
        self._maps = self._run.maps(range(len(pieces.rows)))
        return compose_pieces(self._maps, None, pieces.first, _chosen(self._fragments, chosen))

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.kept = self._run.kept
        if (pieces := self._pieces) is None:
            return self._run.run(initial, final=final)
        assert self._maps is not None
        states = states_of_pieces(self._maps, initial, pieces.first)
        self.kept = *self.kept, self._maps.m, states
        out, ends = self._run.run(states, final=final)
        return out, None if ends is None else ends[pieces.last]


class PiecewiseBackward:
    """See `BackwardRun`."""

    def __init__(
        self,
        kind: Callable[..., BackwardRun],
        inputs: LinearInputs,
        fragments: FragmentRows,
        kept: Sequence[torch.Tensor],
        initial: torch.Tensor | None,
        dout: torch.Tensor,
    ) -> None:
        self._fragments, self._pieces = fragments, _cut(inputs, fragments)
        self._maps: Maps | None = None
        self._asked = initial is not None
        rows: Any = fragments
        if self._pieces is not None:
            rows = self._pieces.rows
            *kept, self._m, initial = kept
        self._run = kind(inputs, rows, kept, initial, dout)

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        if (pieces := self._pieces) is None:
            return self._run.reverse_maps(chosen, dfinal)
        self._maps = Maps(self._m, self._run.reverse_maps(range(len(pieces.rows)), None))
        numbers = _chosen(self._fragments, chosen)
        return compose_pieces(self._maps, dfinal, pieces.first, numbers, reverse=True).b

    def meanwhile(self) -> None:
        self._run.meanwhile()

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        if (pieces := self._pieces) is None:
            return self._run.run(dfinal)
        assert self._maps is not None
        found = self._run.run(states_of_pieces(self._maps, dfinal, pieces.first, reverse=True))
        if not self._asked or found.dinitial is None:
            return found._replace(dinitial=None)
        return found._replace(dinitial=found.dinitial[pieces.first[:-1]])
