# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""A Triton kernel that applies affine maps one after the other, in float32, for all scans of a table at once."""

from __future__ import annotations

from functools import cache

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.fla.direct_launch import DirectLaunch
from cp_fast.linear.state_tables import ScanTable

__all__ = ["LARGEST", "composed_maps", "states_before"]

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
    """The composition of each scan's maps, its first map acting first. Transposed, only B, as M is known; the maps act
    on `states` then. See `states_before`.
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
