"""What every implementation of the kernels has to do, for the CPU, the simulator and the GPU alike.

Each check takes a `Where` and a drawn `Case`; `CHECKS` has them all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

import cp_fast
import cp_ref
from cp_fast.movers import RowRule
from tests.cp_fast.kernels.checks.case import Case, Where, cases
from tests.cp_fast.kernels.checks.checks_of_movers import (
    half_lses,
    halves,
    indices_and_lengths,
    padding,
    partitions,
    reorders,
    rows_and_heads,
    valid_tokens,
)
from tests.cp_fast.kernels.checks.checks_of_sums import (
    additions,
    grad_corrections,
    lse_corrections,
    merges,
    out_corrections,
)
from tests.cp_fast.kernels.checks.memory import Boxed, assert_same_bits

__all__ = [
    "CHECKS",
    "MERGED_SHAPES",
    "ROW_SIZES",
    "Case",
    "Where",
    "cases",
    "many_sequences",
    "merged_shapes",
    "row_sizes",
]

CHECKS: dict[str, Callable[[Where, Case], None]] = {
    check.__name__: check
    for check in (
        indices_and_lengths,
        reorders,
        partitions,
        halves,
        half_lses,
        valid_tokens,
        padding,
        lse_corrections,
        out_corrections,
        grad_corrections,
        merges,
        additions,
        rows_and_heads,
    )
}

MERGED_SHAPES = ((1, 128), (3, 128), (9, 64), (5, 32), (2, 192), (7, 96), (1, 256), (2, 264), (6, 16))  # heads, dim
ROW_SIZES = (1, 2, 3, 6, 14, 16, 18, 34, 62, 64, 96, 128, 250, 256, 768, 2046, 2048, 4098, 8190, 8192)


def row_sizes(where: Where, size: int) -> None:
    """Rows of any number of bytes, behind an odd offset or an even one."""
    cu = torch.tensor([0, 8, 8, 20, 24])
    for offset in (0, 1, 16):
        x = torch.randint(0, 255, (26, size), dtype=torch.uint8)
        view = Boxed.of(x, where.device, (), offset).view
        lengths = cu.to(where.device)
        got = where.kernels.gather([view], RowRule("reorder", "rank_order", lengths, a=2))[0]
        assert_same_bits(got, cp_ref.thd.thd_sequence_order_to_cp_rank_order(x, cu, 2))
        assert_same_bits(where.kernels.gather([got], RowRule("reorder", "sequence_order", lengths, a=2))[0], x)
        box, index = Boxed.of(x, where.device, (offset,), offset), torch.arange(24, 0, -2)
        want = x.index_copy(0, index, x[:12])
        where.kernels.scatter_([box.view], [view[:12]], index.to(where.device))
        box.assert_holds(want)


def merged_shapes(where: Where, heads: int, dim: int) -> None:
    """Heads and dims of models, that kernels may take by vectors or whole rows; all dtypes of the step."""
    for seed in (*range(12), 16, 25):
        gaps = ((0, 0), (16, 0), (8, 4))[(seed + seed // 3) % 3]  # rows apart, and then heads apart as well
        chunks, dtypes = (2, 0, 3), (torch.float32, torch.float32)
        case = Case(2, chunks, (8, 0, 5), seed % 2, (heads, dim), dtypes, torch.int32, gaps, seed // 6 * 16, seed)
        for check in (merges, out_corrections):
            check(where, case)


def many_sequences(where: Where, count: int) -> None:
    cu = torch.tensor([0, *accumulate(8 * (n % 3) for n in range(count))], dtype=torch.int32)
    total = int(cu[-1]) + 8
    x, lengths = torch.arange(total), cu.to(where.device)
    with where.use():
        got = cp_fast.thd.thd_sequence_order_to_cp_rank_order(x.to(where.device), lengths, 4)
        indices = cp_fast.thd.thd_get_partitioned_indices(lengths, total, 4, 1)
        back = cp_fast.thd.thd_cp_rank_order_to_sequence_order(got, lengths, 4)
        late = cp_fast.thd.thd_read_half_tensor(indices, lengths // 4, 1)
    want = cp_ref.thd.thd_sequence_order_to_cp_rank_order(x, cu, 4)
    assert torch.equal(got.cpu(), want)
    assert torch.equal(indices.cpu().long(), want.view(4, -1)[1])
    assert torch.equal(back.cpu(), x)
    assert torch.equal(late.cpu(), cp_ref.thd.thd_read_half_tensor(indices.cpu(), cu // 4, 1))
