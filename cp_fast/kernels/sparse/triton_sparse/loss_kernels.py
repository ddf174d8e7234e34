# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false
"""The indexer's loss and its gradients, in Triton: `loss` and `loss_backward` of `SparseKernels`.

Some query rows at a time: `terms_kernel` writes the attention's weight of each chosen key, added over the query heads,
and the indexer's score of it; `finish_kernel` makes the row's divergence of them, or the gradients of its scores;
`index_gradients_kernel` goes from these to the indexer's inputs. A program has one query row.

legend   n = query rows, R = those of a launch, m = gathered keys, HP = heads of the indexer, as a power of two
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cp_fast.kernels.sparse.triton_sparse.attention_kernels import Tiling, chosen_rows, last_chosen, query_tiles
from cp_fast.kernels.sparse.triton_sparse.gradient_kernels import PARTS_BYTES, add_parts, put_tile
from cp_fast.kernels.sparse.triton_sparse.tiles import LOG2E, columns, launch_device, precision, widths

__all__ = ["finish_kernel", "index_gradients_kernel", "loss", "loss_backward", "terms_kernel"]

TERMS_BYTES = 128 << 20  # of the terms of some query rows


class LossInputs(NamedTuple):
    """Arguments of both functions."""

    q_index: torch.Tensor
    k_index: torch.Tensor
    weights: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    lse: torch.Tensor
    rows: torch.Tensor
    scale: float
    softmax_scale: float


@triton.jit(do_not_specialize=["first"])
def terms_kernel(
    q_index, k_index, weights, q, k, lse, rows, masses, marks, first, top_k, scale, softmax_scale,
    qi_row, qi_head, ki_row, w_row, q_row, q_head, k_row, k_head, lse_row, rows_row,
    H: tl.constexpr, G: tl.constexpr, BLOCKS: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr,
    D: tl.constexpr, NC: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr,
    HI: tl.constexpr, HP: tl.constexpr, DI: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The attention's weights (masses) and the indexer's scores (marks) of one query row's chosen keys: 0 and -inf
    where there is none. softmax_scale: times log2(e).
    """
    here = tl.program_id(0).to(tl.int64)
    row = here + first
    rows += row * rows_row
    count = last_chosen(rows, rows, rows, top_k, LANES, 0)
    o_i = tl.arange(0, HP)
    qi_tile = columns(q_index + row * qi_row + o_i * qi_head, o_i < HI, 0, DP, DI, True)
    weight = tl.load(weights + row * w_row + o_i, mask=o_i < HI, other=0.0)
    for t in range(0, top_k, BN):
        slots = t + tl.arange(0, BN)
        mass = tl.zeros([BN], tl.float32)
        mark = tl.full([BN], float("-inf"), tl.float32)
        if t < count:
            chosen = chosen_rows(rows, rows, rows, t, top_k, BN, 0)
            at = tl.maximum(chosen, 0).to(tl.int64)
            for part in range((H // G) * BLOCKS):
                of_kv, block = part // BLOCKS, part % BLOCKS
                o_h = block * BH + tl.arange(0, BH)
                own = o_h < G
                head = (of_kv * G + o_h).to(tl.int64)
                q_tiles = query_tiles(q + row * q_row + head * q_head, own, NC, DC, DR, D, G % BH != 0)
                k_tiles = query_tiles(k + at * k_row + of_kv * k_head, own, NC, DC, DR, D, False)
                scores = tl.zeros([BN, BH], tl.float32)
                for c in tl.static_range(NC + (DR > 0)):
                    scores = tl.dot(k_tiles[c], tl.trans(q_tiles[c]), scores, input_precision=PRECISION)
                log = tl.load(lse + row * lse_row + head, mask=own, other=float("inf"))
                log = tl.where(log == float("-inf"), float("inf"), log * 1.4426950408889634)  # log2(e)
                mass += tl.sum(tl.exp2(scores * softmax_scale - log[None]), 1)
            ki_tile = columns(k_index + at * ki_row, chosen >= 0, 0, DP, DI, False)
            dots = tl.dot(ki_tile, tl.trans(qi_tile), input_precision=PRECISION)
            mark = tl.sum(tl.maximum(dots * scale, 0.0) * weight[None], 1)
            mass = tl.where(chosen >= 0, mass, 0.0)
            mark = tl.where(chosen >= 0, mark, float("-inf"))
        tl.store(masses + here * top_k + slots, mass, mask=slots < top_k)
        tl.store(marks + here * top_k + slots, mark, mask=slots < top_k)


@triton.jit(do_not_specialize=["first", "top_k"])
def finish_kernel(masses, marks, loss, dloss, first, top_k, LANES: tl.constexpr, GRADIENT: tl.constexpr):
    """The divergence of one query row; or with GRADIENT, the gradients of its marks, in their place."""
    here = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, LANES)
    mass = tl.load(masses + here * top_k + o_k, mask=o_k < top_k, other=0.0)
    mark = tl.load(marks + here * top_k + o_k, mask=o_k < top_k, other=float("-inf"))
    whole = tl.sum(mass)
    some = whole > 0.0
    whole = tl.where(some, whole, 1.0)
    largest = tl.max(mark)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    powers = tl.exp(mark - largest)
    total = tl.sum(powers)
    total = tl.where(total > 0.0, total, 1.0)
    if GRADIENT:
        grad = tl.load(dloss + first + here) * (powers / total - mass / whole)
        tl.store(marks + here * top_k + o_k, tl.where(some, grad, 0.0), mask=o_k < top_k)
    else:
        held = mass > 0.0
        terms = mass * (tl.log(tl.where(held, mass, 1.0)) - tl.where(held, mark, 0.0))
        found = tl.sum(terms) / whole - tl.log(whole) + largest + tl.log(total)
        tl.store(loss + first + here, tl.where(some, found, 0.0))


@triton.jit(do_not_specialize=["first"])
def index_gradients_kernel(
    q_index, k_index, weights, rows, marks, dq, dk, dweights, first, top_k, scale,
    qi_row, qi_head, ki_row, w_row, rows_row,
    BN: tl.constexpr, LANES: tl.constexpr, HI: tl.constexpr, HP: tl.constexpr, DI: tl.constexpr, DP: tl.constexpr,
    PARTS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of one query row's indexer inputs, and what it adds to dk. marks: gradients of scores. WIDE:
    products of float32, where float16 has no room for small gradients.
    """
    here = tl.program_id(0).to(tl.int64)
    row = here + first
    rows += row * rows_row
    count = last_chosen(rows, rows, rows, top_k, LANES, 0)
    o_i, o_d = tl.arange(0, HP), tl.arange(0, DP)
    q_tile = columns(q_index + row * qi_row + o_i * qi_head, o_i < HI, 0, DP, DI, True)
    if WIDE:
        q_tile = q_tile.to(tl.float32)
    weight = tl.load(weights + row * w_row + o_i, mask=o_i < HI, other=0.0)
    if PARTS:
        dk += here * top_k * DI
    of_q, of_weights = tl.zeros([HP, DP], tl.float32), tl.zeros([HP], tl.float32)
    for t in range(0, count, BN):
        slots = t + tl.arange(0, BN)
        chosen = chosen_rows(rows, rows, rows, t, top_k, BN, 0)
        at = tl.maximum(chosen, 0).to(tl.int64)
        k_tile = columns(k_index + at * ki_row, chosen >= 0, 0, DP, DI, False)
        if WIDE:
            k_tile = k_tile.to(tl.float32)
        grad = tl.load(marks + here * top_k + slots, mask=slots < top_k, other=0.0)
        grad = tl.where(chosen >= 0, grad, 0.0)
        dots = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale
        of_weights += tl.sum(tl.maximum(dots, 0.0) * grad[:, None], 0)
        grads = tl.where(dots > 0.0, grad[:, None] * (weight * scale)[None], 0.0).to(q_tile.dtype)
        of_q = tl.dot(tl.trans(grads), k_tile, of_q, input_precision=PRECISION)
        tile = tl.dot(grads, q_tile, input_precision=PRECISION)
        put_tile(dk, slots, at, chosen, count, DI, tile, 0, DI, DP, DI, PARTS)
    places = dq + (row * HI + o_i)[:, None] * DI + o_d[None]
    tl.store(places, of_q.to(dq.dtype.element_ty), mask=(o_i < HI)[:, None] & (o_d < DI)[None])
    tl.store(dweights + row * HI + o_i, of_weights, mask=o_i < HI)


# ---- launches


def _index_widths(q_index: torch.Tensor) -> tuple[int, int, int, int]:
    """HI, HP, DI, DP."""
    heads, d = q_index.shape[1:]
    return heads, max(16, triton.next_power_of_2(heads)), d, max(16, triton.next_power_of_2(d))


def _terms(x: LossInputs, first: int, masses: torch.Tensor, marks: torch.Tensor) -> None:
    (_, h_q, d), h_kv, top_k = x.q.shape, x.k.shape[1], x.rows.shape[2]
    heads = min(64, max(16, triton.next_power_of_2(h_q // h_kv)))
    on = Tiling(16, 16, 64, 4, 1) if x.q.dtype == torch.float32 else Tiling(heads, 64, 512, 8, 1)
    terms_kernel[(len(masses),)](
        x.q_index, x.k_index, x.weights, x.q, x.k, x.lse, x.rows, masses, marks, first, top_k, x.scale,
        x.softmax_scale * LOG2E, x.q_index.stride(0), x.q_index.stride(1), x.k_index.stride(0), x.weights.stride(0),
        x.q.stride(0), x.q.stride(1), x.k.stride(0), x.k.stride(1), x.lse.stride(0), x.rows.stride(0),
        h_q, h_q // h_kv, triton.cdiv(h_q // h_kv, on.heads), on.heads, on.keys, triton.next_power_of_2(top_k),
        d, *widths(d, on.columns), *_index_widths(x.q_index), precision(x.q.dtype),
        num_warps=on.warps, num_stages=on.stages,
    )  # fmt: skip


def _finish(
    x: LossInputs, first: int, masses: torch.Tensor, marks: torch.Tensor, found: torch.Tensor, grads: bool
) -> None:
    top_k = x.rows.shape[2]
    finish_kernel[(len(masses),)](
        masses, marks, found, found, first, top_k, triton.next_power_of_2(top_k), grads, num_warps=4
    )


def _launches(x: LossInputs, bytes_a_row: int, most: int) -> list[tuple[int, int]]:
    """The first query row of each launch, and how many it has."""
    n = len(x.q)
    at_once = max(1, min(n, most // max(1, bytes_a_row)))
    return [(first, min(at_once, n - first)) for first in range(0, n, at_once)]


def _buffers(x: LossInputs, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    masses, marks = torch.empty(2, rows, x.rows.shape[2], dtype=torch.float32, device=x.q.device)
    return masses, marks


def loss(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    lse: torch.Tensor, rows: torch.Tensor, scale: float, softmax_scale: float,
) -> torch.Tensor:  # fmt: skip
    """See `SparseKernels`."""
    x = LossInputs(q_index, k_index, weights, q, k, lse, rows, scale, softmax_scale)
    found = torch.zeros(len(q), dtype=torch.float32, device=q.device)
    with launch_device(q):
        for first, now in _launches(x, 8 * rows.shape[2], TERMS_BYTES) if rows.numel() and len(k) else ():
            masses, marks = _buffers(x, now)
            _terms(x, first, masses, marks)
            _finish(x, first, masses, marks, found, False)
    return found


def loss_backward(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    lse: torch.Tensor, rows: torch.Tensor, scale: float, softmax_scale: float, dloss: torch.Tensor,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `SparseKernels`."""
    x = LossInputs(q_index, k_index, weights, q, k, lse, rows, scale, softmax_scale)
    top_k, (m, d) = rows.shape[2], k_index.shape
    sizes = _index_widths(q_index)
    dq = torch.zeros(q_index.shape, dtype=q_index.dtype, device=q.device)
    dweights = torch.zeros(weights.shape, dtype=torch.float32, device=q.device)
    dk = torch.zeros(m, d, dtype=torch.float32, device=q.device)
    row_bytes, most = (4 * d * top_k, PARTS_BYTES) if deterministic else (8 * top_k, TERMS_BYTES)
    wide = q_index.dtype == torch.float16
    dloss = dloss.contiguous()
    with launch_device(q):
        for first, now in _launches(x, row_bytes, most) if rows.numel() and m else ():
            masses, marks = _buffers(x, now)
            _terms(x, first, masses, marks)
            _finish(x, first, masses, marks, dloss, True)
            parts = dk.new_empty(1, now, 1, top_k, d) if deterministic else dk
            small = q_index.dtype == torch.float32
            index_gradients_kernel[(now,)](
                q_index, k_index, weights, rows, marks, dq, parts, dweights, first, top_k, scale,
                q_index.stride(0), q_index.stride(1), k_index.stride(0), weights.stride(0), rows.stride(0),
                16 if small else 64, triton.next_power_of_2(top_k), *sizes, deterministic, wide,
                "tf32" if wide else precision(q_index.dtype), num_warps=4, num_stages=1 if small or wide else 2,
            )  # fmt: skip
            if deterministic:
                add_parts(parts, rows[first : first + now], dk[:, None])
    return dq, dk, dweights
