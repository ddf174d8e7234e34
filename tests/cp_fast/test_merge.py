"""When totals are wide: only where more than two partial results meet, or a sink still scales them."""

from __future__ import annotations

import pytest
import torch
from cp_fast.merge import Part, Total, TotalShape
from hypothesis import given
from hypothesis import strategies as st

from cp_fast.kernels.select import kernels
from cp_fast.kernels.torch_merges import log_add_exp

CPU, WIDE, HALF = torch.device("cpu"), torch.float32, torch.bfloat16
HEADS = slice(0, 2)


def shape_of(final: torch.dtype | None, *, outs: bool, spare: int = 0) -> TotalShape:
    return TotalShape(6, ((2, 4),), WIDE, final, CPU, outs, spare)


def total(final: torch.dtype | None, *, outs: bool, spare: int = 0) -> Total:
    return Total(shape_of(final, outs=outs, spare=spare), kernels("cpu"))


def parts(count: int, *, outs: bool) -> list[Part]:
    """Partial results of all rows, then of rows 2 to 4."""
    generator = torch.Generator().manual_seed(count)
    found: list[Part] = []
    for into in [slice(0, 6)] + [slice(2, 5)] * (count - 1):
        n = into.stop - into.start
        rows = torch.randn(n, 2, 4, generator=generator).to(HALF)
        lse = torch.randn(2, n, generator=generator) if outs else None
        found.append(Part((rows,), lse, shape_of(None, outs=outs).place(into, HEADS)))
    return found


def merged_exactly(given: list[Part]) -> torch.Tensor:
    """The merged output in float64."""
    total, weight = torch.zeros(6, 2, 4, dtype=torch.float64), torch.zeros(6, 2, 1, dtype=torch.float64)
    for part in given:
        assert part.lse is not None
        share = part.lse.double().exp().t().unsqueeze(-1)
        total[part.place.into, part.place.heads] += part.rows[0].double() * share
        weight[part.place.into, part.place.heads] += share
    return total / weight


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("final", [HALF, None])
def test_outputs(count: int, final: torch.dtype | None) -> None:
    given = parts(count, outs=True)
    want = merged_exactly(given)
    found = total(final, outs=True)
    for part in given:
        found.settle()
        found.add(part)
    (out,), lse, *_ = found.finish()
    assert out.dtype == (HALF if count == 1 or (count == 2 and final == HALF) else WIDE)
    assert lse is not None
    assert lse.dtype == WIDE
    torch.testing.assert_close(out.to(HALF), want.to(HALF), rtol=2**-7, atol=0)  # rounded once: at most the neighbour
    assert (out.double() - want).abs().mean() <= 2**-9 * want.abs().mean()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_gradients(count: int) -> None:
    given = parts(max(count, 1), outs=False)[:count]
    found = total(HALF, outs=False)
    want = torch.zeros(6, 2, 4, dtype=torch.float64)
    for part in given:
        found.settle()
        want[part.place.into] += part.rows[0].double()
        found.add(part)
    (result,), lse, *_ = found.finish()
    assert lse is None
    assert result.dtype == (HALF if count in (1, 2) else WIDE)
    assert torch.equal(result.to(HALF), want.to(HALF))


def test_rows_that_nobody_saw() -> None:
    found = total(HALF, outs=True)
    part = parts(2, outs=True)[1]
    found.add(part)
    (got,), lse, *_ = found.finish()
    assert torch.equal(got[2:5], part.rows[0].to(got.dtype))
    assert not got[:2].any()
    assert not got[5:].any()
    assert lse is not None
    assert part.lse is not None
    assert torch.equal(lse[:, 2:5], part.lse)
    assert bool((lse[:, [0, 1, 5]] == -float("inf")).all())


def test_heads_that_nobody_saw() -> None:
    """Parts of some heads are no whole parts: nothing of theirs is taken for the other heads."""
    found = total(HALF, outs=True)
    (whole,) = parts(1, outs=True)
    assert whole.lse is not None
    some = shape_of(HALF, outs=True).place(slice(0, 6), slice(1, 2))
    found.add(Part((whole.rows[0][:, 1:],), whole.lse[1:], some))
    (got,), lse, *_ = found.finish()
    assert got.shape == (6, 2, 4)
    assert torch.equal(got[:, 1:], whole.rows[0][:, 1:].to(got.dtype))
    assert not got[:, :1].any()
    assert lse is not None
    assert bool((lse[:1] == -float("inf")).all())


