# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false
"""Attention of each query row over its own rows of keys, in Triton: `forward` of `SparseKernels`.

A program has one query row and BH of the query heads of one kv head, the rows of its matrices, and goes through tiles
of BN gathered keys: those of its runs, which need no list, and then those of its list. A tile of keys is loaded once,
and is the tile of values where v is a view of k (VIEW).

legend   n = query rows, m = gathered keys, G = query heads of a kv head, BH = query heads of a program, S = runs
         BN = keys of a tile, NC tiles of DC columns and one of DR = the columns of q and k, NV of DV = those of v
         (see `widths`)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cp_fast.kernels.sparse.sparse_kernels import Runs, shared_storage
from cp_fast.kernels.sparse.triton_sparse.tiles import LOG2E, columns, launch_device, precision, widths

__all__ = ["Tiling", "chosen_rows", "forward", "forward_kernel", "forward_tile", "last_chosen", "runs_of"]


class Tiling(NamedTuple):
    """Constants of a kernel over chosen keys: query heads of a program, keys of a tile, columns of a tile at most,
    warps, stages.
    """

    heads: int
    keys: int
    columns: int
    warps: int
    stages: int


@triton.jit
def chosen_rows(rows, starts, stops, first, top_k, BN: tl.constexpr, S: tl.constexpr):
    """BN rows of keys from place `first` on: those of S runs, one run after the other, then those of a row's list; -1
    for none.
    """
    o_n = first + tl.arange(0, BN)
    if S == 0:
        found = tl.load(rows + o_n, mask=o_n < top_k, other=-1)
    else:
        of_runs = tl.full([BN], -1, tl.int32)
        for s in tl.static_range(S):
            start = tl.load(starts + s)
            size = tl.load(stops + s) - start
            of_runs = tl.where((o_n >= 0) & (o_n < size), start + o_n, of_runs)
            o_n -= size
        found = tl.load(rows + o_n, mask=(o_n >= 0) & (o_n < top_k), other=-1)
        found = tl.where(o_n < 0, of_runs, found)
    return found


@triton.jit
def last_chosen(rows, starts, stops, top_k, LANES: tl.constexpr, S: tl.constexpr):
    """Behind the last place, of runs and list, that has a row of keys."""
    o_k = tl.arange(0, LANES)
    count = tl.max(tl.where(tl.load(rows + o_k, mask=o_k < top_k, other=-1) >= 0, o_k + 1, 0))
    for s in tl.static_range(S):
        count += tl.load(stops + s) - tl.load(starts + s)
    return count


@triton.jit
def query_tiles(
    rows, keep, NC: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr
):
    """All columns of some rows, in tiles."""
    found = ()
    for c in tl.static_range(NC):
        found += (columns(rows, keep, c * DC, DC, D, MASKED),)
    if DR > 0:
        found += (columns(rows, keep, NC * DC, DR, D, MASKED),)
    return found


@triton.jit
def forward_kernel(
    q, k, v, rows, sink, out, lse, top_k, scale, q_row, q_head, k_row, k_head, v_row, v_head, rows_row, rows_set,
    starts, stops, S: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, BLOCKS: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr,
    D: tl.constexpr, NC: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr,
    D_V: tl.constexpr, NV: tl.constexpr, DV: tl.constexpr, VIEW: tl.constexpr, SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Out and lse of BH query heads of one query row. scale: of scores, times log2(e)."""
    block = tl.program_id(0) % BLOCKS
    of_kv = tl.program_id(0) // BLOCKS % (H // G)
    row = (tl.program_id(0) // (BLOCKS * (H // G))).to(tl.int64)
    o_h = block * BH + tl.arange(0, BH)
    own = o_h < G
    head = of_kv * G + o_h
    rows += row * rows_row + of_kv * rows_set
    starts += row * S
    stops += row * S
    count = last_chosen(rows, starts, stops, top_k, LANES, S)
    q_tiles = query_tiles(q + row * q_row + head.to(tl.int64) * q_head, own, NC, DC, DR, D, G % BH != 0)
    k += of_kv.to(tl.int64) * k_head
    v += of_kv.to(tl.int64) * v_head
    sums = ()
    for _ in tl.static_range(NV):
        sums += (tl.zeros([BH, DV], tl.float32),)
    largest = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    for t in range(0, count, BN):
        chosen = chosen_rows(rows, starts, stops, t, top_k, BN, S)
        at = tl.maximum(chosen, 0).to(tl.int64)
        k_tiles = query_tiles(k + at * k_row, own, NC, DC, DR, D, False)
        scores = tl.zeros([BH, BN], tl.float32)
        for c in tl.static_range(NC + (DR > 0)):
            scores = tl.dot(q_tiles[c], tl.trans(k_tiles[c]), scores, input_precision=PRECISION)
        scores = tl.where((chosen >= 0)[None], scores * scale, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base[:, None])
        before = tl.exp2(largest - base)
        total = total * before + tl.sum(weights, 1)
        largest = now
        narrow = weights.to(v.dtype.element_ty)
        added = ()
        for c in tl.static_range(NV):
            v_tile = k_tiles[c] if VIEW else columns(v + at * v_row, own, c * DV, DV, D_V, False)
            added += (tl.dot(narrow, v_tile, sums[c] * before[:, None], input_precision=PRECISION),)
        sums = added
    if SINK:
        logit = tl.load(sink + head, mask=own, other=0.0) * 1.4426950408889634  # log2(e)
        now = tl.maximum(largest, logit)
        base = tl.where(now == float("-inf"), 0.0, now)
        before = tl.exp2(largest - base)
        total = total * before + tl.exp2(logit - base)
    else:
        base = tl.where(largest == float("-inf"), 0.0, largest)
        before = tl.exp2(largest - base)
    inverse = before / tl.where(total == 0.0, 1.0, total)
    log = tl.where(total == 0.0, float("-inf"), (base + tl.log2(total)) * 0.6931471805599453)  # ln(2)
    tl.store(lse + row * H + head, log, mask=own)
    out += (row * H + head)[:, None] * D_V
    for c in tl.static_range(NV):
        o_d = c * DV + tl.arange(0, DV)
        value = (sums[c] * inverse[:, None]).to(out.dtype.element_ty)
        tl.store(out + o_d[None], value, mask=own[:, None] & (o_d < D_V)[None])


def runs_of(rows: torch.Tensor, runs: Runs | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The runs as arguments of a kernel: starts, stops, and how many a query row has."""
    if runs is None:
        return rows, rows, 0
    return runs.starts.contiguous(), runs.stops.contiguous(), runs.starts.shape[1]


def forward_tile(q: torch.Tensor, group: int) -> Tiling:
    """Constants of `forward_kernel` for these heads."""
    heads, d = min(64, max(16, triton.next_power_of_2(group))), q.shape[2]
    if q.dtype == torch.float32:
        return Tiling(16, 16, 64, 4, 1)
    if d > 256:
        return Tiling(heads, 64, 128, 8, 2)
    return Tiling(heads, 64, 256, 4, 2)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, scale: float, sink: torch.Tensor | None,
    *, tile: Tiling | None = None, runs: Runs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `SparseKernels`."""
    (n, h_q, d), (_, h_kv, d_v) = q.shape, v.shape
    out, lse = q.new_empty(n, h_q, d_v), q.new_empty(n, h_q, dtype=torch.float32)
    if not n * h_q:
        return out, lse
    on = tile or forward_tile(q, h_q // h_kv)
    of_k, of_v = widths(d, on.columns), widths(d_v, on.columns)
    view = shared_storage(k, v) and of_v.rest == 0 and of_v[:2] == of_k[:2]
    blocks = triton.cdiv(h_q // h_kv, on.heads)
    with launch_device(q):
        forward_kernel[(n * h_kv * blocks,)](
            q, k, v, rows, sink, out, lse, rows.shape[2], scale * LOG2E,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            rows.stride(0), rows.stride(1) if rows.shape[1] > 1 else 0, *runs_of(rows, runs),
            h_q, h_q // h_kv, blocks, on.heads, on.keys, triton.next_power_of_2(max(1, rows.shape[2])),
            d, *of_k, d_v, of_v.count + (of_v.rest > 0), of_v.width, view, sink is not None, precision(q.dtype),
            num_warps=on.warps, num_stages=on.stages,
        )  # fmt: skip
    return out, lse
