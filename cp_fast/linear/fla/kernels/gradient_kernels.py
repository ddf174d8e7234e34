# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""A Triton kernel of the gradients of q, k, w and g inside chunks, for one decay a head.

flash-linear-attention has this kernel too, and refuses it on Hopper GPUs with Triton 3.4 to 3.7.0, which compile the
product with a transposed sum wrongly. Here a separate sum has the transposed scores, so nothing is transposed.
"""

from __future__ import annotations

from functools import cache

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cp_fast.linear.fla.direct_launch import DirectLaunch

__all__ = ["chunk_gradients"]

_CHUNK = 64


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
        q, k: [n, h, d_k]; v: the new values [n, h_v, d_v]; g: see `map_kernels.forward_maps`; dout: [n, h_v, d_v].
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
