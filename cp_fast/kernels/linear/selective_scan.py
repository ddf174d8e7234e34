"""Mamba's selective scan in plain PyTorch, of any device: one row of every chunk at a time.

A chunk is a few rows of a fragment. All chunks are scanned side by side, from zero, so the map of each is known. These
give the state before each chunk, one chunk of every fragment at a time. Then all chunks are scanned from these states.

With the log-decay A g of each number of a state, `S_i = exp(A g_i) S_{i-1} + k_i v_i` and `out_i = q_i . S_i`, the
gradients are those of a scan backwards: `dS_i = q_i dout_i + exp(A g_{i+1}) dS_{i+1}`. It needs all states of a chunk,
which are computed again, for as many chunks at a time as `_ROOM` allows.

    legend   c = chunks, h = heads of q and k, g = heads of v that share one of these, n = numbers of a state (d_k)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from cp_fast.kernels.linear.chunk_rows import chunk_rows, compute_dtype
from cp_fast.kernels.linear.linear_kernels import FragmentRows, LinearGradients, LinearInputs, Maps

__all__ = ["SelectiveBackward", "SelectiveForward"]

_SIZE = 64  # rows of a chunk
_ROOM = 2**28  # bytes for the states of the chunks that a backward pass has at a time


class _Rows(NamedTuple):
    """One row of some chunks."""

    q: torch.Tensor  # [c, h, 1, n], scaled
    k: torch.Tensor  # [c, h, 1, n]
    v: torch.Tensor  # [c, h, g, 1]
    step: torch.Tensor  # [c, h, g, 1]


class _Chunks:
    """The chunks of a rank's fragments."""

    def __init__(self, inputs: LinearInputs, fragments: FragmentRows) -> None:
        assert inputs.A is not None
        (n, h), h_v = inputs.q.shape[:2], inputs.v.shape[1]
        self.dtype, self.fragments = compute_dtype(inputs.v.dtype), fragments
        longest = max(stop - start for start, stop in pairwise(fragments.cu))
        self.size = min(_SIZE, 1 << (longest - 1).bit_length())
        self.rows = chunk_rows(fragments, self.size)
        self.rates = inputs.A.to(self.dtype).view(h, h_v // h, -1)  # [h, g, n]
        self.scale = inputs.scale
        q, k = (self.cut(x)[:, :, :, None] for x in (inputs.q, inputs.k))
        v, step = (self.cut(x.reshape(n, h, -1))[..., None] for x in (inputs.v, inputs.g))
        self._all = q * self.scale, k, v, step

    def __len__(self) -> int:
        return len(self.rows.rows)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [n, ...] -> [c, size, ...]."""
        return self.rows.cut(x.to(self.dtype))

    def row(self, i: int, some: slice = slice(None)) -> _Rows:
        """The i-th row of some chunks."""
        return _Rows(*(x[some, i] for x in self._all))

    def decay(self, step: torch.Tensor) -> torch.Tensor:
        """exp(A g) [c, h, g, n]."""
        return (self.rates * step).exp()

    @property
    def decays(self) -> torch.Tensor:
        """Of whole chunks: [c, h, g, n]. Sums of steps are exact enough in float64 alone."""
        total = self._all[3].double().sum(1)
        return (self.rates.double() * total).exp().to(self.dtype)

    def zeros(self, count: int) -> torch.Tensor:
        """States [count, h, g, n]."""
        return self.rates.new_zeros(count, *self.rates.shape)

    def shifts(self) -> torch.Tensor:
        """The states after all chunks, from zero: [c, h, g, n]."""
        state = self.zeros(len(self))
        for i in range(self.size):
            row = self.row(i)
            state = self.decay(row.step) * state + row.k * row.v
        return state

    def before(self, shifts: torch.Tensor, initial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state before each chunk, and the state after each fragment. initial: before each fragment."""
        return self._through(self.rows.waves, shifts, initial)

    def behind(self, shifts: torch.Tensor, final: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of gradients: behind each chunk, and before each fragment."""
        return self._through(reversed(self.rows.waves), shifts, final)

    def _through(
        self,
        waves: Iterator[tuple[torch.Tensor, torch.Tensor]] | Sequence[tuple[torch.Tensor, torch.Tensor]],
        shifts: torch.Tensor,
        states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decays, states, reaching = self.decays, states.clone(), torch.empty_like(shifts)
        for chunks, which in waves:
            reaching[chunks] = states[which]
            states[which] = decays[chunks] * states[which] + shifts[chunks]
        return reaching, states

    def factors(self) -> torch.Tensor:
        """M of all fragments [f, h, g, n]."""
        found, decays = self.zeros(len(self.fragments)) + 1, self.decays
        for chunks, which in self.rows.waves:
            found[which] = decays[chunks] * found[which]
        return found

    def grouped(self, states: torch.Tensor) -> torch.Tensor:
        """[f, h_v, n, 1] -> [f, h, g, n]."""
        return states.to(self.dtype).reshape(len(states), *self.rates.shape)

    def ungrouped(self, states: torch.Tensor) -> torch.Tensor:
        """`grouped` undone."""
        return states.flatten(1, 2)[..., None]


class SelectiveForward:
    """See `ForwardRun`."""

    kept: tuple[torch.Tensor, ...] = ()

    def __init__(self, inputs: LinearInputs, fragments: FragmentRows) -> None:
        self._inputs, self._chunks = inputs, _Chunks(inputs, fragments)
        self._shifts = self._chunks.shifts()

    def maps(self, chosen: Sequence[int]) -> Maps:
        """Decays of rows, and states from zero."""
        chunks, some = self._chunks, list(chosen)
        _, after = chunks.before(self._shifts, chunks.zeros(len(chunks.fragments)))
        return Maps(chunks.factors()[some].flatten(1, 2), chunks.ungrouped(after[some]))

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Out, and the final states."""
        chunks = self._chunks
        begin = chunks.zeros(len(chunks.fragments)) if initial is None else chunks.grouped(initial)
        state, after = chunks.before(self._shifts, begin)
        parts = list[torch.Tensor]()
        for i in range(chunks.size):
            row = chunks.row(i)
            state = chunks.decay(row.step) * state + row.k * row.v
            parts.append((state * row.q).sum(-1))
        out = chunks.rows.joined(torch.stack(parts, 1)).reshape(self._inputs.v.shape)
        return out.to(self._inputs.v.dtype), chunks.ungrouped(after) if final else None


class SelectiveBackward:
    """See `BackwardRun`."""

    def __init__(
        self, inputs: LinearInputs, fragments: FragmentRows, initial: torch.Tensor | None, dout: torch.Tensor
    ) -> None:
        self._inputs, self._has_initial = inputs, initial is not None
        self._chunks = chunks = _Chunks(inputs, fragments)
        begin = chunks.zeros(len(fragments)) if initial is None else chunks.grouped(initial)
        self._before, _ = chunks.before(chunks.shifts(), begin)
        self._dout = chunks.cut(dout.reshape(*inputs.q.shape[:2], -1))[..., None]  # [c, size, h, g, 1]
        self._shifts = chunks.zeros(len(chunks))  # the gradients of the states before chunks, of their rows alone
        for i in reversed(range(chunks.size)):
            row = chunks.row(i)
            self._shifts = chunks.decay(row.step) * (self._shifts + row.q * self._dout[:, i])

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        """D, and M dfinal besides."""
        chunks, some = self._chunks, list(chosen)
        behind = chunks.zeros(len(chunks.fragments))
        if dfinal is not None:
            behind[some] = chunks.grouped(dfinal)
        _, found = chunks.behind(self._shifts, behind)
        return chunks.ungrouped(found[some])

    def meanwhile(self) -> None:
        """Nothing."""

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        """All gradients."""
        chunks, inputs = self._chunks, self._inputs
        last = chunks.zeros(len(chunks.fragments)) if dfinal is None else chunks.grouped(dfinal)
        behind, dbegin = chunks.behind(self._shifts, last)
        drates = torch.zeros_like(chunks.rates)
        each = chunks.size * chunks.rates.numel() * chunks.rates.element_size()
        count = max(_ROOM // each, 1)
        groups = [slice(first, first + count) for first in range(0, len(chunks), count)]
        parts = [self._gradients(some, behind[some], drates) for some in groups]
        dq, dk, dv, dg = (chunks.rows.joined(torch.cat(x)) for x in zip(*parts, strict=True))
        dinitial = chunks.ungrouped(dbegin) if self._has_initial else None
        dv, dg = dv.reshape(inputs.v.shape), dg.reshape(inputs.g.shape)
        return LinearGradients(dq * chunks.scale, dk, dv, dg, None, dinitial, drates.flatten(0, 1))

    def _gradients(self, some: slice, dstate: torch.Tensor, drates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradients of q, k, v and g of some chunks, [c, size, ...]; that of A is added to `drates`."""
        chunks = self._chunks
        states = [self._before[some]]
        for i in range(chunks.size):
            row = chunks.row(i, some)
            states.append(chunks.decay(row.step) * states[-1] + row.k * row.v)
        found = list[tuple[torch.Tensor, ...]]()
        for i in reversed(range(chunks.size)):
            row, dout = chunks.row(i, some), self._dout[some, i]
            dstate = dstate + row.q * dout
            dq, dk, dv = (states.pop() * dout).sum(2), (dstate * row.v).sum(2), (dstate * row.k).sum(3)
            dstate = chunks.decay(row.step) * dstate
            dlog = dstate * states[-1]  # the gradient of A g
            found.append((dq, dk, dv, (dlog * chunks.rates).sum(3)))
            drates += (dlog * row.step).sum(0)
        return tuple(torch.stack(x[::-1], 1) for x in map(list, zip(*found, strict=True)))
