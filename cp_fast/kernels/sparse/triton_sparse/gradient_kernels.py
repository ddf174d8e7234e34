# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
"""Gradients of attention over chosen keys, in Triton: `backward` of `SparseKernels`.

Some query rows at a time, by three kernels, since no program has room for all sums of a row of the latent form:
`pairs_kernel` writes each pair's weight and the gradient of its score to a workspace of at most `PAIRS_BYTES` bytes.
`queries_kernel` adds the keys of a query, times these gradients. `keys_kernel` adds the share of all heads of a query
to each chosen key, in one sum where v is a view of k. It adds to memory by atomic adds, or writes PARTS: one row for
each pair of a query row and a key. `add_parts` adds these in the order of the query rows.

legend   n = query rows, S = runs of each, R = query rows of a launch, m = gathered keys
         G = query heads of a kv head, BH = those of a program
         BN = keys of a tile, ROW = places of a row in the workspace: those of its runs and top_k, rounded up to WHOLE
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cp_fast.kernels.sparse.sparse_kernels import Runs, shared_storage
from cp_fast.kernels.sparse.triton_sparse.attention_kernels import (
    Tiling,
    chosen_rows,
    last_chosen,
    query_tiles,
    runs_of,
)
from cp_fast.kernels.sparse.triton_sparse.tiles import columns, launch_device, precision, widths

__all__ = [
    "PAIRS_BYTES",
    "PARTS_BYTES",
    "BackwardInputs",
    "BackwardTilings",
    "add_parts",
    "backward",
    "backward_tiles",
    "keys_kernel",
    "pairs_kernel",
    "put_tile",
    "queries_kernel",
    "sums_kernel",
]  # fmt: skip

PAIRS_BYTES = 1 << 30  # of weights and gradients of scores of some query rows
PARTS_BYTES = 1 << 30  # of the parts of some query rows, which are added in a fixed order
WHOLE = 128  # the pairs of a row are written in so many at least


class BackwardTilings(NamedTuple):
    """Constants of the three kernels."""

    pairs: Tiling
    queries: Tiling
    keys: Tiling


# ---- kernels


@triton.jit
def put_tile(
    place, slots, at, chosen, count, row_size, value, first, end,
    WIDTH: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add columns [first, end) of gradients of chosen keys [BN, WIDTH] to the rows `at`; or with PARTS, store them in
    the rows `slots` of the query row's own list, of which `count` are used.
    """
    o_d = first + tl.arange(0, WIDTH)
    if PARTS:
        tl.store(place + slots[:, None] * D + o_d[None], value, mask=(slots < count)[:, None] & (o_d < end)[None])
    else:
        target = place + (at * row_size)[:, None] + o_d[None]
        tl.atomic_add(target, value, mask=(chosen >= 0)[:, None] & (o_d < end)[None], sem="relaxed")


