"""The THD helpers that put steps together, against loops over single numbers."""

from __future__ import annotations

import math
from itertools import accumulate, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_ref.thd import thd_grad_correction, thd_out_correction, thd_second_half_lse_correction

INF = float("inf")
HALF_LENGTHS = st.lists(st.integers(0, 4), max_size=6)


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def log_add(a: float, b: float) -> float:
    if a == b == -INF:
        return -INF
    return max(a, b) + math.log1p(math.exp(min(a, b) - max(a, b)))


def random_lse(*shape: int, seed: int) -> torch.Tensor:
    """Some rows are empty."""
    generator = torch.Generator().manual_seed(seed)
    lse = 3 * torch.randn(*shape, generator=generator)
    return lse.masked_fill(torch.rand(*shape, generator=generator) < 0.3, -INF)


def place(lengths: list[int], sequence: int, position: int, packed: bool) -> tuple[int | slice, ...]:
    """The index of a token in an LSE of these sequences."""
    return (slice(None), sum(lengths[:sequence]) + position) if packed else (sequence, slice(None), position)


@given(HALF_LENGTHS, st.integers(0, 2), st.booleans(), st.integers(0, 10**6))
def test_lse_of_second_halves(halves: list[int], half_tail: int, packed: bool, seed: int) -> None:
    lengths, heads = [2 * n for n in halves], 2
    if packed:
        lse = random_lse(heads, sum(lengths) + 2 * half_tail, seed=seed)
        step = random_lse(heads, sum(halves) + half_tail, seed=seed + 1)
    else:
        lse = random_lse(len(lengths), heads, max(lengths, default=0) + half_tail, seed=seed)
        step = random_lse(len(lengths), heads, max(halves, default=0) + 2 * half_tail, seed=seed + 1)
    want = lse.clone()
    for s, half in enumerate(halves):
        for i in range(half):
            at = place(lengths, s, half + i, packed)
            pairs = zip(lse[at].tolist(), step[place(halves, s, i, packed)].tolist(), strict=True)
            want[at] = torch.tensor([log_add(a, b) for a, b in pairs])
    thd_second_half_lse_correction(lse, step, cumulative(lengths), packed)
    torch.testing.assert_close(lse, want, rtol=1e-6, atol=1e-6)
    assert not lse.isnan().any()


