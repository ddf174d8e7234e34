"""When accumulators are wide: only where more than two partial results meet, or a sink still scales them."""

from __future__ import annotations

import pytest
import torch

from cp_fast.kernels.select import kernels
from cp_fast.merge import Merged, Summed

CPU, WIDE, HALF = torch.device("cpu"), torch.float32, torch.bfloat16


def parts(count: int) -> list[tuple[torch.Tensor, torch.Tensor, slice]]:
    """Partial results [6, 2, 4] and [2, 6] of all rows, then of rows 2 to 4."""
    generator = torch.Generator().manual_seed(count)
    sizes = [slice(0, 6)] + [slice(2, 5)] * (count - 1)
    return [
        (torch.randn(n, 2, 4, generator=generator).to(HALF), torch.randn(2, n, generator=generator), rows)
        for rows in sizes
        for n in (rows.stop - rows.start,)
    ]


def exact(given: list[tuple[torch.Tensor, torch.Tensor, slice]]) -> torch.Tensor:
    """The merged output in float64."""
    total, weight = torch.zeros(6, 2, 4, dtype=torch.float64), torch.zeros(6, 2, 1, dtype=torch.float64)
    for out, lse, rows in given:
        share = lse.double().exp().t().unsqueeze(-1)
        total[rows] += out.double() * share
        weight[rows] += share
    return total / weight


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("final", [HALF, None])
def test_outputs(count: int, final: torch.dtype | None) -> None:
    given = parts(count)
    want = exact(given)
    merged = Merged((6, 2, 4), WIDE, final, CPU, kernels("cpu"))
    for part in given:
        merged.settle()
        merged.add(*part)
    out, lse = merged.results()
    assert out.dtype == (HALF if count == 1 or (count == 2 and final == HALF) else WIDE)
    assert lse.dtype == WIDE
    torch.testing.assert_close(out.to(HALF), want.to(HALF), rtol=2**-7, atol=0)  # rounded once: at most the neighbour
    assert (out.double() - want).abs().mean() <= 2**-9 * want.abs().mean()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_gradients(count: int) -> None:
    given = parts(max(count, 1))[:count]
    total = Summed((6, 2, 4), WIDE, HALF, CPU, kernels("cpu"))
    want = torch.zeros(6, 2, 4, dtype=torch.float64)
    for part, _, rows in given:
        total.settle()
        want[rows] += part.double()
        total.add(part, rows)
    result = total.result()
    assert result.dtype == (HALF if count in (1, 2) else WIDE)
    assert torch.equal(result.to(HALF), want.to(HALF))


def test_rows_that_nobody_saw() -> None:
    merged = Merged((6, 2, 4), WIDE, HALF, CPU, kernels("cpu"))
    out, lse, _ = parts(2)[1]
    merged.add(out, lse, slice(2, 5))
    got, got_lse = merged.results()
    assert got.dtype == WIDE
    assert torch.equal(got[2:5], out.float())
    assert not got[:2].any()
    assert not got[5:].any()
    assert bool((got_lse[:, :2] == -float("inf")).all())