@triton.jit(do_not_specialize=["first"])
def pairs_kernel(
    q, k, v, rows, out, lse, dout, dlse, weights, grads, first, top_k, scale, row_places, q_row, q_head, k_row, k_head,
    v_row, v_head, dout_row, dout_head, rows_row, rows_set, starts, stops, S: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, BLOCKS: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr,
    D: tl.constexpr, NC: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr,
    D_V: tl.constexpr, NV: tl.constexpr, DV: tl.constexpr, VIEW: tl.constexpr, DLSE: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of BH query heads of one query row and the gradients of their scores, times scale: [R, H, ROW]."""
    block = tl.program_id(0) % BLOCKS
    of_kv = tl.program_id(0) // BLOCKS % (H // G)
    in_launch = (tl.program_id(0) // (BLOCKS * (H // G))).to(tl.int64)
    row = in_launch + first
    o_h = block * BH + tl.arange(0, BH)
    own = o_h < G
    head = of_kv * G + o_h
    rows += row * rows_row + of_kv * rows_set
    starts += row * S
    stops += row * S
    count = last_chosen(rows, starts, stops, top_k, LANES, S)
    q_tiles = query_tiles(q + row * q_row + head.to(tl.int64) * q_head, own, NC, DC, DR, D, G % BH != 0)
    delta = tl.zeros([BH], tl.float32)
    douts = ()
    for c in tl.static_range(NV):
        d_tile = columns(dout + row * dout_row + head.to(tl.int64) * dout_head, own, c * DV, DV, D_V, G % BH != 0)
        o_tile = columns(out + (row * H + head) * D_V, own, c * DV, DV, D_V, G % BH != 0)
        delta += tl.sum(d_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
        douts += (d_tile,)
    if DLSE:
        delta -= tl.load(dlse + row * H + head, mask=own, other=0.0)
    log = tl.load(lse + row * H + head, mask=own, other=0.0) * 1.4426950408889634  # log2(e)
    log = tl.where(log == float("-inf"), 0.0, log)
    k += of_kv.to(tl.int64) * k_head
    v += of_kv.to(tl.int64) * v_head
    places = ((in_launch * H + head) * row_places)[:, None] + tl.arange(0, BN)[None]
    for t in range(0, (count + WHOLE - 1) // WHOLE * WHOLE, BN):
        chosen = chosen_rows(rows, starts, stops, t, top_k, BN, S)
        at = tl.maximum(chosen, 0).to(tl.int64)
        k_tiles = query_tiles(k + at * k_row, own, NC, DC, DR, D, False)
        scores = tl.zeros([BH, BN], tl.float32)
        for c in tl.static_range(NC + (DR > 0)):
            scores = tl.dot(q_tiles[c], tl.trans(k_tiles[c]), scores, input_precision=PRECISION)
        grad = tl.zeros([BH, BN], tl.float32)
        for c in tl.static_range(NV):
            v_tile = k_tiles[c] if VIEW else columns(v + at * v_row, own, c * DV, DV, D_V, False)
            grad = tl.dot(douts[c], tl.trans(v_tile), grad, input_precision=PRECISION)
        weight = tl.exp2(scores * (scale * 1.4426950408889634) - log[:, None])
        weight = tl.where((chosen >= 0)[None], weight, 0.0)
        grad = weight * (grad - delta[:, None]) * scale
        tl.store(weights + places + t, weight.to(weights.dtype.element_ty), mask=own[:, None])
        tl.store(grads + places + t, grad.to(grads.dtype.element_ty), mask=own[:, None])


@triton.jit(do_not_specialize=["first"])
def queries_kernel(
    grads, k, rows, dq, first, top_k, row_places, k_row, k_head, rows_row, rows_set,
    starts, stops, S: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, BLOCKS: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr,
    D: tl.constexpr, NC: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BH query heads of one query row."""
    block = tl.program_id(0) % BLOCKS
    of_kv = tl.program_id(0) // BLOCKS % (H // G)
    in_launch = (tl.program_id(0) // (BLOCKS * (H // G))).to(tl.int64)
    row = in_launch + first
    o_h = block * BH + tl.arange(0, BH)
    own = o_h < G
    head = of_kv * G + o_h
    rows += row * rows_row + of_kv * rows_set
    starts += row * S
    stops += row * S
    count = last_chosen(rows, starts, stops, top_k, LANES, S)
    k += of_kv.to(tl.int64) * k_head
    grads += ((in_launch * H + head) * row_places)[:, None] + tl.arange(0, BN)[None]
    sums = ()
    for _ in tl.static_range(NC):
        sums += (tl.zeros([BH, DC], tl.float32),)
    if DR > 0:
        sums += (tl.zeros([BH, DR], tl.float32),)
    for t in range(0, count, BN):
        at = tl.maximum(chosen_rows(rows, starts, stops, t, top_k, BN, S), 0).to(tl.int64)
        grad = tl.load(grads + t) if G % BH == 0 else tl.load(grads + t, mask=own[:, None], other=0.0)
        k_tiles = query_tiles(k + at * k_row, own, NC, DC, DR, D, False)
        added = ()
        for c in tl.static_range(NC + (DR > 0)):
            added += (tl.dot(grad, k_tiles[c], sums[c], input_precision=PRECISION),)
        sums = added
    dq += (row * H + head)[:, None] * D
    for c in tl.static_range(NC):
        o_d = c * DC + tl.arange(0, DC)
        tl.store(dq + o_d[None], sums[c].to(dq.dtype.element_ty), mask=own[:, None] & (o_d < D)[None])
    if DR > 0:
        o_d = NC * DC + tl.arange(0, DR)
        tl.store(dq + o_d[None], sums[NC].to(dq.dtype.element_ty), mask=own[:, None] & (o_d < D)[None])


@triton.jit(do_not_specialize=["first", "total"])
def keys_kernel(
    factors, x, more_factors, y, rows, found, first, total, top_k, row_places, begin, end, x_row, x_head, y_row, y_head,
    rows_row, rows_set, starts, stops, S: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, BLOCKS: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr,
    D: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, BOTH: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What BH query heads of one query row add to WIDTH of the columns [begin, end) of its chosen keys' gradients: the
    sum over heads of factors [R, H, ROW] times x; with BOTH, of more_factors times y too. total: query rows of this
    launch, from `first` on.
    """
    chunk, part = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    block, part = part % BLOCKS, part // BLOCKS
    of_kv = part % (H // G)
    in_launch = (part // (H // G)).to(tl.int64)
    row = in_launch + first
    o_h = block * BH + tl.arange(0, BH)
    own = o_h < G
    head = of_kv * G + o_h
    rows += row * rows_row + of_kv * rows_set
    starts += row * S
    stops += row * S
    count = last_chosen(rows, starts, stops, top_k, LANES, S)
    begin += chunk * WIDTH
    o_d = begin + tl.arange(0, WIDTH)
    keep = own[:, None] & (o_d < end)[None]
    x_tile = tl.load(x + (row * x_row + head.to(tl.int64) * x_head)[:, None] + o_d[None], mask=keep, other=0.0)
    if BOTH:
        y_tile = tl.load(y + (row * y_row + head.to(tl.int64) * y_head)[:, None] + o_d[None], mask=keep, other=0.0)
    places = ((in_launch * H + head) * row_places)[:, None] + tl.arange(0, BN)[None]
    if PARTS:
        found += ((block * total + in_launch) * (H // G) + of_kv) * top_k * D
    else:
        found += of_kv * D
    for t in range(0, count, BN):
        slots = t + tl.arange(0, BN)
        chosen = chosen_rows(rows, starts, stops, t, top_k, BN, S)
        at = tl.maximum(chosen, 0).to(tl.int64)
        factor = tl.load(factors + places + t, mask=own[:, None], other=0.0)
        tile = tl.dot(tl.trans(factor), x_tile, input_precision=PRECISION)
        if BOTH:
            factor = tl.load(more_factors + places + t, mask=own[:, None], other=0.0)
            tile = tl.dot(tl.trans(factor), y_tile, tile, input_precision=PRECISION)
        put_tile(found, slots, at, chosen, count, (H // G) * D, tile, begin, end, WIDTH, D, PARTS)


@triton.jit(do_not_specialize=["pairs"])
def sums_kernel(
    parts, order, bounds, found, pairs, D: tl.constexpr, DP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add to one row the parts that belong to it, in the order given, each of BLOCKS slabs."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(bounds + row), tl.load(bounds + row + 1)
    if begin < end:
        o_d = tl.arange(0, DP)
        total = tl.load(found + row * D + o_d, mask=o_d < D, other=0.0)
        for i in range(begin, end):
            pair = tl.load(order + i)
            for block in tl.static_range(BLOCKS):
                total += tl.load(parts + (block * pairs + pair) * D + o_d, mask=o_d < D, other=0.0)
        tl.store(found + row * D + o_d, total, mask=o_d < D)


# ---- launches


def add_parts(parts: torch.Tensor, rows: torch.Tensor, found: torch.Tensor) -> None:
    """Add gradients of chosen keys to those of the keys, in the order of the query rows.

    Args:
        parts: float32 [blocks, n, h, top_k, d]: gradients of the chosen keys, as so many terms.
        rows: int32 [n, g, top_k], the key of each; -1 for none, whose part is not read.
        found: float32 [m, h, d].
    """
    blocks, n, heads, top_k, d = parts.shape
    of_head = torch.arange(heads, device=rows.device)[:, None]
    keys, order = (rows.expand(n, heads, top_k).long() * heads + of_head).flatten().sort(stable=True)
    bounds = torch.searchsorted(keys, torch.arange(len(found) * heads + 1, device=rows.device))
    sums_kernel[(len(found) * heads,)](
        parts, order, bounds, found, n * heads * top_k, d, triton.next_power_of_2(d), blocks, num_warps=4
    )


def backward_tiles(q: torch.Tensor, group: int) -> BackwardTilings:
    """Constants of the kernels for these heads."""
    heads, d = max(16, triton.next_power_of_2(group)), q.shape[2]
    if q.dtype == torch.float32:
        return BackwardTilings(Tiling(16, 16, 64, 4, 1), Tiling(16, 16, 64, 4, 1), Tiling(16, 16, 64, 4, 1))
    few, all_ = min(64, heads), min(128, heads)
    if d > 256:
        return BackwardTilings(Tiling(few, 64, 512, 4, 1), Tiling(few, 64, 256, 8, 2), Tiling(all_, 64, 128, 4, 1))
    return BackwardTilings(Tiling(few, 64, 256, 4, 2), Tiling(few, 64, 256, 4, 2), Tiling(all_, 64, 128, 4, 2))


class BackwardInputs(NamedTuple):
    """The operands that the launches of one backward pass share."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor
    dout: torch.Tensor
    weights: torch.Tensor  # [R, h_q, ROW], as grads
    grads: torch.Tensor
    tiles: BackwardTilings
    runs: Runs | None = None

    def sizes(self, tile: Tiling) -> tuple[int, int, int, int, int, int]:
        """H, G, BLOCKS, BH, BN, LANES."""
        h_q, h_kv = self.q.shape[1], self.k.shape[1]
        blocks = triton.cdiv(h_q // h_kv, tile.heads)
        return h_q, h_q // h_kv, blocks, tile.heads, tile.keys, triton.next_power_of_2(max(1, self.rows.shape[2]))

    def of_rows(self) -> tuple[Any, ...]:
        """Strides of rows, and the runs."""
        strides = self.rows.stride(0), self.rows.stride(1) if self.rows.shape[1] > 1 else 0
        return *strides, *runs_of(self.rows, self.runs)

    def write_pairs(
        self, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, scale: float, first: int, now: int
    ) -> None:
        q, k, v, dout, tile = self.q, self.k, self.v, self.dout, self.tiles.pairs
        d, d_v, sizes = q.shape[2], v.shape[2], self.sizes(tile)
        of_k, of_v = widths(d, tile.columns), widths(d_v, tile.columns)
        view = shared_storage(k, v) and of_v.rest == 0 and of_v.width == of_k.width
        pairs_kernel[(now * k.shape[1] * sizes[2],)](
            q, k, v, self.rows, out, lse, dout, dlse, self.weights, self.grads, first, self.rows.shape[2], scale,
            self.grads.shape[2], q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            dout.stride(0), dout.stride(1), *self.of_rows(), *sizes, d, *of_k, d_v, of_v.count + (of_v.rest > 0),
            of_v.width, view, dlse is not None, WHOLE, precision(q.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def add_queries(self, dq: torch.Tensor, first: int, now: int) -> None:
        k, tile = self.k, self.tiles.queries
        sizes = self.sizes(tile)
        queries_kernel[(now * k.shape[1] * sizes[2],)](
            self.grads, k, self.rows, dq, first, self.rows.shape[2], self.grads.shape[2], k.stride(0), k.stride(1),
            *self.of_rows(), *sizes, k.shape[2], *widths(k.shape[2], tile.columns), precision(k.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def add_keys(self, found: torch.Tensor, first: int, now: int, parts: bool, values: bool, both: int) -> None:
        """To the gradients of k, or with `values` of v; the first `both` columns also get the other."""
        tile, d = self.tiles.keys, found.shape[-1]
        sizes = self.sizes(tile)
        x, y = (self.dout, self.q) if values else (self.q, self.dout)
        factors, more = (self.weights, self.grads) if values else (self.grads, self.weights)
        for begin, end in ((0, both), (both, d)):
            count, width, rest = widths(end - begin, tile.columns) if begin < end else (0, 0, 0)
            for chunks, wide, start in ((count, width, begin), (int(rest > 0), rest, begin + count * width)):
                if chunks:
                    keys_kernel[(now * self.k.shape[1] * sizes[2] * chunks,)](
                        factors, x, more, y, self.rows, found, first, now, self.rows.shape[2], self.grads.shape[2],
                        start, min(end, start + chunks * wide), x.stride(0), x.stride(1), y.stride(0), y.stride(1),
                        *self.of_rows(), *sizes, d, chunks, wide, begin < both, parts, precision(x.dtype),
                        num_warps=tile.warps, num_stages=tile.stages,
                    )  # fmt: skip


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dout: torch.Tensor, dlse: torch.Tensor | None, scale: float, deterministic: bool,
    *, tiles: BackwardTilings | None = None, pairs_bytes: int = PAIRS_BYTES, parts_bytes: int = PARTS_BYTES,
    one_sum: bool = False, runs: Runs | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """See `SparseKernels`. one_sum: where v is a view of k, add its gradients to those of k, in half as many additions
    to memory; dv is None then.
    """
    if deterministic and runs is not None:  # parts are of a list
        rows, runs = runs.listed(rows), None
    (n, h_q, d), (m, h_kv, d_v), top_k = q.shape, v.shape, rows.shape[2]
    on = tiles or backward_tiles(q, h_q // h_kv)
    view = one_sum and shared_storage(k, v)
    dq = torch.empty(n, h_q, d, dtype=q.dtype, device=q.device)
    dk = torch.zeros(m, h_kv, d, dtype=torch.float32, device=q.device)
    dv = None if view else torch.zeros(m, h_kv, d_v, dtype=torch.float32, device=q.device)
    if not n * h_q or not m:
        return dq.zero_(), dk, dv
    places = triton.cdiv(top_k + (0 if runs is None else runs.longest), WHOLE) * WHOLE
    at_once = pairs_bytes // (2 * q.element_size() * h_q * places)
    blocks = triton.cdiv(h_q // h_kv, on.keys.heads)
    if deterministic:
        at_once = min(at_once, parts_bytes // (4 * blocks * h_kv * top_k * max(d, d_v)))
    at_once = max(1, min(n, at_once))
    weights, grads = q.new_empty(2, at_once, h_q, places)
    out, lse, dlse = out.contiguous(), lse.contiguous(), None if dlse is None else dlse.contiguous()
    dout = dout if dout.stride(2) == 1 else dout.contiguous()
    of = BackwardInputs(q, k, v, rows, dout, weights, grads, on, runs)
    with launch_device(q):
        for first in range(0, n, at_once):
            now = min(at_once, n - first)
            of.write_pairs(out, lse, dlse, scale, first, now)
            of.add_queries(dq, first, now)
            for found, values in ((dk, False), (dv, True)):
                if found is not None:
                    into = (
                        q.new_empty(blocks, now, h_kv, top_k, found.shape[2], dtype=torch.float32)
                        if deterministic
                        else found
                    )
                    of.add_keys(into, first, now, deterministic, values, d_v if view else 0)
                    if deterministic:
                        add_parts(into, rows[first : first + now], found)
    return dq, dk, dv
