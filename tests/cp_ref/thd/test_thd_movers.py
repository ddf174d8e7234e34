"""The THD helpers that move tokens, against loops over single tokens."""

from __future__ import annotations

import time
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_ref import ContextParallel, SimGroup, shard
from cp_ref.thd import (
    get_cu_seqlens_on_cp_rank,
    thd_copy_valid_tokens_from_per_split_to_rank_local,
    thd_cp_rank_order_to_sequence_order,
    thd_get_partitioned_indices,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_sequence_order_to_cp_rank_order,
)

LENGTH_DTYPES = st.sampled_from([torch.int32, torch.int64])
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def tokens_of_rank(lengths: list[int], tail: int, cp_size: int, rank: int) -> list[int]:
    """Token by token: who owns it?"""
    mine, start = [], 0
    for length in lengths:
        chunk = length // (2 * cp_size)
        for wanted in (rank, 2 * cp_size - 1 - rank):
            mine += [start + i for i in range(length) if i // chunk == wanted]
        start += length
    return mine + [start + i for i in range(tail) if i // (tail // cp_size) == rank]


@st.composite
def buffers(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """cp_size, padded lengths (zero, one, many), tail."""
    cp_size = draw(st.integers(1, 5))
    chunks = draw(st.lists(st.integers(0, 4), max_size=7))
    return cp_size, [2 * cp_size * n for n in chunks], cp_size * draw(st.integers(0, 3))


@given(buffers(), LENGTH_DTYPES)
def test_indices(buffer: tuple[int, list[int], int], dtype: torch.dtype) -> None:
    cp_size, lengths, tail = buffer
    cu, total = cumulative(lengths, dtype), sum(lengths) + tail
    seen: list[int] = []
    for rank in range(cp_size):
        indices = thd_get_partitioned_indices(cu, total, cp_size, rank)
        assert indices.dtype == dtype
        assert indices.tolist() == tokens_of_rank(lengths, tail, cp_size, rank)
        seen += indices.tolist()
    assert sorted(seen) == list(range(total))


@given(buffers(), LENGTH_DTYPES)
def test_reorders(buffer: tuple[int, list[int], int], dtype: torch.dtype) -> None:
    cp_size, lengths, tail = buffer
    cu = cumulative(lengths, dtype)
    x = torch.randn(sum(lengths) + tail, 2)
    there = thd_sequence_order_to_cp_rank_order(x, cu, cp_size)
    order = [i for rank in range(cp_size) for i in tokens_of_rank(lengths, tail, cp_size, rank)]
    assert torch.equal(there, torch.stack([x[i] for i in order]) if order else x)
    assert torch.equal(thd_cp_rank_order_to_sequence_order(there, cu, cp_size), x)
    slices = SimGroup(cp_size).run(
        lambda member: shard(x, cp=ContextParallel(member), qkv_format="thd", cu_seqlens_padded=cu)
    )
    assert torch.equal(there, torch.cat(slices))


def test_reorders_are_differentiable() -> None:
    cu = cumulative([8, 4])
    weights = torch.randn(14, 2, dtype=torch.float64)
    for move in (thd_sequence_order_to_cp_rank_order, thd_cp_rank_order_to_sequence_order):
        x = torch.randn(14, 2, dtype=torch.float64, requires_grad=True)
        (move(x, cu, 2) * weights).sum().backward()
        back = {
            thd_sequence_order_to_cp_rank_order: thd_cp_rank_order_to_sequence_order,
            thd_cp_rank_order_to_sequence_order: thd_sequence_order_to_cp_rank_order,
        }[move]
        assert torch.equal(x.grad, back(weights, cu, 2))  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 5), max_size=7), st.integers(0, 3), LENGTH_DTYPES, st.sampled_from([0, 1]))
