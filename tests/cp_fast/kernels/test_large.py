"""Movers of more than a cache holds: the CPU's kernels store past the caches there, in whole lines."""

from __future__ import annotations

import pytest
import torch

from cp_fast.movers.select_movers import why_not
from tests.cp_fast.kernels.checks.case import Boxed, bytes_of
from tests.cp_fast.kernels.checks.suite import CHECKS, Case, Where

MOVERS = ("reorders", "partitions", "halves", "valid_tokens", "rows_and_heads")
REAL = (3000, 1, 0, 9, 500)
# row shapes and gaps: pieces of 400 bytes at odd addresses, of 600 bytes, of whole lines, of rows of 12 KiB
ROWS = [
    ((3, 200), (24, 7), 3, torch.bfloat16),
    ((5, 300), (0, 0), 1, torch.bfloat16),
    ((8, 64), (0, 0), 32, torch.float32),
    ((6, 1024), (0, 2), 1, torch.bfloat16),
]


@pytest.fixture
def where() -> Where:
    if (reason := why_not("native", "cpu")) is not None:
        pytest.skip(f"needs the kernels 'native': {reason}")
    return Where("native", "cpu")


@pytest.mark.parametrize(
    ("shape", "gaps", "offset", "dtype"),
    [pytest.param(*row, marks=pytest.mark.thorough if n else ()) for n, row in enumerate(ROWS)],
)
@pytest.mark.parametrize("check", MOVERS)
def test_movers(
    where: Where, check: str, shape: tuple[int, ...], gaps: tuple[int, int], offset: int, dtype: torch.dtype
) -> None:
    CHECKS[check](where, Case(2, (900, 1, 0, 3, 130), REAL, 2, shape, (dtype, dtype), torch.int32, gaps, offset, 5))


@pytest.mark.parametrize(("dim", "offset"), [(128, 0), (200, 1)])
@pytest.mark.parametrize("gaps", [(0, 0), (40, 8)])
def test_heads(where: Where, dim: int, offset: int, gaps: tuple[int, int]) -> None:
    """To the front and back again, in pieces of one head or of two."""
    rows = torch.randperm(1500, generator=torch.Generator().manual_seed(0))[:1200]
    whole, parts = torch.randn(1500, 8, dim), torch.randn(4, 1200, 2, dim)
    firsts = [4, 0, 6, 2]
    box, source = Boxed.of(whole, "cpu", gaps, offset), Boxed.of(parts, "cpu", (0, *gaps), offset)
    want = torch.stack([whole[rows, n : n + 2] for n in firsts])
    assert torch.equal(bytes_of(where.kernels.gather_heads([box.view], rows, firsts, [2])[0]), bytes_of(want))
    where.kernels.scatter_heads_([box.view], [source.view], rows, firsts)
    for part, n in zip(parts, firsts, strict=True):
        whole[rows, n : n + 2] = part
    box.assert_holds(whole)
    source.assert_holds(parts)
