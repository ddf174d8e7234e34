# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
"""Mamba's selective scan in Triton: see `selective_scan.py` for what it computes.

A tile is up to 16 rows of a fragment. A program has the rows of one tile and a block of channels in registers, and goes
through the numbers of a state, one after the other: any count of them is right. A forward pass is three launches:

    _shifts     the state after each tile, from zero, and the sum of its steps of time
    _carry      tile after tile: the state before each, from the state that enters the fragment
    _outputs    the rows of each tile, from the state before it

In a backward pass the gradients of states go through the first two as well, the other way round. `_gradients` computes
the states of a tile again, and meets them there. So states are in memory at the borders of tiles alone: 4 bytes for a
row and a channel whose state has 16 numbers. A sum over channels has a part for each block of them, and a fixed order.

    legend   n = rows, t = tiles, f = fragments, c = chosen fragments, h = heads of q and k, C = channels (columns of
             states), N = numbers of a state (d_k)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cp_fast.kernels.linear.chunk_rows import chunk_rows
from cp_fast.kernels.linear.fla.direct_launch import DirectLaunch
from cp_fast.kernels.linear.linear_kernels import FragmentRows, LinearGradients, LinearInputs, Maps

__all__ = ["ScanBackward", "ScanForward"]

# ---- kernels
#
# `rates` is A in powers of 2. q (times scale) and k are tiles [t, H, N, BR], with zeros where a tile has no more rows.
# There v, g and dout are zero too: such a row changes no state, and gives nothing to a sum.
#
# legend   G = channels of a head, BR, BC = rows and channels of a program, BL = numbers of states of one of `_carry`,
#          BU = tiles whose loads are in flight together


_one_warp, _four_warps = (triton.autotune(configs=[triton.Config({}, num_warps=n)], key=[]) for n in (1, 4))


@triton.jit
def _rows(x, start, rows, o_c, m_c, C: tl.constexpr, BR: tl.constexpr):
    """The rows of a tile, each [BC], in float32."""
    found = ()
    for j in tl.static_range(BR):
        row = tl.load(x + (start + j) * C + o_c, mask=m_c & (j < rows), other=0.0)
        found += (row.to(tl.float32),)
    return found


@triton.jit
def _zeros(BR: tl.constexpr, BC: tl.constexpr):
    found = ()
    for _ in tl.static_range(BR):
        found += (tl.zeros([BC], dtype=tl.float32),)
    return found


@triton.jit
def _store_sums(place, rows, BR: tl.constexpr, first: tl.constexpr, by: tl.constexpr):
    """The sum of each row. All sums come before all stores: so they do not wait for one another."""
    found = ()
    for j in tl.static_range(BR):
        found += (tl.sum(rows[j], 0),)
    for j in tl.static_range(BR):
        tl.store(place + first + by * j, found[j])


@triton.jit
def _place(tiles, H: tl.constexpr, G: tl.constexpr, BC: tl.constexpr):
    """The tile of a program, its first row and how many it has; the head, the block of its channels, and these."""
    blocks: tl.constexpr = (G + BC - 1) // BC
    i_t = (tl.program_id(0) // (H * blocks)).to(tl.int64)
    head, block = tl.program_id(0) // blocks % H, tl.program_id(0) % blocks
    start, o_g = tl.load(tiles + 2 * i_t), block * BC + tl.arange(0, BC)
    rows = (tl.load(tiles + 2 * i_t + 1) - start).to(tl.int32)
    return i_t, start, rows, head, block, head * G + o_g, o_g < G


@DirectLaunch
@_one_warp
@triton.jit
def _shifts(
    q, k, v, g, dout, rates, tiles, shifts, sums, reverse,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The states [t, N, C] after each tile, from zero, and the sums of g [t, C]. REVERSE: also the gradients of the
    states before each tile, from zero behind it.
    """
    C: tl.constexpr = H * G
    i_t, start, rows, head, _, o_c, m_c = _place(tiles, H, G, BC)
    steps, values = _rows(g, start, rows, o_c, m_c, C, BR), _rows(v, start, rows, o_c, m_c, C, BR)
    total = tl.zeros([BC], dtype=tl.float32)
    for j in tl.static_range(BR):
        total += steps[j]
    tl.store(sums + i_t * C + o_c, total, mask=m_c)
    k += (i_t * H + head) * N * BR
    shifts += i_t * N * C + o_c
    if REVERSE:
        grads = _rows(dout, start, rows, o_c, m_c, C, BR)
        q += (i_t * H + head) * N * BR
        reverse += i_t * N * C + o_c
    for i_n in range(N):
        rate = tl.load(rates + i_n * C + o_c, mask=m_c, other=0.0)
        state = tl.zeros([BC], dtype=tl.float32)
        decays = ()
        for j in tl.static_range(BR):
            decays += (tl.exp2(rate * steps[j]),)
            state = decays[j] * state + tl.load(k + i_n * BR + j) * values[j]
        tl.store(shifts + i_n * C, state, mask=m_c)
        if REVERSE:
            dstate = tl.zeros([BC], dtype=tl.float32)
            for j in tl.static_range(BR - 1, -1, -1):
                dstate = decays[j] * (dstate + tl.load(q + i_n * BR + j) * grads[j])
            tl.store(reverse + i_n * C, dstate, mask=m_c)


