"""Long fragments in pieces, each with its own affine map, so that a few long documents fill a GPU.

A kernel of states walks through the chunks of a sequence one after the other, in one program for each head and block of
columns. So the maps of all pieces are made at once, composed, and every piece begins with its own state. The other
kernels see the same chunks: pieces are cut at multiples of 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch

from cp_fast.kernels.linear.fla.fla_run import CHUNK
from cp_fast.kernels.linear.fla.triton_kernels import LARGEST, composed_maps, states_before
from cp_fast.kernels.linear.linear_kernels import (
    BackwardRun,
    ForwardRun,
    FragmentRows,
    LinearGradients,
    LinearInputs,
    Maps,
)
from cp_fast.layers.state_tables import ScanTable, scan_table

__all__ = ["PiecewiseBackward", "PiecewiseForward"]

PROGRAMS = 64  # pieces times heads: with two blocks of columns about as many programs as a GPU has multiprocessors
LEAST = 16  # chunks of a piece
SCANS = 24  # what composing the pieces' maps costs, in steps of `_worth_cutting`


@dataclass(frozen=True, eq=False)
class _Pieces:
    """A rank's fragments, cut into pieces.

    Attributes:
        rows: the pieces, in the order of the rows.
        first: the first piece of each fragment, and the number of pieces.
    """

    rows: FragmentRows
    first: tuple[int, ...]

    @cached_property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the last piece of each fragment, int64 [f]."""
        first = torch.tensor(self.first, dtype=torch.int64, device=self.rows.device)
        return first[:-1], first[1:] - 1

    @cached_property
    def within(self) -> tuple[ScanTable, ScanTable]:
        """From the state at one end of each fragment to all its pieces, forward and backward."""
        spans = [[*range(*pair)] for pair in pairwise(self.first)]
        return self._table(spans), self._table([span[::-1] for span in spans])

    def _table(self, spans: Sequence[Sequence[int]]) -> ScanTable:
        scans = [(f, [*((p, p) for p in span[:-1]), (-1, span[-1])]) for f, span in enumerate(spans)]
        return scan_table(scans, self.rows.device)

    def of(self, chosen: Sequence[int], *, reverse: bool) -> ScanTable:
        """The pieces of the chosen fragments; scan i begins with state i."""
        key = "chosen", tuple(chosen), reverse
        if (known := self.rows.tables.get(key)) is None:
            spans = [range(self.first[f], self.first[f + 1])[:: -1 if reverse else 1] for f in chosen]
            scans = [(i, [(p, -1) for p in span]) for i, span in enumerate(spans)]
            known = self.rows.tables[key] = scan_table(scans, self.rows.device)
        return known


def _cut(inputs: LinearInputs, fragments: FragmentRows) -> _Pieces | None:
    """None where no fragment is worth cutting."""
    if inputs.q.shape[-1] > LARGEST:
        return None
    heads = inputs.v.shape[1]
    if ("pieces", heads) not in fragments.tables:
        chunks = [-(-(stop - start) // CHUNK) for start, stop in pairwise(fragments.cu)]
        target = max(LEAST, sum(chunks) * heads // PROGRAMS)
        found = None
        if max(chunks) > target and _worth_cutting(chunks, heads, fragments.mapped, target):
            cuts = [_even(start, stop, target) for start, stop in pairwise(fragments.cu)]
            rows = FragmentRows((0, *(stop for cut in cuts for stop in cut)), fragments.device)
            found = _Pieces(rows, (0, *accumulate(map(len, cuts))))
        fragments.tables["pieces", heads] = found
    return fragments.tables["pieces", heads]


def _worth_cutting(chunks: Sequence[int], heads: int, mapped: Sequence[Sequence[int]], target: int) -> bool:
    """Whether a step of training takes less time with pieces of `target` chunks than with fragments of `chunks`.

    Times are in steps: one chunk of one program in a kernel of states, of which a step of training has three. A kernel
    of maps takes 4/3 as long, and with pieces there are maps of all rows, not of the fragments in `mapped` alone. A
    full GPU does 50 chunks of one head in one step. Measured on an H200.

    >>> _worth_cutting([256], 16, [[0], []], 64), _worth_cutting([128, 128], 16, [[0], [1]], 64)
    (True, True)
    >>> _worth_cutting([141, 97, 19], 16, [[2], []], 64)  # its one map is short
    False
    """
    full = sum(chunks) * heads / 50
    whole = 3 * max(max(chunks), full) + 4 / 3 * sum(max((chunks[f] for f in each), default=0) for each in mapped)
    return 3 * max(target, full) + 4 / 3 * 2 * full + SCANS < whole


def _even(start: int, stop: int, target: int) -> list[int]:
    """Where the pieces of a fragment end, of about `target` chunks each.

    >>> _even(100, 400, 2)  # five chunks
    [228, 400]
    """
    chunks = -(-(stop - start) // CHUNK)
    pieces = max(1, round(chunks / target))
    return [*(start + chunks * i // pieces * CHUNK for i in range(1, pieces)), stop]


class PiecewiseForward:
    """See `ForwardRun`. kind: the run of a kind whose maps have matrices."""

    def __init__(
        self, kind: Callable[[LinearInputs, FragmentRows], ForwardRun], inputs: LinearInputs, fragments: FragmentRows
    ) -> None:
        self._pieces = _cut(inputs, fragments)
        self._run = kind(inputs, fragments if self._pieces is None else self._pieces.rows)
        self._maps: Maps | None = None
        self.kept: tuple[torch.Tensor, ...] = ()

    def maps(self, chosen: Sequence[int]) -> Maps:
        if (pieces := self._pieces) is None:
            return self._run.maps(chosen)
        self._maps = self._run.maps(range(len(pieces.rows)))
        return composed_maps(pieces.of(chosen, reverse=False), self._maps)

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.kept = self._run.kept
        if (pieces := self._pieces) is None:
            return self._run.run(initial, final=final)
        assert self._maps is not None
        states = states_before(pieces.within[0], self._maps, initial, len(pieces.rows))
        self.kept = *self.kept, self._maps.m, states
        out, ends = self._run.run(states, final=final)
        return out, None if ends is None else ends[pieces.ends[1]]


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
        self._pieces = _cut(inputs, fragments)
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
        return composed_maps(pieces.of(chosen, reverse=True), self._maps, dfinal, transposed=True).b

    def meanwhile(self) -> None:
        self._run.meanwhile()

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        if (pieces := self._pieces) is None:
            return self._run.run(dfinal)
        assert self._maps is not None
        states = states_before(pieces.within[1], self._maps, dfinal, len(pieces.rows), transposed=True)
        found = self._run.run(states)
        if not self._asked or found.dinitial is None:
            return found._replace(dinitial=None)
        return found._replace(dinitial=found.dinitial[pieces.ends[0]])
