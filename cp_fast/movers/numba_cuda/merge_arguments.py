"""From tensors to arguments of `merge_kernels` and `weight_kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cp_fast.movers.numba_cuda.launch_plans import Plan
from cp_fast.movers.numba_cuda.merge_kernels import pairs_kernel
from cp_fast.movers.numba_cuda.move_arguments import fold, log_lanes, rows_per_block
from cp_fast.movers.numba_cuda.move_kernels import FIELDS
from cp_fast.movers.numba_cuda.numba_launch import launch
from cp_fast.movers.numba_cuda.weight_kernels import PIECES, weigh_kernel

__all__ = ["pairs_", "weigh_"]

DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}


def _wide(*dtypes: str) -> str:
    return "f64" if "f64" in dtypes else "f32"


def _width(ends: Sequence[tuple[int, torch.dtype]], elements: Sequence[int]) -> int:
    """4 if addresses allow to read and write 4 numbers at once, else 1. `elements`: sizes and strides."""
    dense = all(number % 4 == 0 for number in elements)
    return 4 if dense and all(where % min(4 * dtype.itemsize, 16) == 0 for where, dtype in ends) else 1


class PairMove(NamedTuple):
    """Addresses, and strides in bytes, of a target and a source: see `merge_kernels.pairs_kernel`."""

    target: int
    source: int
    target_row: int
    source_row: int
    heads: int
    target_head: int
    source_head: int
    dim: int  # in elements


def pairs_(plan: Plan, add: bool, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each (target, source): one launch for all of the same dtypes."""
    groups: dict[tuple[str, str], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in pairs:
        if target.numel() and source.numel() and plan.count:
            groups.setdefault((DTYPES[target.dtype], DTYPES[source.dtype]), []).append((target, source))
    for dtypes, group in groups.items():
        rows: list[PairMove] = []
        ends: list[tuple[int, torch.dtype]] = []
        elements: list[int] = []
        for target, source in group:
            folded, size, step_size = fold(target, source), target.element_size(), source.element_size()
            (row, step_row), (head, step_head) = (target.stride(0), source.stride(0)), folded.head_strides
            elements += [folded.dim, row, step_row, head, step_head]
            for x, y in folded.offsets:
                to, of = target.data_ptr() + x * size, source.data_ptr() + y * step_size
                ends += [(to, target.dtype), (of, source.dtype)]
                strides = row * size, step_row * step_size, folded.heads, head * size, step_head * step_size
                rows.append(PairMove(to, of, *strides, folded.dim))
        width = _width(ends, elements)
        kernel = pairs_kernel(plan.helper, plan.kind, add, *dtypes, _wide(*dtypes), width)
        table = [number for row in rows for number in (*row, log_lanes(-(-row.dim // width)), 0)]
        assert len(table) == FIELDS * len(rows)
        block = rows_per_block(max(row.heads * row.dim for row in rows) * group[0][0].element_size())
        arguments = tuple(table), plan.numbers, plan.count, block
        launch(kernel, group[0][0].device, -(-plan.count // block), *arguments, layers=len(rows))


def weigh_(
    plan: Plan, final: bool, out: torch.Tensor, step: torch.Tensor, lse: torch.Tensor, lse_step: torch.Tensor
) -> None:
    """`weight_kernels.weigh_kernel`; out and step [t, h, d], d 0 for LSEs alone."""
    heads = lse.shape[-2]
    if not plan.count or not heads or not lse.numel():
        return
    dtypes, width, dim = ("f32", "f32"), 4, 0
    target = source = (0, 0, 0)
    if out.numel():
        dim, dtypes = out.shape[2], (DTYPES[out.dtype], DTYPES[step.dtype])
        elements = [dim, *out.stride()[:2], *step.stride()[:2]]
        width = _width([(out.data_ptr(), out.dtype), (step.data_ptr(), step.dtype)], elements)
        target, source = (
            (x.data_ptr(), x.stride(0) * x.element_size(), x.stride(1) * x.element_size()) for x in (out, step)
        )
    kernel = weigh_kernel(plan.helper, plan.kind, final, *dtypes, DTYPES[lse.dtype], DTYPES[lse_step.dtype], width)
    blocks = -(-plan.count * heads // PIECES)
    target = (*target, heads, dim, log_lanes(-(-dim // width)))
    ends = target, source, _lse_end(lse), _lse_end(lse_step)
    launch(kernel, lse.device, blocks, plan.numbers, plan.count, *ends)


def _lse_end(lse: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Address, strides of sequences, heads and rows in bytes, and the columns of a padded one."""
    size = lse.element_size()
    sequence, columns = (0, 0) if lse.ndim == 2 else (lse.stride(0) * size, lse.shape[-1])
    return lse.data_ptr(), sequence, lse.stride(-2) * size, lse.stride(-1) * size, columns