@given(HALF_LENGTHS, st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_out(halves: list[int], half_tail: int, second: bool, packed: bool, seed: int) -> None:
    """The LSE that is given includes the step's. Rows that the step did not see hold NaN, and so do tails."""
    lengths, heads, d = [2 * n for n in halves], 2, 3
    rows = halves if second else lengths
    tail = half_tail if second else 2 * half_tail
    out = torch.randn(sum(lengths) + 2 * half_tail, heads, d)
    out_step = torch.randn(sum(rows) + tail, heads, d)
    if packed:
        lse = random_lse(heads, sum(lengths) + 2 * half_tail, seed=seed)
        step = random_lse(heads, sum(rows) + tail, seed=seed + 1)
    else:
        lse = random_lse(len(lengths), heads, max(lengths, default=0), seed=seed)
        step = random_lse(len(lengths), heads, max(rows, default=0), seed=seed + 1)
    want = out.clone()
    for s, n in enumerate(rows):
        for i, h in product(range(n), range(heads)):
            position = i + halves[s] * second
            of_lse, of_step = lse[place(lengths, s, position, packed)], step[place(rows, s, i, packed)]
            of_lse[h] = log_add(of_lse[h].item(), of_step[h].item())
            row, step_row = sum(lengths[:s]) + position, sum(rows[:s]) + i
            if of_step[h] == -INF:
                out_step[step_row, h] = float("nan")
            else:
                want[row, h] += out_step[step_row, h] * math.exp(of_step[h].item() - of_lse[h].item())
    out_step[sum(rows) :] = float("nan")
    thd_out_correction(out, out_step, lse, step, cumulative(lengths), second, packed)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


ACTIONS = ("add", "copy", "none")


@pytest.mark.parametrize(("first", "second"), list(product(ACTIONS, ACTIONS)))
@given(halves=HALF_LENGTHS, half_tail=st.integers(0, 2), pair=st.booleans())
def test_grad(first: str, second: str, halves: list[int], half_tail: int, pair: bool) -> None:
    """All nine pairs, one tensor or dK and dV together; the tail of the step is NaN."""
    lengths, idle = [2 * n for n in halves], "none" in (first, second)
    rows, tail = (halves, half_tail) if idle else (lengths, 2 * half_tail)
    lead = (2,) if pair else ()
    grad = torch.randn(*lead, sum(lengths) + 2 * half_tail, 2, 3)
    step = torch.randn(*lead, sum(rows) + tail, 2, 3)
    step[..., sum(rows) :, :, :] = float("nan")
    want = grad.clone()
    for s, length in enumerate(lengths):
        for i in range(length):
            late = i >= length // 2
            action = second if late else first
            row = sum(lengths[:s]) + i
            value = step[..., sum(rows[:s]) + i - (halves[s] if idle and late else 0), :, :] if action != "none" else 0
            if action == "copy":
                want[..., row, :, :] = value
            else:
                want[..., row, :, :] += value
    thd_grad_correction(grad, step, cumulative(lengths, torch.int64), first, second)
    assert torch.equal(grad, want)


def test_the_first_touch_needs_no_zeroing() -> None:
    grad = torch.full((4, 1, 1), float("nan"))
    thd_grad_correction(grad, torch.ones(2, 1, 1), cumulative([4]), "none", "copy")
    thd_grad_correction(grad, torch.ones(4, 1, 1), cumulative([4]), "copy", "add")
    assert grad.flatten().tolist() == [1, 1, 2, 2]


def test_nothing_of_nothing_is_nothing() -> None:
    """Two empty results: LSE -inf, output 0; and -inf with a number is the number."""
    lse, lengths = torch.tensor([[-INF, -INF, -INF, 2.0]]), cumulative([4])
    thd_second_half_lse_correction(lse, torch.tensor([[-INF, -INF]]), lengths, True)
    assert lse.tolist() == [[-INF, -INF, -INF, 2.0]]
    thd_second_half_lse_correction(lse, torch.tensor([[1.5, -INF]]), lengths, True)
    assert lse.tolist() == [[-INF, -INF, 1.5, 2.0]]
    out = torch.zeros(4, 1, 2)
    step = torch.full((4, 1, 2), float("nan"))
    thd_out_correction(out, step, lse, torch.full((1, 4), -INF), lengths, False, True)
    assert out.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("step_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_rounding(dtype: torch.dtype, step_dtype: torch.dtype) -> None:
    """Computed in float32 or wider, whatever the operands; rounded once."""
    lengths, wide = cumulative([6, 4]), torch.float64
    out, step = torch.randn(10, 2, 4).to(dtype), torch.randn(10, 2, 4).to(step_dtype)
    lse_step = torch.randn(2, 10)
    lse = torch.logaddexp(lse_step, torch.randn(2, 10))
    exact = out.to(wide) + step.to(wide) * (lse_step.to(wide) - lse.to(wide)).exp().t()[..., None]
    grad_exact = out.to(wide) + step.to(wide)
    grad = out.clone()
    thd_out_correction(out, step, lse, lse_step, lengths, False, True)
    thd_grad_correction(grad, step, lengths, "add", "add")
    assert out.dtype == grad.dtype == dtype
    half_an_ulp = 0.5001 * torch.finfo(dtype).eps
    arithmetic = 1e-14 if wide in (dtype, step_dtype) else 2e-6
    torch.testing.assert_close(out.to(wide), exact, rtol=half_an_ulp, atol=arithmetic)
    torch.testing.assert_close(grad.to(wide), grad_exact, rtol=half_an_ulp, atol=arithmetic)


def test_thousands_of_sequences() -> None:
    lengths = [2 * (n % 3) for n in range(5000)]
    cu, total = cumulative(lengths), sum(lengths)
    out, lse = torch.zeros(total, 1, 2), torch.zeros(1, total)
    for packed, step in ((True, torch.zeros(1, total // 2)), (False, torch.zeros(5000, 1, 2))):
        whole = lse.clone() if packed else torch.zeros(5000, 1, 4)
        thd_second_half_lse_correction(whole, step, cu, packed)
        thd_out_correction(out, torch.ones(total // 2, 1, 2), whole, step, cu, True, packed)
    late = torch.tensor([i >= n // 2 for n in lengths for i in range(n)])
    torch.testing.assert_close(out, late.float()[:, None, None].expand_as(out))
