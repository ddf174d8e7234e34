"""Constants of the kernels over chosen keys, one kernel at a time: what each variant takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.parts.sparse_shape import Shape
from cp_fast.backends.triton_sparse import attention_kernels, gradient_kernels, select_kernels
from cp_fast.backends.triton_sparse.attention_kernels import Tiling
from cp_fast.backends.triton_sparse.gradient_kernels import BackwardTilings
from cp_fast.backends.triton_sparse.select_kernels import Best, ScoresTiling

__all__ = ["milliseconds", "variants"]

SCORES = (
    ScoresTiling(256, 64, 16, 4, 3), ScoresTiling(256, 64, 16, 4, 2), ScoresTiling(256, 64, 64, 4, 3),
    ScoresTiling(256, 128, 16, 8, 3),
    ScoresTiling(128, 128, 16, 4, 2), ScoresTiling(128, 128, 32, 4, 3),
)  # fmt: skip
BEST = (Best(2048, 2, 8, 16), Best(2048, 2, 4, 8), Best(4096, 2, 16, 32), Best(2048, 1, 8, 8), Best(1024, 2, 4, 16))
FORWARD = (
    Tiling(64, 64, 512, 8, 2), Tiling(64, 64, 256, 8, 2), Tiling(64, 32, 512, 8, 2), Tiling(64, 32, 512, 8, 3),
    Tiling(64, 64, 128, 8, 2), Tiling(64, 64, 512, 8, 1),
)  # fmt: skip
PAIRS = (Tiling(64, 32, 512, 4, 2), Tiling(64, 64, 512, 4, 1), Tiling(64, 32, 512, 8, 2), Tiling(64, 64, 512, 8, 1))
QUERIES = (Tiling(64, 64, 512, 8, 2), Tiling(64, 32, 512, 8, 3), Tiling(64, 64, 256, 8, 2), Tiling(64, 32, 512, 8, 2))
KEYS = (
    Tiling(128, 64, 128, 4, 2), Tiling(128, 64, 128, 8, 2), Tiling(128, 64, 128, 4, 1), Tiling(128, 64, 128, 8, 1),
    Tiling(128, 64, 256, 8, 1), Tiling(128, 64, 64, 4, 2), Tiling(128, 128, 128, 8, 1),
)  # fmt: skip


def milliseconds(fn: Callable[[], Any], calls: int) -> float:
    """The median of some calls, after one."""
    fn()
    found = []
    for _ in range(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def variants(shape: Shape) -> Iterator[tuple[str, Any, Callable[[], Any], float]]:
    """Kernel, constants, a call of it alone, and its operations (0: none are counted)."""
    visible = shape.visible()
    index, x, flops = shape.index_tensors(), shape.tensors(), shape.flops
    places = -(-shape.keys // 4096) * 4096
    numbers = torch.zeros(shape.rows, places, dtype=torch.int32, device="cuda")
    for on in SCORES:
        yield "scores", on, lambda on=on: select_kernels.scores(
            *index, visible, shape.index_scale, 0, numbers, on
        ), flops["select"]  # fmt: skip
    found = torch.empty(shape.rows, shape.top_k, dtype=torch.int32, device="cuda")
    for on in BEST:
        gathered = torch.empty(shape.rows, max(128, shape.top_k) * on.room, dtype=torch.int64, device="cuda")
        yield "best", on, lambda on=on, gathered=gathered: select_kernels.best(
            numbers, visible, 0, shape.rows, found, gathered, on
        ), 0.0  # fmt: skip
    draw = torch.Generator("cuda").manual_seed(5)
    rows = torch.randint(0, shape.keys, (shape.rows, shape.top_k), generator=draw, device="cuda", dtype=torch.int32)
    rows = rows.sort(1).values[:, None].contiguous()
    yield "rows_of", None, lambda: select_kernels.rows_of(rows, visible), 0.0
    for on in FORWARD:
        yield "forward", on, lambda on=on: attention_kernels.forward(
            x["q"], x["k"], x["v"], rows, shape.scale, None, tile=on
        ), flops["forward"]  # fmt: skip
    out = torch.randn_like(x["dout"])
    lse = torch.full((shape.rows, shape.heads), 12.0, device="cuda")
    dk, dq = torch.zeros(shape.keys, 1, shape.d, device="cuda"), torch.empty_like(x["q"])
    dv = torch.zeros(shape.keys, 1, shape.d_v, device="cuda")
    weights, grads = x["q"].new_zeros(2, shape.rows, shape.heads, -(-shape.top_k // 128) * 128)
    weights.normal_()
    grads.normal_()
    ops = shape.pairs * shape.heads * 2
    for on in PAIRS:
        of = gradient_kernels.BackwardInputs(
            x["q"], x["k"], x["v"], rows, x["dout"], weights, grads, BackwardTilings(on, QUERIES[0], KEYS[0])
        )  # fmt: skip
        yield "pairs", on, lambda of=of: of.write_pairs(out, lse, None, shape.scale, 0, shape.rows), ops * (
            shape.d + shape.d_v
        )  # fmt: skip
    for on in QUERIES:
        of = gradient_kernels.BackwardInputs(
            x["q"], x["k"], x["v"], rows, x["dout"], weights, grads, BackwardTilings(PAIRS[0], on, KEYS[0])
        )  # fmt: skip
        yield "queries", on, lambda of=of: of.add_queries(dq, 0, shape.rows), ops * shape.d
    for on in KEYS:
        of = gradient_kernels.BackwardInputs(
            x["q"], x["k"], x["v"], rows, x["dout"], weights, grads, BackwardTilings(PAIRS[0], QUERIES[0], on)
        )  # fmt: skip
        yield "keys", on, lambda of=of: of.add_keys(dk, 0, shape.rows, False, False, shape.d_v), ops * (
            shape.d + shape.d_v
        )  # fmt: skip
        yield "keys, two sums", on, lambda of=of: (
            of.add_keys(dk, 0, shape.rows, False, False, 0), of.add_keys(dv, 0, shape.rows, False, True, 0)
        ), ops * (shape.d + shape.d_v)  # fmt: skip
    parts = torch.empty(1, shape.rows, 1, shape.top_k, shape.d, device="cuda")
    of = gradient_kernels.BackwardInputs(
        x["q"], x["k"], x["v"], rows, x["dout"], weights, grads, BackwardTilings(PAIRS[0], QUERIES[0], KEYS[0])
    )  # fmt: skip
    yield "keys as parts", KEYS[0], lambda: of.add_keys(parts, 0, shape.rows, True, False, shape.d_v), ops * (
        shape.d + shape.d_v
    )  # fmt: skip
    yield "add_parts", None, lambda: gradient_kernels.add_parts(parts, rows, dk), 0.0