def test_halves(half_lengths: list[int], half_tail: int, dtype: torch.dtype, half: int) -> None:
    lengths = [2 * n for n in half_lengths]
    cu, total = cumulative(lengths, dtype), sum(lengths) + 2 * half_tail
    wanted, start = [], 0
    for length in [*lengths, 2 * half_tail]:  # the tail is halved like a sequence
        wanted += [start + i for i in range(length) if (i >= length // 2) == bool(half)]
        start += length
    assert thd_read_half_tensor(torch.arange(total), cu, half).tolist() == wanted
    kv = torch.randn(2, total, 3, 4)
    assert torch.equal(thd_read_half_tensor(kv, cu, half), kv[:, wanted])
    assert torch.equal(thd_read_half_tensor(kv[0], cu, half), kv[0, wanted])


@given(st.lists(st.integers(0, 5), max_size=7), st.integers(0, 3), st.integers(0, 2), LENGTH_DTYPES)
def test_second_half_of_an_lse(half_lengths: list[int], tail: int, spare: int, dtype: torch.dtype) -> None:
    lengths = [2 * n for n in half_lengths]
    cu, heads = cumulative(lengths, dtype), 2
    packed = torch.randn(heads, sum(lengths) + tail)
    padded = torch.randn(len(lengths), heads, max(lengths, default=0) + tail)
    got_packed = thd_read_second_half_lse(packed, cu, True, sum(half_lengths) + spare)
    got_padded = thd_read_second_half_lse(padded, cu, False, max(half_lengths, default=0) + spare)
    want_packed, want_padded = torch.zeros_like(got_packed), torch.zeros_like(got_padded)
    column = 0
    for number, length in enumerate(lengths):
        for i in range(length // 2):
            want_packed[:, column] = packed[:, sum(lengths[:number]) + length // 2 + i]
            want_padded[number, :, i] = padded[number, :, length // 2 + i]
            column += 1
    assert got_packed.shape == (heads, sum(half_lengths) + spare)
    assert torch.equal(got_packed, want_packed)
    assert torch.equal(got_padded, want_padded)


@given(buffers(), st.data(), LENGTH_DTYPES)
def test_real_lengths_on_a_rank(buffer: tuple[int, list[int], int], data: st.DataObject, dtype: torch.dtype) -> None:
    cp_size, lengths, _ = buffer
    real = [data.draw(st.integers(0, n)) for n in lengths]
    rank = data.draw(st.integers(0, cp_size - 1))
    chunk_of = [n // (2 * cp_size) for n in lengths]
    late = 2 * cp_size - 1 - rank
    for first, second in ((True, True), (True, False), (False, True), (False, False)):
        counted = {rank: first, late: second}
        held = [sum(counted.get(i // chunk, False) for i in range(n)) for n, chunk in zip(real, chunk_of, strict=True)]
        got = get_cu_seqlens_on_cp_rank(
            cumulative(real, dtype), cumulative(lengths, torch.int64), cp_size, rank, first, second
        )
        assert got.dtype == dtype
        assert got.tolist() == [0, *accumulate(held)]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=7),
    st.integers(0, 3),
    st.integers(0, 3),
    LENGTH_DTYPES,
)
def test_copying_valid_tokens(spans: list[tuple[int, int]], first: int, tail: int, dtype: torch.dtype) -> None:
    """Any begin, real tokens and spare slots; everything that is not to be copied is NaN."""
    starts = [first, *accumulate((real + spare for real, spare in spans), initial=first)][1:]
    cu_padded, cu = torch.tensor(starts, dtype=dtype), cumulative([real for real, _ in spans], dtype)
    total = starts[-1] + tail
    inp, out = torch.full((total, 2), float("nan")), torch.randn(total, 2)
    want = out.clone()
    for number, (real, _) in enumerate(spans):
        for row in range(starts[number], starts[number] + real):
            inp[row] = torch.randn(2)
            want[row] = inp[row]
    thd_copy_valid_tokens_from_per_split_to_rank_local(out, inp, cu_padded, cu)
    assert torch.equal(out, want)


def test_copying_both_splits_fills_the_slice() -> None:
    """The two steps of all_gather: the late one's starts are moved by a chunk, its end is not."""
    slots, real = cumulative([8, 0, 16]), cumulative([5, 0, 16])
    for rank in (0, 1):
        local, chunk = slots // 2, torch.tensor([2, 0, 4, 0])
        early = get_cu_seqlens_on_cp_rank(real, slots, 2, rank, True, False)
        late = get_cu_seqlens_on_cp_rank(real, slots, 2, rank, False, True)
        inp, out = torch.arange(12.0), torch.full((12,), -1.0)
        thd_copy_valid_tokens_from_per_split_to_rank_local(out, inp, local, early)
        thd_copy_valid_tokens_from_per_split_to_rank_local(out, inp, local + chunk, late)
        both = get_cu_seqlens_on_cp_rank(real, slots, 2, rank, True, True).diff().tolist()
        assert out.tolist() == [float(i) if i < both[0] or i >= 4 else -1.0 for i in range(12)]


@pytest.mark.parametrize("inp_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_copying_into_a_wider_accumulator(inp_dtype: torch.dtype) -> None:
    inp, out = torch.randn(4, 2).to(inp_dtype), torch.zeros(4, 2, dtype=torch.float64)
    thd_copy_valid_tokens_from_per_split_to_rank_local(out, inp, cumulative([4]), cumulative([3]))
    assert torch.equal(out[:3], inp[:3].double())
    assert out[3].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_moves_bit_by_bit(dtype: torch.dtype) -> None:
    """Odd strides too: every second head of a larger tensor."""
    x = torch.randint(0, 7, (14, 4, 8)).to(dtype)[:, ::2]
    cu, back = cumulative([8, 4]), thd_cp_rank_order_to_sequence_order
    there = thd_sequence_order_to_cp_rank_order(x, cu, 2)
    order = [0, 1, 6, 7, 8, 11, 12, 2, 3, 4, 5, 9, 10, 13]
    assert there.dtype == dtype
    assert torch.equal(there.double(), x.double()[order])
    assert torch.equal(back(there, cu, 2).double(), x.double())
    assert torch.equal(thd_read_half_tensor(x, cu, 1).double(), x.double()[[4, 5, 6, 7, 10, 11, 13]])
    out = torch.zeros(14, 4, 8).to(dtype)[:, ::2]
    thd_copy_valid_tokens_from_per_split_to_rank_local(out, x, cu, cumulative([3, 4]))
    assert torch.equal(out.double()[[0, 1, 2, 8, 9, 10, 11]], x.double()[[0, 1, 2, 8, 9, 10, 11]])
    assert out.double()[[3, 4, 5, 6, 7, 12, 13]].eq(0).all()


def test_thousands_of_sequences() -> None:
    """Right at the far end, and not slow."""
    cp_size, lengths = 4, [8 * (n % 3) for n in range(20_000)]
    cu, total = cumulative(lengths), sum(lengths)
    x = torch.arange(total)
    begun = time.process_time()
    indices = thd_get_partitioned_indices(cu, total, cp_size, 3)
    there = thd_sequence_order_to_cp_rank_order(x, cu, cp_size)
    assert torch.equal(thd_cp_rank_order_to_sequence_order(there, cu, cp_size), x)
    local = cu // cp_size
    late = thd_read_half_tensor(indices, local, 1)
    real = get_cu_seqlens_on_cp_rank(cu, cu, cp_size, 3, True, True)
    out = torch.zeros_like(indices)
    thd_copy_valid_tokens_from_per_split_to_rank_local(out, indices, local, real)
    assert time.process_time() - begun < 5
    assert torch.equal(there[3 * total // 4 :], indices.long())
    assert torch.equal(out, indices)
    assert late.tolist() == [
        start + i
        for start, length in zip(cu.tolist(), lengths, strict=False)
        for i in range(4 * length // 8, 5 * length // 8)
    ]
