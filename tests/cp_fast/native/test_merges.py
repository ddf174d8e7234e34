"""The native CPU arithmetic: against `cp_ref.thd` and the definition in float64, within rounding; padding holds NaN."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_ref.thd import thd_grad_correction, thd_out_correction, thd_second_half_lse_correction
from tests.cp_fast.native.buffers import (
    FLOATS,
    LENGTH_DTYPES,
    Guarded,
    as_index,
    cumulative,
    guarded,
    helpers,
    native,
    packed,
    row_sets,
)
from tests.marks import needs_cxx

pytestmark = needs_cxx

WIDE = [torch.float32, torch.float64]
INFINITY = float("inf")


def assert_close(got: torch.Tensor, expected: torch.Tensor, units: int = 8) -> None:
    """Within a few units in the last place of got's dtype, of numbers of about 1; both NaN, or neither."""
    bound = units * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), expected.double(), rtol=bound, atol=bound, equal_nan=True)


def some_empty(data: st.DataObject, lse: torch.Tensor, out: torch.Tensor | None) -> None:
    """Some rows have seen nothing, and their outputs are NaN. lse [..., h, t]; out [t, h, d] if packed."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    empty = torch.rand(lse.shape, generator=generator) < 0.3
    lse[empty] = -INFINITY
    if out is not None and lse.ndim == 2:
        out[empty.T] = float("nan")


def merged(
    out: torch.Tensor, lse: torch.Tensor, step: torch.Tensor, step_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float64; out [n, h, d], lse [n, h]."""
    out, lse, step, step_lse = out.double(), lse.double(), step.double(), step_lse.double()
    new = torch.logaddexp(lse, step_lse)
    kept = (torch.exp(lse - new)[..., None] * out).masked_fill((lse == -INFINITY)[..., None], 0.0)
    added = (torch.exp(step_lse - new)[..., None] * step).masked_fill((step_lse == -INFINITY)[..., None], 0.0)
    return kept + added, new


