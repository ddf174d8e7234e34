# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""Triton kernels of the affine maps of fragments: (M, B) forward, D backward, for any chosen fragments in one launch.

flash-linear-attention makes the map of one fragment a launch, with products of float32 for M. Here M is a state like
any other, which begins as the identity: its columns take the products that a state takes, in the same precision.
"""

from __future__ import annotations

from functools import cache

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cp_fast.linear.fla.direct_launch import DirectLaunch

__all__ = ["forward_maps", "reverse_maps"]

_CHUNK = 64


@DirectLaunch
@triton.autotune(
    configs=[triton.Config({}, num_warps=4, num_stages=s) for s in (1, 2, 3)],  # 8 warps take twice as long
    key=["H", "HV", "K", "V", "BV", "USE_W", "USE_G"],
)
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
@triton.autotune(
    configs=[triton.Config({}, num_warps=4, num_stages=s) for s in (1, 2, 3)],  # 8 warps take twice as long
    key=["H", "HV", "K", "V", "BV", "USE_W", "USE_G"],
)
@triton.jit
def _reverse_maps(
    q, k, w, do, dv, g, gk, spans, d, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    USE_W: tl.constexpr, USE_G: tl.constexpr, USE_GK: tl.constexpr, USE_FINAL: tl.constexpr,
):  # fmt: skip
    """A block of BV columns of D, for one head of one fragment. With USE_FINAL d has the final states' gradients."""
    i_c, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = tl.load(spans + 2 * i_n).to(tl.int64)
    rows = (tl.load(spans + 2 * i_n + 1) - start).to(tl.int32)
    o_k, o_v = tl.arange(0, BK), i_c * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    q += (start * H + i_h // (HV // H)) * K
    k += (start * H + i_h // (HV // H)) * K
    do += (start * HV + i_h) * V
    d += (i_n * HV + i_h) * K * V
    if USE_W:
        w += (start * HV + i_h) * K
        dv += (start * HV + i_h) * V
    if USE_G:
        g += start * HV + i_h
    if USE_GK:
        gk += (start * HV + i_h) * K
    p_d = d + o_k[:, None] * V + o_v[None, :]
    m_d = m_k[:, None] & m_v[None, :]
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if USE_FINAL:
        state += tl.load(p_d, mask=m_d, other=0.0)
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
    tl.store(p_d, state, mask=m_d)


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
    d = q.new_empty(c, h_v, d_k, d_v, dtype=torch.float32) if dfinal is None else dfinal.float().contiguous().clone()
    _reverse_maps[-(-d_v // block_v), h_v, c](
        q, k, w, dout, dv, g, gk, spans, d, scale, h, h_v, d_k, d_v, _CHUNK, block_k, block_v,
        w is not None, g is not None, gk is not None, dfinal is not None,
    )  # fmt: skip
    return d


@cache
def _blocks(d_k: int) -> tuple[int, int]:
    """The rows of a program's state, all of them, and its columns: a state of 8,192 numbers at most."""
    rows = max(16, triton.next_power_of_2(d_k))
    return rows, max(16, min(64, 8192 // rows))