@DirectLaunch
@_four_warps
@triton.jit
def _carry(
    shifts, sums, rates, spans, initial, final, factors,
    C: tl.constexpr, N: tl.constexpr, BL: tl.constexpr, BU: tl.constexpr, REVERSE: tl.constexpr,
    USE_INITIAL: tl.constexpr, STORE: tl.constexpr, USE_FINAL: tl.constexpr, USE_FACTORS: tl.constexpr,
):  # fmt: skip
    """The tiles of one span, one after the other, for BL numbers of states: from `initial` [c, N, C] to `final`. STORE:
    in place of each shift, the state before it. `factors` [c, N, C]: what the whole span multiplies a state by.
    """
    blocks: tl.constexpr = (N * C + BL - 1) // BL
    i_s = (tl.program_id(0) // blocks).to(tl.int64)
    o = tl.program_id(0) % blocks * BL + tl.arange(0, BL)
    m, o_c = o < N * C, o % C
    first, tiles = tl.load(spans + 2 * i_s), (tl.load(spans + 2 * i_s + 1) - tl.load(spans + 2 * i_s)).to(tl.int32)
    rate = tl.load(rates + o, mask=m, other=0.0)
    state = tl.zeros([BL], dtype=tl.float32)
    factor = state + 1.0
    if USE_INITIAL:
        state += tl.load(initial + i_s * N * C + o, mask=m, other=0.0)
    for t in range(0, tiles, BU):
        places, found, decays = (), (), ()
        for u in tl.static_range(BU):
            i_t = first + (tiles - 1 - t - u if REVERSE else t + u)
            inside = m & (t + u < tiles)
            places += (shifts + i_t * N * C + o,)
            found += (tl.load(places[u], mask=inside, other=0.0),)
            decays += (tl.load(sums + i_t * C + o_c, mask=inside, other=0.0),)
        for u in tl.static_range(BU):
            if STORE:
                tl.store(places[u], state, mask=m & (t + u < tiles))
            decay = tl.exp2(rate * decays[u])
            state = decay * state + found[u]
            factor *= decay
    if USE_FINAL:
        tl.store(final + i_s * N * C + o, state, mask=m)
    if USE_FACTORS:
        tl.store(factors + i_s * N * C + o, factor, mask=m)


@DirectLaunch
@_one_warp
@triton.jit
def _outputs(
    q, k, v, g, rates, tiles, before, out,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The rows of out in each tile, from the states before it [t, N, C]."""
    C: tl.constexpr = H * G
    i_t, start, rows, head, _, o_c, m_c = _place(tiles, H, G, BC)
    steps, values = _rows(g, start, rows, o_c, m_c, C, BR), _rows(v, start, rows, o_c, m_c, C, BR)
    q += (i_t * H + head) * N * BR
    k += (i_t * H + head) * N * BR
    before += i_t * N * C + o_c
    found = _zeros(BR, BC)
    for i_n in range(N):
        rate = tl.load(rates + i_n * C + o_c, mask=m_c, other=0.0)
        state = tl.load(before + i_n * C, mask=m_c, other=0.0)
        sums = ()
        for j in tl.static_range(BR):
            state = tl.exp2(rate * steps[j]) * state + tl.load(k + i_n * BR + j) * values[j]
            sums += (found[j] + tl.load(q + i_n * BR + j) * state,)
        found = sums
    for j in tl.static_range(BR):
        row = found[j].to(out.dtype.element_ty)
        tl.store(out + (start + j) * C + o_c, row, mask=m_c & (j < rows))


@DirectLaunch
@_one_warp
@triton.jit
def _gradients(
    q, k, v, g, dout, rates, tiles, before, behind, dq, dk, dv, dg, count,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradients of the rows of each tile, from the states before it and the gradients of those behind it
    [t, N, C]. dq and dk have a part of each block of channels, [blocks, t, H, N, BR] with t = count. In place of
    `behind`, each tile's part of dA.
    """
    C: tl.constexpr = H * G
    i_t, start, rows, head, block, o_c, m_c = _place(tiles, H, G, BC)
    steps, values = _rows(g, start, rows, o_c, m_c, C, BR), _rows(v, start, rows, o_c, m_c, C, BR)
    grads = _rows(dout, start, rows, o_c, m_c, C, BR)
    q += (i_t * H + head) * N * BR
    k += (i_t * H + head) * N * BR
    part = ((block.to(tl.int64) * count + i_t) * H + head) * N * BR
    dq += part
    dk += part
    before += i_t * N * C + o_c
    behind += i_t * N * C + o_c
    of_values, of_steps = _zeros(BR, BC), _zeros(BR, BC)  # the last row first
    for i_n in range(N):
        rate = tl.load(rates + i_n * C + o_c, mask=m_c, other=0.0)
        state = tl.load(before + i_n * C, mask=m_c, other=0.0)
        decays, decayed, sums = (), (), ()  # of each row: exp(A g), that times the state before it, dq
        for j in tl.static_range(BR):
            decays += (tl.exp2(rate * steps[j]),)
            decayed += (decays[j] * state,)
            state = decayed[j] + tl.load(k + i_n * BR + j) * values[j]
            sums += (state * grads[j],)
        _store_sums(dq + i_n * BR, sums, BR, 0, 1)
        dstate = tl.load(behind + i_n * C, mask=m_c, other=0.0)
        of_rate = tl.zeros([BC], dtype=tl.float32)
        values_now, steps_now, sums = (), (), ()
        for j in tl.static_range(BR - 1, -1, -1):
            dstate += tl.load(q + i_n * BR + j) * grads[j]
            sums += (dstate * values[j],)
            values_now += (of_values[BR - 1 - j] + dstate * tl.load(k + i_n * BR + j),)
            dlog = dstate * decayed[j]  # the gradient of A g
            steps_now += (of_steps[BR - 1 - j] + dlog * rate,)
            of_rate += dlog * steps[j]
            dstate *= decays[j]
        _store_sums(dk + i_n * BR, sums, BR, BR - 1, -1)
        of_values, of_steps = values_now, steps_now
        tl.store(behind + i_n * C, of_rate, mask=m_c)
    for j in tl.static_range(BR):
        inside = m_c & (j < rows)
        place = (start + j) * C + o_c
        tl.store(dv + place, of_values[BR - 1 - j].to(dv.dtype.element_ty), mask=inside)
        tl.store(dg + place, of_steps[BR - 1 - j] * 0.6931471805599453, mask=inside)  # log(2)


# ---- launches

ROWS = 16  # of a tile
CHANNELS = 128  # of a program, which has one warp: its sums need no other
CARRY = 128, 32  # numbers of states of a program, and tiles that it loads at once


class _Scan:
    """The tiles of a pass, and its launches."""

    def __init__(self, inputs: LinearInputs, fragments: FragmentRows) -> None:
        assert inputs.A is not None
        (_, self.h, self.numbers), self.channels = inputs.q.shape, inputs.v.shape[1]
        self.inputs, self.fragments = inputs, fragments
        self.rows = chunk_rows(fragments, ROWS)
        self.tiles, self._spans = _tables(fragments, self.rows.counts)
        self.count = len(self.tiles)
        self.rates = (inputs.A.float() * math.log2(math.e)).t().contiguous()  # [N, C]
        self.q, self.k = self.cut(inputs.q.float() * inputs.scale), self.cut(inputs.k.float())
        self.sums = self.new(self.count, self.channels)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [n, h, N] as tiles [t, h, N, ROWS]."""
        return self.rows.cut(x).permute(0, 2, 3, 1).contiguous()

    def joined(self, parts: torch.Tensor) -> torch.Tensor:
        """Parts of tiles [blocks, t, h, N, ROWS] as rows [n, h, N]."""
        return self.rows.joined(parts.sum(0).permute(0, 3, 1, 2))

    @property
    def blocks(self) -> int:
        """Of channels of a head."""
        return triton.cdiv(self.channels // self.h, CHANNELS)

    def new(self, *shape: int) -> torch.Tensor:
        """An empty tensor of float32."""
        return self.inputs.v.new_empty(shape, dtype=torch.float32)

    def shifts(self, dout: torch.Tensor | None = None) -> list[torch.Tensor]:
        """What each tile adds to the state [t, N, C] and, with dout, to the gradient of the state before it."""
        made = [self.new(self.count, self.numbers, self.channels) for _ in range(1 if dout is None else 2)]
        _, _, v, g, *_ = self.inputs
        self._launch(
            _shifts, self.q, self.k, v, g, dout, self.rates, self.tiles, made[0], self.sums, made[-1],
            REVERSE=dout is not None,
        )  # fmt: skip
        return made

    def carry(
        self,
        shifts: torch.Tensor,
        initial: torch.Tensor | None,
        chosen: Sequence[int] | None = None,
        *,
        reverse: bool = False,
        final: bool = True,
        factors: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states behind the chosen fragments and what multiplies those before them, [c, N, C], if asked for. Of all
        fragments, the shifts become the states before (reverse: behind) each tile.
        """
        spans = self._spans if chosen is None else self._spans_of(tuple(chosen))
        ends, products = (self.new(len(spans), self.numbers, self.channels) for _ in range(2))
        lanes, at_once = CARRY
        if len(spans):
            _carry[(len(spans) * triton.cdiv(self.numbers * self.channels, lanes),)](
                shifts=shifts, sums=self.sums, rates=self.rates, spans=spans, initial=initial, final=ends,
                factors=products, C=self.channels, N=self.numbers, BL=lanes, BU=at_once, REVERSE=reverse,
                USE_INITIAL=initial is not None, STORE=chosen is None, USE_FINAL=final, USE_FACTORS=factors,
            )  # fmt: skip
        return ends, products

    def _spans_of(self, chosen: tuple[int, ...]) -> torch.Tensor:
        tables = self.fragments.tables
        if (known := tables.get(("scan", chosen))) is None:
            known = tables["scan", chosen] = self._spans[list(chosen)]
        return known

    def outputs(self, before: torch.Tensor) -> torch.Tensor:
        """Out [n, C, 1]."""
        _, _, v, g, *_ = self.inputs
        out = torch.empty_like(v)
        self._launch(_outputs, self.q, self.k, v, g, self.rates, self.tiles, before, out)
        return out

    def gradients(self, dout: torch.Tensor, before: torch.Tensor, behind: torch.Tensor) -> LinearGradients:
        """All but those of initial states. `behind` is used up."""
        _, _, v, g, *_ = self.inputs
        dq, dk = (self.new(self.blocks, self.count, self.h, self.numbers, ROWS) for _ in range(2))
        dv, dg = torch.empty_like(v), self.new(*g.shape)
        self._launch(
            _gradients, self.q, self.k, v, g, dout, self.rates, self.tiles, before, behind, dq, dk, dv, dg,
            self.count,
        )  # fmt: skip
        dq, dk = self.joined(dq) * self.inputs.scale, self.joined(dk)
        return LinearGradients(dq, dk, dv, dg, None, None, behind.sum(0).t())

    def _launch(self, kernel: DirectLaunch, *given: object, **named: object) -> None:
        kernel[(self.count * self.h * self.blocks,)](
            *given, H=self.h, G=self.channels // self.h, N=self.numbers, BR=ROWS, BC=CHANNELS, **named
        )


@torch.inference_mode(False)  # an evaluation may make what a later pass in training takes
def _tables(fragments: FragmentRows, counts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows [start, stop) of each tile, and the tiles [first, last) of each fragment: int64 [t, 2] and [f, 2]."""
    if (known := fragments.tables.get(("scan", ROWS))) is None:
        cu, ends = np.array(fragments.cu, dtype=np.int64), np.cumsum(counts)
        fragment = np.repeat(np.arange(len(counts)), counts)
        start = cu[fragment] + ROWS * (np.arange(len(fragment)) - (ends - counts)[fragment])
        tables = np.stack([start, np.minimum(start + ROWS, cu[fragment + 1])], 1), np.stack([ends - counts, ends], 1)
        tiles, spans = (torch.from_numpy(x).to(fragments.device) for x in tables)
        known = fragments.tables["scan", ROWS] = tiles, spans
    return known


# ---- passes


def _turned(states: torch.Tensor) -> torch.Tensor:
    """[f, C, N, 1] as [f, N, C], in float32."""
    return states[..., 0].mT.float().contiguous()


def _turned_back(states: torch.Tensor) -> torch.Tensor:
    """`_turned` undone."""
    return states.mT.contiguous()[..., None]


class ScanForward:
    """See `ForwardRun`."""

    kept: tuple[torch.Tensor, ...] = ()

    def __init__(self, inputs: LinearInputs, fragments: FragmentRows) -> None:
        with torch.cuda.device_of(inputs.v):
            self._scan = _Scan(inputs, fragments)
            (self._shifts,) = self._scan.shifts()

    def maps(self, chosen: Sequence[int]) -> Maps:
        """Decays of rows, and states from zero."""
        with torch.cuda.device_of(self._shifts):
            b, m = self._scan.carry(self._shifts, None, chosen, factors=True)
        return Maps(_turned_back(m)[..., 0], _turned_back(b))

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Out, and the final states. It uses the shifts up."""
        scan, initial = self._scan, None if initial is None else _turned(initial)
        with torch.cuda.device_of(self._shifts):
            ends, _ = scan.carry(self._shifts, initial, final=final)
            out = scan.outputs(self._shifts)
        return out, _turned_back(ends) if final else None


class ScanBackward:
    """See `BackwardRun`."""

    def __init__(
        self, inputs: LinearInputs, fragments: FragmentRows, initial: torch.Tensor | None, dout: torch.Tensor
    ) -> None:
        self._dout, self._has_initial = dout, initial is not None
        with torch.cuda.device_of(dout):
            self._scan = scan = _Scan(inputs, fragments)
            self._before, self._shifts = scan.shifts(dout)
            scan.carry(self._before, None if initial is None else _turned(initial), final=False)

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        """D, and M dfinal besides."""
        behind = None if dfinal is None else _turned(dfinal)
        with torch.cuda.device_of(self._dout):
            found, _ = self._scan.carry(self._shifts, behind, chosen, reverse=True)
        return _turned_back(found)

    def meanwhile(self) -> None:
        """Nothing."""

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        """All gradients. It uses the shifts up."""
        scan, behind = self._scan, None if dfinal is None else _turned(dfinal)
        with torch.cuda.device_of(self._dout):
            dinitial, _ = scan.carry(self._shifts, behind, reverse=True, final=self._has_initial)
            found = scan.gradients(self._dout, self._before, self._shifts)
        return found._replace(dinitial=_turned_back(dinitial) if self._has_initial else None)
