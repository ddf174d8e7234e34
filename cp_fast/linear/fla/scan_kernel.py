# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""A Triton kernel that applies the affine maps of a fragment's pieces one after the other, in float32."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cp_fast.linear.affine_maps import Maps

__all__ = ["compose_pieces", "states_of_pieces"]

_COLUMNS = 16  # of a program's state; more do not fit in registers
_WARPS = 8


@triton.jit
def _scan(
    m, b, start, first, chosen, before, end_b, end_m,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    REVERSE: tl.constexpr, USE_START: tl.constexpr, USE_CHOSEN: tl.constexpr,
    STORE_BEFORE: tl.constexpr, STORE_END: tl.constexpr,
):  # fmt: skip
    """BC columns of the states, or of [B | M], for one head of one fragment. The blocks behind those of V are of M."""
    i_c, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    fragment = i_n
    if USE_CHOSEN:
        fragment = tl.load(chosen + i_n)
    low, high = tl.load(first + fragment), tl.load(first + fragment + 1)
    blocks_b: tl.constexpr = (V + BC - 1) // BC
    of_b = i_c < blocks_b
    o_k, o_c = tl.arange(0, BK), tl.arange(0, BC)
    o_v, o_m = i_c * BC + o_c, (i_c - blocks_b) * BC + o_c
    m_k = o_k < K
    m_b = m_k[:, None] & ((o_v < V) & of_b)[None, :]
    p_b = o_k[:, None] * V + o_v[None, :]
    p_m = o_k[None, :] * K + o_k[:, None] if REVERSE else o_k[:, None] * K + o_k[None, :]
    state = tl.where((o_k[:, None] == o_m[None, :]) & (i_c >= blocks_b), 1.0, 0.0).to(tl.float32)
    if USE_START:
        state += tl.load(start + (i_n * HV + i_h) * K * V + p_b, mask=m_b, other=0.0)
    for i in range(high - low):
        piece = low + i
        if REVERSE:
            piece = high - 1 - i
        at = (piece * HV + i_h) * K
        if STORE_BEFORE:
            tl.store(before + at * V + p_b, state, mask=m_b)
        b_m = tl.load(m + at * K + p_m, mask=m_k[:, None] & m_k[None, :], other=0.0)
        b_b = tl.load(b + at * V + p_b, mask=m_b, other=0.0)
        state = tl.dot(b_m, state, input_precision="tf32x3") + b_b
    if STORE_END:
        at = (i_n * HV + i_h) * K
        if of_b:
            tl.store(end_b + at * V + p_b, state, mask=m_b)
        else:
            tl.store(end_m + at * K + o_k[:, None] * K + o_m[None, :], state, mask=m_k[:, None] & (o_m < K)[None, :])


def states_of_pieces(
    maps: Maps, start: torch.Tensor | None, first: torch.Tensor, *, reverse: bool = False
) -> torch.Tensor:
    """The state that enters each piece [p, h_v, d_k, d_v], or with `reverse` the gradient that leaves it.

    Args:
        maps: of all p pieces; with `reverse` the maps are M^T @ S + B, and the last piece comes first.
        start: the state of every fragment [f, h_v, d_k, d_v]; None for zeros.
        first: the first piece of each fragment, and p, int64 [f + 1].
    """
    before = torch.empty_like(maps.b)
    _launch(maps, start, first, None, len(first) - 1, reverse, before=before)
    return before


def compose_pieces(
    maps: Maps, start: torch.Tensor | None, first: torch.Tensor, chosen: torch.Tensor, *, reverse: bool = False
) -> Maps:
    """The maps of the chosen fragments (int64 [c]), composed from those of their pieces. With `reverse` only B, as M
    is known; `start` [c, h_v, d_k, d_v] is then what the maps act on.
    """
    c = len(chosen)
    b = maps.b.new_empty(c, *maps.b.shape[1:])
    m = maps.m.new_empty(0 if reverse else c, *maps.m.shape[1:])
    if c:
        _launch(maps, start, first, chosen, c, reverse, end=Maps(m, b))
    return Maps(m, b)


def _launch(
    maps: Maps,
    start: torch.Tensor | None,
    first: torch.Tensor,
    chosen: torch.Tensor | None,
    count: int,
    reverse: bool,
    *,
    before: torch.Tensor | None = None,
    end: Maps | None = None,
) -> None:
    h_v, d_k, d_v = maps.b.shape[1:]
    blocks = triton.cdiv(d_v, _COLUMNS)
    if end is not None and len(end.m):
        blocks += triton.cdiv(d_k, _COLUMNS)
    start = None if start is None else start.float().contiguous()
    _scan[blocks, h_v, count](
        maps.m, maps.b, start, first, chosen, before, None if end is None else end.b, None if end is None else end.m,
        h_v, d_k, d_v, max(16, triton.next_power_of_2(d_k)), _COLUMNS,
        reverse, start is not None, chosen is not None, before is not None, end is not None,
        num_warps=_WARPS,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
