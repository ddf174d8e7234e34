"""Buffers for tests of kernels: packed lengths, tensors of random bits with odd strides, and guard diagonal bands."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

import cp_fast.thd  # noqa: F401  (registers the operators)
from cp_fast.movers import use
from cp_fast.movers.native_kernels import NativeKernels, load

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [
    *FLOATS,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
LENGTH_DTYPES = st.sampled_from([torch.int32, torch.int64])
ROW_SHAPES = st.one_of(
    st.sampled_from([(), (1,), (3,), (2, 3), (4, 8), (1, 16), (2, 2, 3)]),
    st.tuples(st.integers(0, 3), st.integers(0, 33)),
)


def native() -> NativeKernels:
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


class Guarded:
    """A tensor inside a larger one whose other elements must not change: gaps between rows and between heads, and
    diagonal bands in front and behind.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int, gaps: tuple[int, ...]) -> None:
        """`gaps`: for every axis, how many elements more the larger tensor has."""
        generator = torch.Generator().manual_seed(seed)
        outer = [size + gap for size, gap in zip(shape, gaps, strict=True)]
        count = 8
        for size in outer:
            count *= size
        count += 8
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(
            0, 2 if dtype == torch.bool else 256, (count * size,), generator=generator, dtype=torch.uint8
        )
        self.storage = raw.view(dtype)
        inner = self.storage[8 : 8 + count // 8 * 8]
        steps = torch.empty(outer, device="meta").stride()
        self.x = inner.as_strided(shape, steps, 8)
        self._before = self.storage.clone()

    def check(self, changed: torch.Tensor | None = None) -> None:
        """Nothing has changed but the rows named, int64 [n]."""
        mask = torch.zeros(len(self.storage), dtype=torch.bool)
        rows = mask.as_strided(self.x.shape, self.x.stride(), 8)
        if changed is not None:
            rows[changed] = True
        item = self.storage.element_size()
        before, after = (x.view(torch.uint8).view(-1, item)[~mask] for x in (self._before, self.storage))
        assert torch.equal(before, after)


@st.composite
def guarded(
    draw: st.DrawFn, shape: tuple[int, ...], dtypes: list[torch.dtype], inner_gap: bool = True, numbers: bool = False
) -> Guarded:
    """A tensor of this shape. `inner_gap`: also a gap behind the last axis (which keeps stride 1). `numbers`: of
    ordinary numbers, not random bits.
    """
    gaps = [draw(st.integers(0, 2)) for _ in shape]
    if not inner_gap and len(gaps) > 1:
        gaps[2:] = [0] * len(gaps[2:])
    made = Guarded(shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 10**6)), tuple(gaps))
    if numbers:
        generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
        made.x.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))
        made._before = made.storage.clone()
    return made


@st.composite
def packed(draw: st.DrawFn, divisor: int, tail_divisor: int = 1) -> tuple[list[int], int]:
    """Lengths that divide (zero, one, many sequences; some of them empty), and a tail."""
    chunks = draw(st.lists(st.integers(0, 4), max_size=7))
    return [divisor * n for n in chunks], tail_divisor * draw(st.integers(0, 3))


@st.composite
def row_sets(draw: st.DrawFn, tokens: int) -> slice | torch.Tensor:
    """A slice, or distinct rows in any order."""
    if draw(st.booleans()):
        first = draw(st.integers(0, tokens))
        return slice(first, draw(st.integers(first, tokens)))
    order = draw(st.permutations(range(tokens)))
    return torch.tensor(order[: draw(st.integers(0, tokens))], dtype=draw(LENGTH_DTYPES))


def as_index(rows: slice | torch.Tensor, tokens: int) -> torch.Tensor:
    return torch.arange(tokens)[rows] if isinstance(rows, slice) else rows.long()
