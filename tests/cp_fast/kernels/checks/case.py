"""Drawn cases: sequences, and how tensors look and lie in memory; and where the kernels run."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

from cp_fast.movers.mover_protocol import Movers
from cp_fast.movers.select_movers import movers_for, use

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes as integers, on the CPU."""
    return x.detach().view(INTEGERS[x.element_size()]).cpu()


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(bits(got), bits(want))


@dataclass
class Boxed:
    """A tensor inside a buffer of ones; `gaps`: spare elements behind each row of an axis, `offset` in front of all."""

    buffer: torch.Tensor
    view: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, device: str, gaps: tuple[int, ...] = (), offset: int = 0) -> Boxed:
        gaps = (*gaps, 0, 0, 0, 0)[: max(x.ndim - 1, 0)]
        strides = [1]
        for size, gap in zip(reversed(x.shape[1:]), reversed(gaps), strict=True):
            strides.insert(0, strides[0] * size + gap)
        spread = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) if x.numel() else 0
        whole = torch.ones(offset + spread + 17, dtype=INTEGERS[x.element_size()], device=device).view(x.dtype)
        view = whole.as_strided(x.shape, strides, offset)
        view.copy_(x)
        return Boxed(whole, view)

    def assert_holds(self, want: torch.Tensor, near: dict[str, Any] | None = None) -> None:
        """The view holds `want`, bit by bit or with tolerances, and nothing around it has changed."""
        if near is None:
            assert_same_bits(self.view, want)
        else:
            torch.testing.assert_close(self.view.cpu(), want, equal_nan=True, **near)
        outside = self.buffer.clone().view(INTEGERS[self.buffer.element_size()])
        outside.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(1)
        assert bool(outside.eq(1).all()), "written outside of the tensor"


MOVED = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NEAR: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"rtol": 1e-6, "atol": 1e-6},  # an LSE may be float32
    torch.float32: {"rtol": 3e-6, "atol": 3e-6},
    torch.float16: {"rtol": 1.1 * 2**-10, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.1 * 2**-7, "atol": 1e-5},
}
INF, NAN = float("inf"), float("nan")


def once(dtype: torch.dtype, from_dtype: torch.dtype) -> dict[str, Any] | None:
    """How near a conversion must come; None for bit by bit. PyTorch rounds float64 to a half precision twice, by way of
    float32; a kernel may do it once.
    """
    halves = (torch.float16, torch.bfloat16)
    return NEAR[dtype] if dtype in halves and from_dtype == torch.float64 else None


@dataclass(frozen=True)
class Where:
    """An implementation on a device."""

    name: str
    device: str

    @property
    def kernels(self) -> Movers:
        return movers_for(self.device, self.name)

    def use(self) -> Any:
        return use(self.name)

    def lengths(self, values: list[int] | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(self.device)


@dataclass(frozen=True)
class Case:
    """Sequences of `chunks[s]` * 2 * cp_size slots, `real[s]` of them real; how tensors look and lie in memory."""

    cp_size: int
    chunks: tuple[int, ...]
    real: tuple[int, ...]
    tail: int  # in units of 2 * cp_size
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    length_dtype: torch.dtype
    gaps: tuple[int, int]
    offset: int
    seed: int
    generator: torch.Generator = field(default_factory=torch.Generator, compare=False, repr=False)

    @property
    def slots(self) -> list[int]:
        return [2 * self.cp_size * n for n in self.chunks]

    @property
    def cu(self) -> torch.Tensor:
        return torch.tensor([0, *accumulate(self.slots)], dtype=self.length_dtype)

    @property
    def cu_real(self) -> torch.Tensor:
        return torch.tensor([0, *accumulate(self.real)], dtype=self.length_dtype)

    @property
    def tokens(self) -> int:
        return sum(self.slots) + 2 * self.cp_size * self.tail

    @property
    def rank(self) -> int:
        return self.seed % self.cp_size

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.generator.manual_seed(self.seed + sum(shape))
        if dtype.is_floating_point and dtype.itemsize > 1:
            return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(dtype)
        numbers = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=self.generator)
        return numbers.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else numbers.to(dtype)

    def lse(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Some rows are empty."""
        x = 3 * self.random(*shape, dtype=dtype)
        return x.masked_fill(torch.rand(*shape, generator=self.generator) < 0.3, -INF)

    def boxed(self, where: Where, x: torch.Tensor) -> Boxed:
        return Boxed.of(x, where.device, self.gaps, self.offset)


def cases(most_chunks: int = 4, most_sequences: int = 7, most_heads: int = 3) -> st.SearchStrategy[Case]:
    """Any of them; zero-length sequences, no sequences and tails are common."""

    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        cp_size = draw(st.integers(1, 4))
        chunks = draw(st.lists(st.integers(0, most_chunks), max_size=most_sequences).map(tuple))
        real = tuple(draw(st.integers(0, 2 * cp_size * n)) for n in chunks)
        shape = draw(
            st.sampled_from([(), (1,), (5,), (16,)])
            | st.tuples(st.integers(1, most_heads), st.sampled_from([1, 3, 4, 8, 12]))
        )
        return Case(
            cp_size,
            chunks,
            real,
            draw(st.integers(0, 2)),
            shape,
            (draw(st.sampled_from(MOVED)), draw(st.sampled_from(MOVED))),
            draw(st.sampled_from([torch.int32, torch.int64])),
            draw(st.sampled_from([(0, 0), (8, 4), (3, 1), (16, 8)])),
            draw(st.sampled_from([0, 1, 4, 8])),
            draw(st.integers(0, 10**6)),
        )

    return draw_case()


def lse_shape(case: Case, packed: bool, half: bool = False, heads: int = 2) -> tuple[int, ...]:
    """Of an LSE of the local lengths, or of their halves; a padded one has columns to spare."""
    if packed:
        return heads, case.tokens // 2 if half else case.tokens
    longest = max(case.slots, default=0)
    return len(case.slots), heads, (longest // 2 if half else longest) + 1 + half


def rows_of(case: Case, where: Where, tokens: int) -> list[tuple[Any, torch.Tensor]]:
    """Rows as kernels take them, and as an index on the CPU."""
    case.generator.manual_seed(case.seed)
    index = torch.randperm(tokens, generator=case.generator)[: (tokens + 1) // 2]
    begin = min(1, tokens)
    return [
        (slice(begin, tokens), torch.arange(begin, tokens)),
        (index.to(where.device, case.length_dtype), index),
        (index[:0].to(where.device), index[:0]),
    ]


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """8-bit dtypes as integers, for operators that do not know them."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
