# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""Triton kernels that flash-linear-attention does not have: affine maps of fragments, their composition, gradients."""

from __future__ import annotations

from functools import cache

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cp_fast.kernels.linear.fla.direct_launch import DirectLaunch
from cp_fast.kernels.linear.linear_kernels import Maps
from cp_fast.layers.state_tables import ScanTable

__all__ = [
    "LARGEST",
    "chunk_gradients",
    "composed_maps",
    "forward_maps",
    "reverse_maps",
    "states_before",
]

# ---- maps of fragments
#
# Triton kernels of the affine maps of fragments: (M, B) forward, D backward, for any chosen fragments in one launch.
#
# flash-linear-attention makes the map of one fragment a launch, with products of float32 for M. Here M is a state like
# any other, which begins as the identity: its columns take the products that a state takes, in the same precision.


_CHUNK = 64
_tuned = triton.autotune(
    configs=[triton.Config({}, num_warps=4, num_stages=s) for s in (1, 2, 3)],  # 8 warps take twice as long
    key=["H", "HV", "K", "V", "BV", "USE_W", "USE_G"],
)


@DirectLaunch
@_tuned
@triton.jit
def _forward_maps(
    k, w, u, g, gk, spans, m, b,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    USE_W: tl.constexpr, USE_G: tl.constexpr, USE_GK: tl.constexpr,
):  # fmt: skip
    """A block of BV columns of [B | M], for one head of one fragment."""
    i_c, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = tl.load(spans + 2 * i_n).to(tl.int64)
    rows = (tl.load(spans + 2 * i_n + 1) - start).to(tl.int32)
    blocks_b: tl.constexpr = (V + BV - 1) // BV
    of_b = i_c < blocks_b
    o_k, o_c = tl.arange(0, BK), tl.arange(0, BV)
    o_v = i_c * BV + o_c
    o_m = (i_c - blocks_b) * BV + o_c
    m_k, m_v = o_k < K, (o_v < V) & of_b
    k += (start * H + i_h // (HV // H)) * K
    u += (start * HV + i_h) * V
    if USE_W:
        w += (start * HV + i_h) * K
    if USE_G:
        g += start * HV + i_h
    if USE_GK:
        gk += (start * HV + i_h) * K
    state = tl.where((o_k[:, None] == o_m[None, :]) & (i_c >= blocks_b), 1.0, 0.0).to(tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    for i_t in range(tl.cdiv(rows, BT)):
        o_t = i_t * BT + tl.arange(0, BT)
        m_t = o_t < rows
        last = tl.minimum((i_t + 1) * BT, rows) - 1
        b_k = tl.load(k + o_k[:, None] + o_t[None, :] * (H * K), mask=m_k[:, None] & m_t[None, :], other=0.0)
        new = tl.load(u + o_t[:, None] * (HV * V) + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0.0)
        new = new.to(tl.float32)
        if USE_W:
            b_w = tl.load(w + o_t[:, None] * (HV * K) + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
            new -= tl.dot(b_w, state.to(b_w.dtype))
        if USE_G:
            g_last = tl.load(g + last * HV).to(tl.float32)
            b_g = tl.load(g + o_t * HV, mask=m_t, other=0.0).to(tl.float32)
            new *= tl.where(m_t, tl.exp2(g_last - b_g), 0.0)[:, None]
            state *= tl.exp2(g_last)
            total += g_last
        if USE_GK:
            gk_last = tl.load(gk + last * (HV * K) + o_k, mask=m_k, other=0.0).to(tl.float32)
            state *= tl.exp2(gk_last)[:, None]
        state += tl.dot(b_k, new.to(b_k.dtype))
    if of_b:
        b += (i_n * HV + i_h) * K * V
        tl.store(b + o_k[:, None] * V + o_v[None, :], state, mask=m_k[:, None] & m_v[None, :])
        if not USE_W and i_c == 0:
            tl.store(m + i_n * HV + i_h + tl.arange(0, 1), tl.exp2(total))
    else:
        m += (i_n * HV + i_h) * K * K
        tl.store(m + o_k[:, None] * K + o_m[None, :], state, mask=m_k[:, None] & (o_m < K)[None, :])


@DirectLaunch
@_tuned
@triton.jit
def _reverse_maps(
    q, k, w, do, dv, g, gk, spans, final, d, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    USE_W: tl.constexpr, USE_G: tl.constexpr, USE_GK: tl.constexpr, USE_FINAL: tl.constexpr,
):  # fmt: skip
    """A block of BV columns of D, for one head of one fragment. A tuner launches it often: it reads nothing of d."""
    i_c, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = tl.load(spans + 2 * i_n).to(tl.int64)
    rows = (tl.load(spans + 2 * i_n + 1) - start).to(tl.int32)
    o_k, o_v = tl.arange(0, BK), i_c * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    q += (start * H + i_h // (HV // H)) * K
    k += (start * H + i_h // (HV // H)) * K
    do += (start * HV + i_h) * V
    if USE_W:
        w += (start * HV + i_h) * K
        dv += (start * HV + i_h) * V
    if USE_G:
        g += start * HV + i_h
    if USE_GK:
        gk += (start * HV + i_h) * K
    p_d = (i_n * HV + i_h) * K * V + o_k[:, None] * V + o_v[None, :]
    m_d = m_k[:, None] & m_v[None, :]
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if USE_FINAL:
        state += tl.load(final + p_d, mask=m_d, other=0.0)
    chunks = tl.cdiv(rows, BT)
    for i in range(chunks):
        i_t = chunks - 1 - i
        o_t = i_t * BT + tl.arange(0, BT)
        m_t = o_t < rows
        last = tl.minimum((i_t + 1) * BT, rows) - 1
        m_tv = m_t[:, None] & m_v[None, :]
        b_q = tl.load(q + o_k[:, None] + o_t[None, :] * (H * K), mask=m_k[:, None] & m_t[None, :], other=0.0)
        b_do = tl.load(do + o_t[:, None] * (HV * V) + o_v[None, :], mask=m_tv, other=0.0)
        if USE_G:
            g_last = tl.load(g + last * HV).to(tl.float32)
            b_g = tl.load(g + o_t * HV, mask=m_t, other=0.0).to(tl.float32)
            b_q = (b_q * tl.exp2(b_g)[None, :]).to(b_do.dtype)
        if USE_W:
            b_k = tl.load(k + o_t[:, None] * (H * K) + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
            b_w = tl.load(w + o_k[:, None] + o_t[None, :] * (HV * K), mask=m_k[:, None] & m_t[None, :], other=0.0)
            b_dv = tl.dot(b_k, state.to(b_k.dtype))
            if USE_G:
                b_dv *= tl.where(m_t, tl.exp2(g_last - b_g), 0.0)[:, None]
            b_dv += tl.load(dv + o_t[:, None] * (HV * V) + o_v[None, :], mask=m_tv, other=0.0)
        if USE_G:
            state *= tl.exp2(g_last)
        if USE_GK:
            gk_last = tl.load(gk + last * (HV * K) + o_k, mask=m_k, other=0.0).to(tl.float32)
            state *= tl.exp2(gk_last)[:, None]
        state += tl.dot(b_q, b_do) * scale
        if USE_W:
            state -= tl.dot(b_w, b_dv.to(b_w.dtype))
    tl.store(d + p_d, state, mask=m_d)


def forward_maps(
    k: torch.Tensor,
    w: torch.Tensor | None,
    u: torch.Tensor,
    spans: torch.Tensor,
    *,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """M [c, h_v, d_k, d_k], without w the factors [c, h_v], and B [c, h_v, d_k, d_v] of c fragments, in float32.

    Args:
        k: [n, h or h_v, d_k]; with gk the keys times what decays until the end of their chunk.
        w, u: the WY representation [n, h_v, d_k] and [n, h_v, d_v]; without w, u is v.
        spans: rows [start, stop) of each fragment, int64 [c, 2].
        g, gk: sums of the log decays in every chunk of 64 rows, in powers of 2: [n, h_v] or [n, h_v, d_k].
    """
    (_, h, d_k), (_, h_v, d_v), c = k.shape, u.shape, spans.shape[0]
    block_k, block_v = _blocks(d_k)
    b = u.new_empty(c, h_v, d_k, d_v, dtype=torch.float32)
    m = u.new_empty((c, h_v) if w is None else (c, h_v, d_k, d_k), dtype=torch.float32)
    columns = -(-d_v // block_v) + (0 if w is None else -(-d_k // block_v))
    _forward_maps[columns, h_v, c](
        k, w, u, g, gk, spans, m, b, h, h_v, d_k, d_v, _CHUNK, block_k, block_v,
        w is not None, g is not None, gk is not None,
    )  # fmt: skip
    return m, b


def reverse_maps(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor | None,
    dout: torch.Tensor,
    dv: torch.Tensor | None,
    spans: torch.Tensor,
    dfinal: torch.Tensor | None,
    scale: float,
    *,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
) -> torch.Tensor:
    """D of c fragments [c, h_v, d_k, d_v], in float32; with `dfinal`, of that shape, M^T @ dfinal is added.

    Args:
        q, k: [n, h or h_v, d_k]; with gk, q times its decay since the chunk's start, and k as in `forward_maps`.
        w: the WY representation [n, h_v, d_k], or None.
        dout: [n, h_v, d_v].
        dv: the part of the gradient of the new values that comes from inside a chunk, [n, h_v, d_v]; None without w.
        spans, g, gk: see `forward_maps`.
    """
    (_, h, d_k), (_, h_v, d_v), c = q.shape, dout.shape, spans.shape[0]
    block_k, block_v = _blocks(d_k)
    d = q.new_empty(c, h_v, d_k, d_v, dtype=torch.float32)
    final = None if dfinal is None else dfinal.float().contiguous()
    _reverse_maps[-(-d_v // block_v), h_v, c](
        q, k, w, dout, dv, g, gk, spans, final, d, scale, h, h_v, d_k, d_v, _CHUNK, block_k, block_v,
        w is not None, g is not None, gk is not None, final is not None,
    )  # fmt: skip
    return d


@cache
def _blocks(d_k: int) -> tuple[int, int]:
    """The rows of a program's state, all of them, and its columns: a state of 8,192 numbers at most."""
    rows = max(16, triton.next_power_of_2(d_k))
    return rows, max(16, min(64, 8192 // rows))


# ---- maps one after the other
#
# A Triton kernel that applies affine maps one after the other, in float32, for all scans of a table at once.


LARGEST = 128  # head dim of keys whose M fits in the memory of a multiprocessor
_PROGRAMS = 128  # about as many as a GPU has multiprocessors


@DirectLaunch
@triton.autotune(configs=[triton.Config({}, num_warps=8)], key=[])
@triton.jit
def _scan(
    m, b, start, starts, first, steps, before, end_b, end_m, row_m, row_b,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    TRANSPOSED: tl.constexpr, FACTOR: tl.constexpr, USE_START: tl.constexpr, STORE_BEFORE: tl.constexpr,
):  # fmt: skip
    """BC columns of the states, or of [B | M], for one head of one scan. The blocks behind those of V are of M."""
    i_c, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    low, high = tl.load(first + i_n), tl.load(first + i_n + 1)
    blocks_b: tl.constexpr = (V + BC - 1) // BC
    of_b = i_c < blocks_b
    o_k, o_c = tl.arange(0, BK), tl.arange(0, BC)
    o_v, o_m = i_c * BC + o_c, (i_c - blocks_b) * BC + o_c
    m_k = o_k < K
    m_b = m_k[:, None] & ((o_v < V) & of_b)[None, :]
    p_b = i_h * K * V + o_k[:, None] * V + o_v[None, :]
    p_m = i_h * K * K + (o_k[None, :] * K + o_k[:, None] if TRANSPOSED else o_k[:, None] * K + o_k[None, :])
    state = tl.where((o_k[:, None] == o_m[None, :]) & (i_c >= blocks_b), 1.0, 0.0).to(tl.float32)
    if USE_START:
        at = tl.load(starts + i_n)
        state += tl.load(start + at * (HV * K * V) + p_b, mask=m_b & (at >= 0), other=0.0)
    for i in range(low, high):
        slot, target = tl.load(steps + 2 * i), tl.load(steps + 2 * i + 1)
        if STORE_BEFORE:
            tl.store(before + target * (HV * K * V) + p_b, state, mask=m_b & (target >= 0))
        if slot >= 0:
            b_b = tl.load(b + slot * row_b + p_b, mask=m_b, other=0.0)
            if of_b & (i == low) & (not USE_START):
                state = b_b
            elif FACTOR:
                state = state * tl.load(m + slot * row_m + i_h) + b_b
            else:
                b_m = tl.load(m + slot * row_m + p_m, mask=m_k[:, None] & m_k[None, :], other=0.0)
                state = tl.dot(b_m, state, input_precision="tf32x3") + b_b
    if not STORE_BEFORE:
        if of_b:
            tl.store(end_b + i_n * (HV * K * V) + p_b, state, mask=m_b)
        else:
            p_end = (i_n * HV + i_h) * K * K + o_k[:, None] * K + o_m[None, :]
            tl.store(end_m + p_end, state, mask=m_k[:, None] & (o_m < K)[None, :])


def states_before(
    table: ScanTable, maps: Maps, states: torch.Tensor | None, count: int, *, transposed: bool = False
) -> torch.Tensor:
    """The states before the steps of the table, each at its target [count, h_v, d_k, d_v]; every target has a step.

    Args:
        maps: by slot, rows of contiguous maps.
        states: those that scans begin with [n, h_v, d_k, d_v]; None for zeros.
        transposed: the maps are M^T @ S + B.
    """
    before = maps.b.new_empty(count, *maps.b.shape[1:])
    _launch(table, maps, states, transposed, before=before)
    return before


def composed_maps(
    table: ScanTable, maps: Maps, states: torch.Tensor | None = None, *, transposed: bool = False
) -> Maps:
    """The composition of each scan's maps, which have matrices, its first map acting first. Transposed, only B, as M is
    known; the maps act on `states` then. See `states_before`.
    """
    n = table.starts.shape[0]
    b = maps.b.new_empty(n, *maps.b.shape[1:])
    m = maps.m.new_empty(0 if transposed else n, *maps.m.shape[1:])
    _launch(table, maps, states, transposed, end=Maps(m, b))
    return Maps(m, b)


def _launch(
    table: ScanTable,
    maps: Maps,
    states: torch.Tensor | None,
    transposed: bool,
    *,
    before: torch.Tensor | None = None,
    end: Maps | None = None,
) -> None:
    h_v, d_k, d_v = maps.b.shape[1:]
    if not (scans := table.starts.shape[0]):
        return
    columns = 64 if scans * h_v * d_v >= 64 * _PROGRAMS else 32  # of a program's state: each program reads all of M
    blocks = -(-d_v // columns)
    if end is not None and not transposed:
        blocks += -(-d_k // columns)
    _scan[blocks, h_v, scans](
        maps.m, maps.b, None if states is None else states.float().contiguous(), table.starts, table.first,
        table.steps, before, None if end is None else end.b, None if end is None else end.m,
        maps.m.stride(0), maps.b.stride(0), h_v, d_k, d_v, _rows(d_k), columns,
        transposed, maps.m.dim() == 2, states is not None, before is not None,
    )  # fmt: skip


@cache
def _rows(d_k: int) -> int:
    return max(16, triton.next_power_of_2(d_k))


# ---- gradients inside chunks
#
# A Triton kernel of the gradients of q, k, w and g inside chunks, for one decay a head.
#
# flash-linear-attention has this kernel too, and refuses it on Hopper GPUs with Triton 3.4 to 3.7.0, which compile the
# product with a transposed sum wrongly. Here a separate sum has the transposed scores, so nothing is transposed.


@DirectLaunch
@triton.autotune(
    configs=[triton.Config({}, num_warps=w, num_stages=s) for w in (4, 8) for s in (2, 3)],
    key=["H", "HV", "K", "V", "BK", "BV", "USE_DW"],
)
@triton.jit
def _chunk_gradients(
    q, k, v, g, h, do, dh, dv, dq, dk, dw, dg, cu, chunks, scale, n,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, USE_DW: tl.constexpr,
):  # fmt: skip
    """BK columns of the gradients of one chunk and head, and their share of dg."""
    i_k, i_c, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_n, i_t = tl.load(chunks + 2 * i_c), tl.load(chunks + 2 * i_c + 1)
    start, stop = tl.load(cu + i_n).to(tl.int64), tl.load(cu + i_n + 1).to(tl.int64)
    first = start + i_t.to(tl.int64) * BT
    rows = tl.minimum(stop - first, BT).to(tl.int32)
    o_t, o_k = tl.arange(0, BT), i_k * BK + tl.arange(0, BK)
    m_t, m_k = o_t < rows, o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    state = (i_c * HV + i_h) * K * V
    values = (first * HV + i_h) * V
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    b_dw = tl.zeros([BT, BK], dtype=tl.float32)
    scores = tl.zeros([BT, BT], dtype=tl.float32)  # of row i for row j
    turned = tl.zeros([BT, BT], dtype=tl.float32)  # the same, [j, i]
    dg_last = 0.0
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        m_tv = m_t[:, None] & m_v[None, :]
        p = values + o_t[:, None] * (HV * V) + o_v[None, :]
        p_turned = values + o_t[None, :] * (HV * V) + o_v[:, None]
        b_v = tl.load(v + p, mask=m_tv, other=0.0)
        b_do = tl.load(do + p, mask=m_tv, other=0.0)
        v_turned = tl.load(v + p_turned, mask=m_t[None, :] & m_v[:, None], other=0.0)
        do_turned = tl.load(do + p_turned, mask=m_t[None, :] & m_v[:, None], other=0.0)
        p_h = state + o_k[None, :] * V + o_v[:, None]  # [BV, BK]
        m_h = m_k[None, :] & m_v[:, None]
        b_h = tl.load(h + p_h, mask=m_h, other=0.0)
        b_dh = tl.load(dh + p_h, mask=m_h, other=0.0)
        dg_last += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32))
        scores = tl.dot(b_do, v_turned, scores)
        turned = tl.dot(b_v, do_turned, turned)
        b_dq = tl.dot(b_do, b_h.to(b_do.dtype), b_dq)
        b_dk = tl.dot(b_v, b_dh.to(b_v.dtype), b_dk)
        if USE_DW:
            b_dv = tl.load(dv + p, mask=m_tv, other=0.0)
            b_dw = tl.dot(b_dv, b_h.to(b_dv.dtype), b_dw)
    own = (first * HV + i_h) * K + o_t[:, None] * (HV * K) + o_k[None, :]
    if USE_DW:
        tl.store(dw + own, (-b_dw).to(dw.dtype.element_ty), mask=m_tk)
    shared = (first * H + i_h // (HV // H)) * K + o_t[:, None] * (H * K) + o_k[None, :]
    b_q = tl.load(q + shared, mask=m_tk, other=0.0)
    b_k = tl.load(k + shared, mask=m_tk, other=0.0)
    g += first * HV + i_h
    b_g = tl.load(g + o_t * HV, mask=m_t, other=0.0)
    g_last = tl.load(g + (rows - 1) * HV)
    b_dq *= tl.exp2(b_g)[:, None] * scale
    b_dk *= tl.where(m_t, tl.exp2(g_last - b_g), 0.0)[:, None]
    dg_last = dg_last * tl.exp2(g_last) + tl.sum(b_dk * b_k)
    both = m_t[:, None] & m_t[None, :]
    later = (o_t[:, None] >= o_t[None, :]) & both
    earlier = (o_t[:, None] <= o_t[None, :]) & both
    scores = tl.where(later, scores * tl.exp2(b_g[:, None] - b_g[None, :]), 0.0) * scale
    turned = tl.where(earlier, turned * tl.exp2(b_g[None, :] - b_g[:, None]), 0.0) * scale
    b_dq = tl.dot(scores.to(b_k.dtype), b_k, b_dq)
    b_dk = tl.dot(turned.to(b_q.dtype), b_q, b_dk)
    b_dg = tl.sum(b_dq * b_q, axis=1) - tl.sum(b_dk * b_k, axis=1)
    b_dg = tl.where(o_t == rows - 1, b_dg + dg_last, b_dg)
    tl.store(dq + own, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    tl.store(dk + own, b_dk.to(dk.dtype.element_ty), mask=m_tk)
    tl.store(dg + (i_k * n + first) * HV + i_h + o_t * HV, b_dg, mask=m_t)


def chunk_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    h: torch.Tensor,
    dout: torch.Tensor,
    dh: torch.Tensor,
    dv: torch.Tensor | None,
    scale: float,
    cu: torch.Tensor,
    chunks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """dq and dk [n, h, d_k], dw [n, h_v, d_k], None without dv, and the gradient of g's sums [n, h_v] in float32.

    Args:
        q, k: [n, h, d_k]; v: the new values [n, h_v, d_v]; g: see `forward_maps`; dout: [n, h_v, d_v].
        h, dh: the states before, and their gradients after every chunk, [chunks, h_v, d_k, d_v].
        dv: the gradients of the new values, [n, h_v, d_v]; None without WY representation.
        cu: the fragments' rows, int64 [f + 1]; chunks: (fragment, number in it) of each chunk, int64 [chunks, 2].
    """
    (n, heads, d_k), (_, h_v, d_v) = q.shape, v.shape
    block_k, block_v = _block(d_k), _block(d_v)
    blocks = -(-d_k // block_k)
    dq, dk = (x.new_empty(n, h_v, d_k) for x in (q, k))
    dw = None if dv is None else v.new_empty(n, h_v, d_k)
    dg = g.new_empty(blocks, n, h_v, dtype=torch.float32)
    _chunk_gradients[blocks, chunks.shape[0], h_v](
        q, k, v, g, h, dout, dh, dv, dq, dk, dw, dg, cu, chunks, scale, n,
        heads, h_v, d_k, d_v, _CHUNK, block_k, block_v, dv is not None,
    )  # fmt: skip
    if h_v != heads:
        dq, dk = (x.view(n, heads, h_v // heads, d_k).sum(2, dtype=torch.float32) for x in (dq, dk))
    return dq, dk, dw, dg.sum(0)


@cache
def _block(size: int) -> int:
    return max(16, min(64, triton.next_power_of_2(size)))
