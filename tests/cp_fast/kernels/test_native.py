"""What tests of the native CPU kernels share: the kernels, the helpers by them, lengths, and comparing bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch

from cp_fast.movers.mover_protocol import RowRule
from cp_fast.movers.native_movers import NativeMovers, load
from cp_fast.movers.select_movers import use
from cp_ref.thd import thd_cp_rank_order_to_sequence_order, thd_get_partitioned_indices, thd_read_half_tensor
from tests.cp_fast.kernels.checks.case import Boxed, bytes_of
from tests.cp_fast.kernels.checks.suite import CHECKS, Case, Where, merged_shapes
from tests.marks import needs_cxx


def native() -> NativeMovers:
    return load("cpu")


class _Helpers:
    """The operators of the THD helpers, by the native kernels."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with use("native"):
                return getattr(torch.ops.cp_attention, name)(*arguments)

        return call


def helpers() -> _Helpers:
    return _Helpers()


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of every row, [t, bytes]: two NaN with the same bits are equal here."""
    return x.contiguous().view(torch.uint8).reshape(len(x), -1) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


pytestmark = needs_cxx


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_any_number_of_threads_gives_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [8 * int(n) for n in torch.randint(0, 60, (40,), generator=generator)]
    tokens, heads, dim = sum(sizes) + 16, 4, 32
    lengths = cumulative(sizes)
    x = torch.randn(tokens, heads, dim, generator=generator)
    index = torch.randperm(tokens, generator=generator)
    lse, step_lse = torch.randn(2, heads, tokens, generator=generator)

    def everything() -> list[torch.Tensor]:
        kernels, packed = native(), helpers()
        out, merged_lse = x.clone(), lse.clone()
        kernels.merge_(out, merged_lse, x.bfloat16(), step_lse, index)
        sums, grads, corrected = x.clone(), x.clone(), x.clone()
        kernels.scatter_([sums], [x.half()], index, add=True)
        packed.grad_correction_(grads, x.double(), lengths, "copy", "add")
        packed.out_correction_(corrected, x, lse, step_lse, lengths, False, True)
        fronts = kernels.gather_heads([x, x], index, [0, 1, 2, 3, 3, 2, 1, 0], [1, 1])
        backs = [torch.zeros_like(x), torch.zeros_like(x)]
        kernels.scatter_heads_(backs, fronts, index, [0, 1, 2, 3] * 2)
        return [
            out, merged_lse, sums, grads, corrected, *fronts, *backs,
            packed.partition_indices(lengths, tokens, 4, 1),
            packed.read_second_half_lse(lse, lengths, True, tokens),
            packed.pad_sequences(index, lengths, lengths, tokens, -1),
            *packed.reorder([x, x.half()], lengths, 4, True),
            *packed.reorder([x], lengths, 4, False),
            *kernels.gather([x], index),
        ]  # fmt: skip

    torch.set_num_threads(1)
    expected = everything()
    for count in (2, 3, 5):
        torch.set_num_threads(count)
        for got, wanted in zip(everything(), expected, strict=True):
            assert equal_bits(got, wanted)


def test_a_hundred_thousand_sequences() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = (4 * torch.randint(0, 4, (100_000,), generator=generator)).tolist()
    lengths, tokens = cumulative(sizes), sum(sizes) + 6
    x = torch.randn(tokens, 2, generator=generator)
    indices = helpers().partition_indices(lengths, tokens, 2, 1)
    assert torch.equal(indices, thd_get_partitioned_indices(lengths, tokens, 2, 1))
    assert torch.equal(helpers().partition([x], lengths, 2, 1)[0], x[indices.long()])
    (there,) = helpers().reorder([x], lengths, 2, True)
    assert torch.equal(thd_cp_rank_order_to_sequence_order(there, lengths, 2), x)
    assert torch.equal(helpers().reorder([there], lengths, 2, False)[0], x)
    assert torch.equal(helpers().read_half([x], lengths, 1)[0], thd_read_half_tensor(x, lengths, 1))


def test_keys_and_values_in_one_tensor() -> None:
    """[2, t, h, d] with gaps on every axis: more strided axes than a move has."""
    both = torch.randn(2, 12, 5, 9)[:, :, :4, :8].movedim(1, 0)
    lengths = cumulative([8, 4])
    expected = thd_read_half_tensor(both.movedim(0, 1), lengths, 1).movedim(1, 0)
    assert torch.equal(native().gather([both], RowRule("rows", "half", lengths, a=1))[0], expected)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("inner", [(), (1,), (3, 2)])
def test_heads_of_any_shape_and_dtypes_without_order(dtype: torch.dtype, inner: tuple[int, ...]) -> None:
    x, rows = torch.randn(7, 6, *inner, dtype=dtype), torch.tensor([5, 0, 3])
    (front,) = native().gather_heads([x], rows, [4, 0], [2])
    assert torch.equal(front, torch.stack([x[rows][:, 4:], x[rows][:, :2]]))
    out, want = torch.zeros_like(x), torch.zeros_like(x)
    native().scatter_heads_([out], [front], rows, [4, 0])
    want[rows, 4:], want[rows, :2] = x[rows, 4:], x[rows, :2]
    assert torch.equal(out, want)
    assert torch.equal(native().gather([x], rows)[0], x[rows])


@pytest.mark.parametrize("dim", [1, 33])
def test_merges_of_dims_that_no_vector_divides(dim: int) -> None:
    merged_shapes(Where("native", "cpu"), 3, dim)
    for wide in (torch.float32, torch.float64):
        x, step = torch.randn(5, dim, dtype=wide), torch.randn(5, dim).bfloat16()
        out = x.clone()
        native().scatter_([out], [step], slice(0, 5), add=True)
        assert torch.equal(out, x + step.to(wide))


def test_ids_with_a_stride_are_padded() -> None:
    ids, real = torch.arange(24)[::3], torch.tensor([0, 3, 8])
    got = helpers().pad_sequences(ids, real, torch.tensor([0, 4, 12]), 13, -1)
    assert got.tolist() == [0, 3, 6, -1, 9, 12, 15, 18, 21, -1, -1, -1, -1]


def test_a_share_that_vanishes_keeps_nan() -> None:
    """An accumulator that holds NaN although it has seen something stays NaN: nothing is hidden."""
    out, lse = torch.full((1, 1, 4), float("nan")), torch.tensor([[-1000.0]])
    native().merge_(out, lse, torch.ones(1, 1, 4), torch.tensor([[1000.0]]), slice(0, 1))
    assert out.isnan().all()


def test_halves_of_16_bits_convert_like_pytorch() -> None:
    """Every float16 and bfloat16 there is to float32 and back, and floats around every rounding boundary."""
    every, infinity = torch.arange(2**16, dtype=torch.int32).to(torch.int16), float("inf")
    lengths, real = cumulative([2**16]), cumulative([2**16])
    for dtype in (torch.float16, torch.bfloat16):
        numbers = every.view(dtype)
        wide = torch.empty(2**16)
        helpers().copy_valid_(wide, numbers, lengths, real)
        torch.testing.assert_close(wide, numbers.float(), rtol=0, atol=0, equal_nan=True)
        around = torch.cat([torch.nextafter(wide, wide.new_tensor(side)) for side in (-infinity, infinity)] + [wide])
        ties = (wide.double() + torch.nextafter(numbers, numbers.new_tensor(infinity)).double()) / 2
        values = torch.cat([around, ties.float(), torch.tensor([65519.0, 65520.0, 65536.0, 3.4e38, 1e-8, -1e-8])])
        narrow = torch.empty(len(values), dtype=dtype)
        lengths_of_values = cumulative([len(values)])
        helpers().copy_valid_(narrow, values, lengths_of_values, lengths_of_values)
        torch.testing.assert_close(narrow, values.to(dtype), rtol=0, atol=0, equal_nan=True)


ROW = 2**20
ROWS = 2**11 + 6  # past 2^31 elements; of this memory only the rows that are used exist


def test_movers_past_two_to_the_31() -> None:
    huge = torch.empty(ROWS, ROW, dtype=torch.uint8)
    last = torch.randint(0, 256, (2, ROW), dtype=torch.uint8)
    index = torch.tensor([ROWS - 1, ROWS - 3])
    native().scatter_([huge], [last], index)
    assert torch.equal(huge[ROWS - 1], last[0])
    assert torch.equal(native().gather([huge], index)[0], last)
    out = torch.empty(ROWS, ROW, dtype=torch.uint8)
    lengths, real = torch.tensor([ROWS - 4, ROWS - 2, ROWS]), torch.tensor([0, 2, 4])
    huge[ROWS - 4 :: 2] = 7
    helpers().copy_valid_(out, huge, lengths, real)
    assert torch.equal(out[ROWS - 4 :], huge[ROWS - 4 :])


def test_arithmetic_past_two_to_the_31() -> None:
    huge = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    step = huge.as_strided((2, 1, 8), (2**31, 8, 1))  # two rows, far from each other
    step.copy_(torch.arange(16).view(2, 1, 8))
    out, lse = torch.zeros(2, 1, 8), torch.full((1, 2), -float("inf"))
    native().merge_(out, lse, step, torch.zeros(1, 2), slice(0, 2))
    assert torch.equal(out, step.float())
    native().scatter_([out], [step], slice(0, 2), add=True)
    assert torch.equal(out, 2 * step.float())
    (front,) = native().gather_heads([step], slice(0, 2), [0], [1])
    assert torch.equal(front[0], step)


def test_lengths_past_two_to_the_31() -> None:
    """Row numbers of a buffer too large to exist, at its end."""
    lengths = torch.tensor([0, 2**33, 2**33 + 8])
    real = torch.tensor([0, 2**33, 2**33 + 5])
    got = helpers().rank_lengths(real, lengths, 2, 0, True, True)
    assert got.tolist() == [0, 2**32, 2**32 + 2]


# ---- movers of more than a cache holds: stores go past the caches there, in whole lines

MOVERS = ("reorders", "partitions", "halves", "valid_tokens", "rows_and_heads")
REAL = (3000, 1, 0, 9, 500)
# row shapes and gaps: pieces of 400 bytes at odd addresses, of 600 bytes, of whole lines, of rows of 12 KiB
SHAPES = [
    ((3, 200), (24, 7), 3, torch.bfloat16),
    ((5, 300), (0, 0), 1, torch.bfloat16),
    ((8, 64), (0, 0), 32, torch.float32),
    ((6, 1024), (0, 2), 1, torch.bfloat16),
]
WHERE = Where("native", "cpu")


@pytest.mark.parametrize(
    ("shape", "gaps", "offset", "dtype"),
    [pytest.param(*row, marks=pytest.mark.thorough if n else ()) for n, row in enumerate(SHAPES)],
)
@pytest.mark.parametrize("check", MOVERS)
def test_movers(check: str, shape: tuple[int, ...], gaps: tuple[int, int], offset: int, dtype: torch.dtype) -> None:
    CHECKS[check](WHERE, Case(2, (900, 1, 0, 3, 130), REAL, 2, shape, (dtype, dtype), torch.int32, gaps, offset, 5))


@pytest.mark.parametrize(("dim", "offset"), [(128, 0), (200, 1)])
@pytest.mark.parametrize("gaps", [(0, 0), (40, 8)])
def test_heads(dim: int, offset: int, gaps: tuple[int, int]) -> None:
    """To the front and back again, in pieces of one head or of two."""
    rows = torch.randperm(1500, generator=torch.Generator().manual_seed(0))[:1200]
    whole, parts = torch.randn(1500, 8, dim), torch.randn(4, 1200, 2, dim)
    firsts = [4, 0, 6, 2]
    box, source = Boxed.of(whole, "cpu", gaps, offset), Boxed.of(parts, "cpu", (0, *gaps), offset)
    want = torch.stack([whole[rows, n : n + 2] for n in firsts])
    assert torch.equal(bytes_of(WHERE.kernels.gather_heads([box.view], rows, firsts, [2])[0]), bytes_of(want))
    WHERE.kernels.scatter_heads_([box.view], [source.view], rows, firsts)
    for part, n in zip(parts, firsts, strict=True):
        whole[rows, n : n + 2] = part
    box.assert_holds(whole)
    source.assert_holds(parts)
