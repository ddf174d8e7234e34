"""The native CPU movers against `cp_ref.thd`, bit by bit, with guard diagonal bands and odd strides."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_fast.movers import LengthsMap
from cp_ref.thd import (
    get_cu_seqlens_on_cp_rank,
    pad_thd_sequences_for_cp,
    thd_copy_valid_tokens_from_per_split_to_rank_local,
    thd_cp_rank_order_to_sequence_order,
    thd_get_partitioned_indices,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_sequence_order_to_cp_rank_order,
)
from tests.cp_fast.native.buffers import (
    DTYPES,
    FLOATS,
    LENGTH_DTYPES,
    ROW_SHAPES,
    as_index,
    bits,
    cumulative,
    equal_bits,
    guarded,
    helpers,
    native,
    packed,
    row_sets,
)
from tests.marks import needs_cxx

pytestmark = needs_cxx


@given(st.data())
def test_indices_and_partition(data: st.DataObject) -> None:
    cp_size = data.draw(st.integers(1, 5))
    sizes, tail = data.draw(packed(2 * cp_size, cp_size))
    rank, lengths = data.draw(st.integers(0, cp_size - 1)), cumulative(sizes, data.draw(LENGTH_DTYPES))
    total = sum(sizes) + tail
    expected = thd_get_partitioned_indices(lengths, total, cp_size, rank)
    indices = helpers().partition_indices(lengths, total, cp_size, rank)
    assert equal_bits(indices, expected)
    xs = [data.draw(guarded((total, *data.draw(ROW_SHAPES)), DTYPES)) for _ in range(data.draw(st.integers(1, 3)))]
    for x, got in zip(
        xs, native().gather([x.x for x in xs], LengthsMap("rows", "slice", lengths, a=cp_size, b=rank)), strict=True
    ):
        assert got.is_contiguous()
        assert got.shape == (total // cp_size, *x.x.shape[1:])
        assert torch.equal(bits(got), bits(x.x)[expected.long()] if x.x.numel() else bits(x.x))
        x.check()


@given(st.data())
def test_reorder(data: st.DataObject) -> None:
    cp_size = data.draw(st.integers(1, 5))
    sizes, tail = data.draw(packed(2 * cp_size, cp_size))
    lengths, total = cumulative(sizes, data.draw(LENGTH_DTYPES)), sum(sizes) + tail
    xs = [data.draw(guarded((total, *data.draw(ROW_SHAPES)), DTYPES)) for _ in range(data.draw(st.integers(1, 3)))]
    for kind, reference in (
        ("rank_order", thd_sequence_order_to_cp_rank_order),
        ("sequence_order", thd_cp_rank_order_to_sequence_order),
    ):
        order = LengthsMap("rows", kind, lengths, a=cp_size)
        for x, got in zip(xs, native().gather([x.x for x in xs], order), strict=True):
            assert got.shape == x.x.shape
            if x.x.numel():
                assert torch.equal(bits(got), reference(bits(x.x), lengths, cp_size))
            x.check()


@given(st.data())
def test_halves(data: st.DataObject) -> None:
    sizes, tail = data.draw(packed(2, 2))
    lengths, total, half = cumulative(sizes, data.draw(LENGTH_DTYPES)), sum(sizes) + tail, data.draw(st.integers(0, 1))
    xs = [data.draw(guarded((total, *data.draw(ROW_SHAPES)), DTYPES)) for _ in range(data.draw(st.integers(1, 3)))]
    for x, got in zip(xs, native().gather([x.x for x in xs], LengthsMap("rows", "half", lengths, a=half)), strict=True):
        assert got.shape == (total // 2, *x.x.shape[1:])
        if x.x.numel():
            assert torch.equal(bits(got), thd_read_half_tensor(bits(x.x), lengths, half))


def test_keys_and_values_in_one_tensor() -> None:
    """[2, t, h, d] with gaps on every axis: more strided axes than a move has."""
    both = torch.randn(2, 12, 5, 9)[:, :, :4, :8].movedim(1, 0)
    lengths = cumulative([8, 4])
    expected = thd_read_half_tensor(both.movedim(0, 1), lengths, 1).movedim(1, 0)
    assert torch.equal(native().gather([both], LengthsMap("rows", "half", lengths, a=1))[0], expected)


@given(st.data())
def test_second_half_lse(data: st.DataObject) -> None:
    sizes, tail = data.draw(packed(2, 2))
    lengths, heads, packs = (
        cumulative(sizes, data.draw(LENGTH_DTYPES)),
        data.draw(st.integers(0, 3)),
        data.draw(st.booleans()),
    )
    room = sum(sizes) // 2 if packs else max(sizes, default=0) // 2
    shape = (heads, sum(sizes) + tail) if packs else (len(sizes), heads, 2 * room + tail)
    lse = data.draw(guarded(shape, [torch.float32, torch.float64], numbers=True))
    most = room + data.draw(st.integers(0, 2))
    assert equal_bits(
        helpers().read_second_half_lse(lse.x, lengths, packs, most),
        thd_read_second_half_lse(lse.x, lengths, packs, most),
    )


@given(st.data())
def test_copy_valid(data: st.DataObject) -> None:
    sizes, tail = data.draw(packed(1))
    lengths = cumulative(sizes, data.draw(LENGTH_DTYPES))
    lengths[0] = data.draw(st.integers(0, sizes[0])) if sizes else 0
    real = cumulative([data.draw(st.integers(0, n)) for n in lengths.diff().tolist()], data.draw(LENGTH_DTYPES))
    shape = (sum(sizes) + tail, *data.draw(ROW_SHAPES))
    out = data.draw(guarded(shape, DTYPES))
    others = FLOATS if out.x.dtype in FLOATS else [out.x.dtype]
    inp = data.draw(guarded(shape, others))
    expected = out.x.clone()
    thd_copy_valid_tokens_from_per_split_to_rank_local(expected, inp.x, lengths, real)
    native().scatter_([out.x], [inp.x], LengthsMap("rows", "valid", lengths, real))
    if out.x.dtype == inp.x.dtype:
        assert equal_bits(out.x, expected)
    else:  # the bits of a converted NaN are nobody's promise
        assert torch.equal(out.x.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    rows = [range(int(start), int(start + n)) for start, n in zip(lengths[:-1], real.diff(), strict=True)]
    out.check(torch.tensor([row for run in rows for row in run], dtype=torch.int64))
    inp.check()


@given(st.data())
def test_rank_lengths(data: st.DataObject) -> None:
    cp_size = data.draw(st.integers(1, 5))
    sizes, _ = data.draw(packed(2 * cp_size))
    real = cumulative([data.draw(st.integers(0, n)) for n in sizes], data.draw(LENGTH_DTYPES))
    arguments = (
        cumulative(sizes, data.draw(LENGTH_DTYPES)),
        cp_size,
        data.draw(st.integers(0, cp_size - 1)),
        data.draw(st.booleans()),
        data.draw(st.booleans()),
    )
    assert equal_bits(helpers().rank_lengths(real, *arguments), get_cu_seqlens_on_cp_rank(real, *arguments))


@given(st.data())
def test_pad_sequences(data: st.DataObject) -> None:
    real = cumulative(data.draw(st.lists(st.integers(0, 9), max_size=6)), data.draw(LENGTH_DTYPES))
    tokens = int(real[-1]) + data.draw(st.integers(0, 3))
    dtype = data.draw(st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]))
    fill = data.draw(st.integers(0 if dtype == torch.uint8 else -100, 100))
    x = data.draw(guarded((tokens,), [dtype])).x
    if data.draw(st.booleans()):
        x = x.repeat_interleave(3)[::3]  # strided
    ids, _, lengths = pad_thd_sequences_for_cp(x, x, real, data.draw(st.integers(1, 5)), fill, fill)
    longer = data.draw(st.integers(0, 3))
    got = helpers().pad_sequences(x, real, lengths, len(ids) + longer, fill)
    assert equal_bits(got, torch.cat([ids, ids.new_full((longer,), fill)]))


@given(st.data())
def test_rows(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(0, 9))
    rows = data.draw(row_sets(tokens))
    index = as_index(rows, tokens)
    shapes = [data.draw(ROW_SHAPES) for _ in range(data.draw(st.integers(1, 3)))]
    outs = [data.draw(guarded((tokens, *shape), DTYPES)) for shape in shapes]
    for out, got in zip(outs, native().gather([out.x for out in outs], rows), strict=True):
        assert torch.equal(bits(got.contiguous()), bits(out.x)[index] if out.x.numel() and len(index) else bits(got))
        assert got.shape == (len(index), *out.x.shape[1:])
    xs = [data.draw(guarded((len(index), *out.x.shape[1:]), [out.x.dtype])) for out in outs]
    native().scatter_([out.x for out in outs], [x.x for x in xs], rows)
    for out, x in zip(outs, xs, strict=True):
        if x.x.numel():
            assert torch.equal(bits(out.x)[index], bits(x.x))
        out.check(index)
        x.check()


@given(st.data())
def test_heads(data: st.DataObject) -> None:
    tokens, heads = data.draw(st.integers(0, 7)), data.draw(st.integers(1, 3))
    first_heads = [heads * i for i in range(data.draw(st.integers(0, 4)))]
    all_heads = heads * max(len(first_heads), 1) + data.draw(st.integers(0, 2))
    inner = data.draw(st.sampled_from([(), (1,), (8,), (16,), (3, 2)]))
    rows = data.draw(row_sets(tokens))
    index = as_index(rows, tokens)
    x = data.draw(guarded((tokens, all_heads, *inner), DTYPES, inner_gap=False))
    front, again = native().gather_heads([x.x, x.x], rows, [*first_heads, *reversed(first_heads)], [heads, heads])
    assert front.shape == (len(first_heads), len(index), heads, *inner)
    for part, first in zip(front, first_heads, strict=True):
        if part.numel():
            assert torch.equal(bits(part), bits(x.x[:, first : first + heads])[index])
    assert equal_bits(again, front.flip(0))
    out = data.draw(guarded((tokens, all_heads, *inner), [x.x.dtype], inner_gap=False))
    parts = data.draw(guarded(tuple(front.shape), [x.x.dtype], inner_gap=False))
    before = out.x.clone()
    native().scatter_heads_([out.x], [parts.x], rows, first_heads)
    for part, first in zip(parts.x, first_heads, strict=True):
        if part.numel():
            assert torch.equal(bits(out.x[:, first : first + heads])[index], bits(part))
    rest = heads * len(first_heads)
    assert equal_bits(out.x[:, rest:].contiguous(), before[:, rest:].contiguous())
    out.check(index)


def test_heads_may_be_sent_twice() -> None:
    x = torch.randn(3, 2, 4)
    (front,) = native().gather_heads([x], slice(0, 3), [0, 0, 1, 1], [1])
    assert torch.equal(front, torch.stack([x[:, :1], x[:, :1], x[:, 1:], x[:, 1:]]))