def test_the_spare_row_is_never_part_of_the_result() -> None:
    found = total(WIDE, outs=False, spare=1)
    rows = torch.ones(8, 2, 4)
    into = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6], dtype=torch.int32)
    found.add(Part((rows,), None, shape_of(WIDE, outs=False, spare=1).place(into, HEADS)))
    (got,), *_ = found.finish()
    assert torch.equal(got, torch.ones(6, 2, 4))


def test_wide_rows_of_messages_are_what_a_total_begins_with() -> None:
    """Of several whole parts that wait, a wide one is kept as it is, so that nothing is widened."""
    narrow, wide = torch.ones(6, 2, 4, dtype=HALF), torch.full((6, 2, 4), 2.0, dtype=WIDE)
    found = total(HALF, outs=False)
    for rows in (narrow, wide):
        found.add(Part((rows,), None, shape_of(HALF, outs=False).place(slice(0, 6), HEADS)))
    found.settle()
    (got,), *_ = found.finish()
    assert got.data_ptr() == wide.data_ptr()
    assert torch.equal(got, torch.full((6, 2, 4), 3.0))


@st.composite
def some_parts(draw: st.DrawFn) -> list[tuple[list[int], tuple[int, int], bool]]:
    """Distinct rows, heads, and whether the total is settled before: partial results in any order."""
    rows = st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True)
    rows = st.one_of(rows, st.just([0, 1, 2, 3, 4, 5]))
    return draw(st.lists(st.tuples(rows, st.sampled_from([(0, 2), (0, 1), (1, 2)]), st.booleans()), max_size=5))


@given(some_parts(), st.booleans(), st.integers(0, 2**16))
def test_any_parts_in_float64(drawn: list[tuple[list[int], tuple[int, int], bool]], outs: bool, seed: int) -> None:
    """Whatever rows and heads the parts have, and whenever they are settled, the total is what the formula says."""
    generator = torch.Generator().manual_seed(seed)
    shape = TotalShape(6, ((2, 3), (2, 1))[: 1 if outs else 2], torch.float64, torch.float64, CPU, outs)
    found = Total(shape, kernels("cpu"))
    want = [torch.zeros(6, *behind, dtype=torch.float64) for behind in shape.behind]
    weight = torch.zeros(6, 2, dtype=torch.float64)
    for rows, heads, settled in drawn:
        if settled:
            found.settle()
        count, where = heads[1] - heads[0], slice(*heads)
        tensors = [torch.randn(len(rows), count, d, generator=generator, dtype=torch.float64) for _, d in shape.behind]
        lse = torch.randn(count, len(rows), generator=generator, dtype=torch.float64) if outs else None
        share = torch.ones(len(rows), count, dtype=torch.float64) if lse is None else lse.exp().t()
        for into, x in zip(want, tensors, strict=True):
            into[rows, where] += x * share[..., None]
        weight[rows, where] += share
        contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
        into = slice(rows[0], rows[0] + len(rows)) if contiguous else torch.tensor(rows, dtype=torch.int32)
        found.add(Part(tuple(x.clone() for x in tensors), lse, shape.place(into, where)))
    got = found.finish()
    if outs:
        want = [torch.where(weight[..., None] > 0, x / weight[..., None], 0.0) for x in want]
        assert got.lse is not None
        torch.testing.assert_close(got.lse, weight.log().t())
    for mine, theirs in zip(got.rows, want, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_of_two_exponentials_has_the_same_bits_wherever_it_stands(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 200, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 3
    whole = log_add_exp(a, b)
    torch.testing.assert_close(whole, torch.logaddexp(a, b))
    for stop in range(1, 200):
        assert torch.equal(log_add_exp(a[:stop], b[:stop]), whole[:stop])