@given(st.data())
def test_merge(data: st.DataObject) -> None:
    tokens, heads, dim = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 3)), data.draw(st.integers(0, 33))
    rows = data.draw(row_sets(tokens))
    index = as_index(rows, tokens)
    out = data.draw(guarded((tokens, heads, dim), WIDE, numbers=True))
    lse = data.draw(guarded((heads, tokens), WIDE, numbers=True))
    step = data.draw(guarded((len(index), heads, dim), FLOATS, numbers=True))
    step_lse = data.draw(guarded((heads, len(index)), WIDE, numbers=True))
    some_empty(data, lse.x, out.x)
    some_empty(data, step_lse.x, step.x)
    expected, new = merged(out.x[index], lse.x.T[index], step.x, step_lse.x.T)
    untouched = [i for i in range(tokens) if i not in index.tolist()]
    before = out.x[untouched].clone(), lse.x.T[untouched].clone()
    native().merge_(out.x, lse.x, step.x, step_lse.x, rows)
    assert_close(out.x[index], expected, 32 if torch.float64 in (out.x.dtype, lse.x.dtype) else 8)
    assert_close(lse.x.T[index], new)
    torch.testing.assert_close(out.x[untouched], before[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(lse.x.T[untouched], before[1], rtol=0, atol=0)


def test_a_share_that_vanishes_keeps_nan() -> None:
    """An accumulator that holds NaN although it has seen something stays NaN: nothing is hidden."""
    out, lse = torch.full((1, 1, 4), float("nan")), torch.tensor([[-1000.0]])
    native().merge_(out, lse, torch.ones(1, 1, 4), torch.tensor([[1000.0]]), slice(0, 1))
    assert out.isnan().all()


def two_shapes(data: st.DataObject, shape: tuple[int, int], sizes: list[int], packs: bool) -> Guarded:
    """An LSE [h, t] or [b, h, s] of ordinary numbers, some -inf."""
    heads, tokens = shape
    longest = max(sizes, default=0) + data.draw(st.integers(0, 2))
    lse = data.draw(guarded((heads, tokens) if packs else (len(sizes), heads, longest), WIDE, numbers=True))
    some_empty(data, lse.x, None)
    return lse


def accepted(lse: torch.Tensor, sizes: list[int], packs: bool) -> torch.Tensor:
    """[t, h] of the sequences' rows, in float64."""
    if packs:
        return lse.T[: sum(sizes)].double()
    rows = [lse[i, :, :size].T for i, size in enumerate(sizes)]
    return torch.cat([*rows, lse.new_empty(0, lse.shape[1])]).double()


@given(st.data())
def test_add_rows(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(0, 9))
    rows = data.draw(row_sets(tokens))
    index = as_index(rows, tokens)
    shapes = [data.draw(st.sampled_from([(), (5,), (2, 3), (2, 2, 3)])) for _ in range(data.draw(st.integers(1, 2)))]
    outs = [data.draw(guarded((tokens, *shape), FLOATS, numbers=True)) for shape in shapes]
    xs = [data.draw(guarded((len(index), *shape), FLOATS, numbers=True)) for shape in shapes]
    expected = []
    for out, x in zip(outs, xs, strict=True):
        wide = torch.float64 if torch.float64 in (out.x.dtype, x.x.dtype) else torch.float32
        expected.append((out.x[index].to(wide) + x.x.to(wide)).to(out.x.dtype))
    native().scatter_([out.x for out in outs], [x.x for x in xs], rows, add=True)
    for out, sums in zip(outs, expected, strict=True):
        assert torch.equal(out.x[index], sums)
        out.check(index)


@given(st.data())
def test_lse_correction(data: st.DataObject) -> None:
    sizes, tail = data.draw(packed(2, 2))
    heads, packs, lengths = (
        data.draw(st.integers(1, 3)),
        data.draw(st.booleans()),
        cumulative(sizes, data.draw(LENGTH_DTYPES)),
    )
    tokens = sum(sizes) + tail
    lse = two_shapes(data, (heads, tokens), sizes, packs)
    step = two_shapes(data, (heads, tokens // 2), [n // 2 for n in sizes], packs)
    expected, before = lse.x.clone(), lse.x.clone()
    thd_second_half_lse_correction(expected, step.x, lengths, packs)
    helpers().lse_correction_(lse.x, step.x, lengths, packs)
    assert_close(lse.x, expected)
    untouched = expected == before
    assert torch.equal(lse.x[untouched], before[untouched])


@given(st.data())
def test_out_correction(data: st.DataObject) -> None:
    sizes, tail = data.draw(packed(2, 2))
    heads, dim, packs, half = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(0, 9)),
        data.draw(st.booleans()),
        data.draw(st.booleans()),
    )
    tokens, lengths, divisor = sum(sizes) + tail, cumulative(sizes, data.draw(LENGTH_DTYPES)), 2 if half else 1
    out = data.draw(guarded((tokens, heads, dim), FLOATS, numbers=True))
    step = data.draw(guarded((tokens // divisor, heads, dim), FLOATS, numbers=True))
    final = two_shapes(data, (heads, tokens), sizes, packs)
    final.x[final.x == -INFINITY] = 3.0  # what all steps together have seen is not nothing
    part = two_shapes(data, (heads, tokens // divisor), [n // divisor for n in sizes], packs)
    expected = out.x.clone()
    thd_out_correction(expected, step.x, final.x, part.x, lengths, half, packs)
    helpers().out_correction_(out.x, step.x, final.x, part.x, lengths, half, packs)
    scale = torch.tensor(1.0 if not out.x.numel() else max(1.0, float(expected.abs().max())))
    assert_close(out.x / scale.to(out.x.dtype), expected / scale.to(out.x.dtype))


@given(st.data())
def test_grad_correction(data: st.DataObject) -> None:
    sizes, tail = data.draw(packed(2, 2))
    first, second = (data.draw(st.sampled_from(["add", "copy", "none"])) for _ in range(2))
    idle = (first, second).count("none")
    tokens = sum(sizes) + tail
    shape = data.draw(st.sampled_from([(0,), (0, 5), (0, 2, 3), (2, 0, 2, 3)]))
    axis = 1 if len(shape) == 4 else 0
    step_tokens = tokens // 2 if idle == 1 or (idle == 2 and data.draw(st.booleans())) else tokens

    def of(count: int) -> tuple[int, ...]:
        return tuple(count if i == axis else size for i, size in enumerate(shape))

    grad = data.draw(guarded(of(tokens), FLOATS, numbers=True))
    step = data.draw(guarded(of(step_tokens), FLOATS, numbers=True))
    expected = grad.x.clone()
    lengths = cumulative(sizes, data.draw(LENGTH_DTYPES))
    thd_grad_correction(expected, step.x, lengths, first, second)
    helpers().grad_correction_(grad.x, step.x, lengths, first, second)
    assert torch.equal(grad.x, expected)


def test_halves_of_16_bits_convert_like_pytorch() -> None:
    """Every float16 and bfloat16 there is to float32 and back, and floats around every rounding boundary."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    lengths, real = cumulative([2**16]), cumulative([2**16])
    for dtype in (torch.float16, torch.bfloat16):
        numbers = every.view(dtype)
        wide = torch.empty(2**16)
        helpers().copy_valid_(wide, numbers, lengths, real)
        torch.testing.assert_close(wide, numbers.float(), rtol=0, atol=0, equal_nan=True)
        around = torch.cat([torch.nextafter(wide, wide.new_tensor(side)) for side in (-INFINITY, INFINITY)] + [wide])
        ties = (wide.double() + torch.nextafter(numbers, numbers.new_tensor(INFINITY)).double()) / 2
        values = torch.cat([around, ties.float(), torch.tensor([65519.0, 65520.0, 65536.0, 3.4e38, 1e-8, -1e-8])])
        narrow = torch.empty(len(values), dtype=dtype)
        lengths_of_values = cumulative([len(values)])
        helpers().copy_valid_(narrow, values, lengths_of_values, lengths_of_values)
        torch.testing.assert_close(narrow, values.to(dtype), rtol=0, atol=0, equal_nan=True)
