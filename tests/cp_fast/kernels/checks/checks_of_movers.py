"""What movers have to do: the bits of `cp_ref.thd`, in guarded memory, with odd strides and NaN in padding."""

from __future__ import annotations

import torch

import cp_fast
import cp_ref
from cp_fast.movers import RowRule
from tests.cp_fast.kernels.checks.case import FLOATS, NAN, Case, Where, bytes_of, lse_shape, once, rows_of
from tests.cp_fast.kernels.checks.memory import Boxed, assert_same_bits


def indices_and_lengths(where: Where, case: Case) -> None:
    cu, real = (where.lengths(x, case.length_dtype) for x in (case.cu, case.cu_real))
    with where.use():
        for rank in range(case.cp_size):
            got = cp_fast.thd.thd_get_partitioned_indices(cu, case.tokens, case.cp_size, rank)
            want = cp_ref.thd.thd_get_partitioned_indices(case.cu, case.tokens, case.cp_size, rank)
            assert_same_bits(got, want)
        for first, second in ((True, True), (True, False), (False, True), (False, False)):
            numbers = case.cp_size, case.rank, first, second
            got = cp_fast.thd.get_cu_seqlens_on_cp_rank(real, cu, *numbers)
            assert_same_bits(got, cp_ref.thd.get_cu_seqlens_on_cp_rank(case.cu_real, case.cu, *numbers))


def reorders(where: Where, case: Case) -> None:
    """K and V of unequal shapes and dtypes in one launch; inputs stay as they are."""
    xs = (
        case.random(case.tokens, *case.shape, dtype=case.dtypes[0]),
        case.random(case.tokens, 3, dtype=case.dtypes[1]),
    )
    boxes = [case.boxed(where, x) for x in xs]
    cu = where.lengths(case.cu, case.length_dtype)
    with where.use():
        for name in ("thd_sequence_order_to_cp_rank_order", "thd_cp_rank_order_to_sequence_order"):
            want = getattr(cp_ref.thd, name)(xs, case.cu, case.cp_size)
            got = getattr(cp_fast.thd, name)(tuple(box.view for box in boxes), cu, case.cp_size)
            for one, other in zip(got, want, strict=True):
                assert_same_bits(one, other)
            assert_same_bits(getattr(cp_fast.thd, name)(boxes[0].view, cu, case.cp_size), want[0])
    for box, x in zip(boxes, xs, strict=True):
        box.assert_holds(x)


def partitions(where: Where, case: Case) -> None:
    x = case.random(case.tokens, *case.shape, dtype=case.dtypes[0])
    cu, ids = where.lengths(case.cu, case.length_dtype), torch.arange(case.tokens)
    own = RowRule("partition", "slice", cu, a=case.cp_size, b=case.rank)
    got = where.kernels.gather([case.boxed(where, x).view, ids.to(where.device)], own)
    rows = cp_ref.thd.thd_get_partitioned_indices(case.cu, case.tokens, case.cp_size, case.rank).long()
    assert_same_bits(got[0], x.index_select(0, rows))
    assert_same_bits(got[1], rows)


def halves(where: Where, case: Case) -> None:
    shape = (case.tokens, *case.shape)
    x, y = case.random(*shape, dtype=case.dtypes[0]), case.random(case.tokens, 2, 4, dtype=case.dtypes[1])
    kv = case.random(2, case.tokens, 2, 4, dtype=case.dtypes[1])
    cu = where.lengths(case.cu, case.length_dtype)
    boxes = case.boxed(where, x), case.boxed(where, y), case.boxed(where, kv)
    with where.use():
        for half in (0, 1):
            want = cp_ref.thd.thd_read_half_tensor((x, y), case.cu, half)
            got = cp_fast.thd.thd_read_half_tensor((boxes[0].view, boxes[1].view), cu, half)
            for one, other in zip(got, want, strict=True):
                assert_same_bits(one, other)
            assert_same_bits(
                cp_fast.thd.thd_read_half_tensor(boxes[2].view, cu, half),
                cp_ref.thd.thd_read_half_tensor(kv, case.cu, half),
            )
    boxes[0].assert_holds(x)
    boxes[2].assert_holds(kv)


def half_lses(where: Where, case: Case) -> None:
    cu, half = where.lengths(case.cu, case.length_dtype), [n // 2 for n in case.slots]
    with where.use():
        for packed, spare in ((True, 0), (True, 3), (False, 0), (False, 3)):
            lse = case.lse(*lse_shape(case, packed))
            size = (sum(half) if packed else max(half, default=0)) + spare
            box = case.boxed(where, lse)
            got = cp_fast.thd.thd_read_second_half_lse(box.view, cu, packed, size)
            assert_same_bits(got, cp_ref.thd.thd_read_second_half_lse(lse, case.cu, packed, size))
            box.assert_holds(lse)


def valid_tokens(where: Where, case: Case) -> None:
    """Bits of equal dtypes, and conversions; lengths that begin past 0; what is not valid is NaN, and is not read."""
    first = case.seed % 3
    starts = (case.cu + first).tolist()
    total = case.tokens + first
    lengths, real = (where.lengths(x, case.length_dtype) for x in (starts, case.cu_real))
    is_valid = torch.zeros(total, dtype=torch.bool)
    for start, count in zip(starts, case.real, strict=False):
        is_valid[start : start + count] = True
    pairs = [(case.dtypes[0],) * 2, (FLOATS[case.seed % 4], FLOATS[case.seed // 4 % 4])]
    for out_dtype, inp_dtype in pairs:
        out = case.random(total, *case.shape, dtype=out_dtype)
        inp = case.random(total, *case.shape, dtype=inp_dtype)
        if inp_dtype.is_floating_point and inp_dtype.itemsize > 1:
            inp[~is_valid] = NAN
        box, source = case.boxed(where, out), case.boxed(where, inp)
        with where.use():
            name = "thd_copy_valid_tokens_from_per_split_to_rank_local"
            getattr(cp_fast.thd, name)(box.view, source.view, lengths, real)
        rows = is_valid.nonzero().flatten()
        want = out.clone()
        if out_dtype == inp_dtype:
            want.view(torch.uint8 if want.element_size() == 1 else out_dtype)[rows] = inp.view(
                torch.uint8 if want.element_size() == 1 else inp_dtype
            )[rows]
        else:
            want[rows] = inp[rows].to(out_dtype)
        box.assert_holds(want, once(out_dtype, inp_dtype))
        source.assert_holds(inp)


def padding(where: Where, case: Case) -> None:
    extra, factor = case.seed % 4, 1 + case.seed % 5
    tokens = sum(case.real) + extra
    dtype = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)[case.seed % 5]
    ids, labels = torch.arange(tokens).to(dtype), -torch.arange(tokens)
    label = -100 if dtype != torch.uint8 else 7
    for spare in (None, 0, 1, extra, extra + 3):
        size = None if spare is None else spare + sum(-(-n // factor) * factor for n in case.real)
        want = cp_ref.thd.pad_thd_sequences_for_cp(ids, labels, case.cu_real, factor, 7, label, size)
        if size is None and where.device != "cpu":
            size = len(want[0])
        ends = [Boxed.of(x, where.device, (), case.offset) for x in (ids, labels)]
        cu = where.lengths(case.cu_real, case.length_dtype)
        with where.use():
            got = cp_fast.thd.pad_thd_sequences_for_cp(ends[0].view, ends[1].view, cu, factor, 7, label, size)
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)


def rows_and_heads(where: Where, case: Case) -> None:
    """Rows that the caller gives."""
    use = where.kernels
    dtype = case.dtypes[0]
    for rows, index in rows_of(case, where, case.tokens):
        x, y = case.random(case.tokens, *case.shape, dtype=dtype), case.random(case.tokens, 5, dtype=case.dtypes[1])
        boxes = case.boxed(where, x), case.boxed(where, y)
        for got, source in zip(use.gather([box.view for box in boxes], rows), (x, y), strict=True):
            assert_same_bits(got, source.index_select(0, index))
        news = [case.random(len(index), *source.shape[1:], dtype=source.dtype) for source in (x, y)]
        use.scatter_([box.view for box in boxes], [case.boxed(where, new).view for new in news], rows)
        for box, source, new in zip(boxes, (x, y), news, strict=True):
            want = source.clone()
            bytes_of(want)[index] = bytes_of(new)
            box.assert_holds(want)

        wholes = [case.random(case.tokens, n, 4, dtype=kind) for n, kind in zip((6, 3), case.dtypes, strict=False)]
        boxes = [case.boxed(where, whole) for whole in wholes]
        views, sizes, overlapping = [box.view for box in boxes], [2, 1], [[0, 2, 2, 4], [0, 0, 2, 1]]
        got = use.gather_heads(views, rows, [*overlapping[0], *overlapping[1]], sizes)
        for whole, size, firsts, front in zip(wholes, sizes, overlapping, got, strict=True):
            want = torch.stack([bytes_of(whole)[index][:, n : n + size] for n in firsts])
            assert torch.equal(bytes_of(front.cpu()), want)
        parts = [case.random(2, len(index), n, 4, dtype=x.dtype) for n, x in zip(sizes, wholes, strict=True)]
        distinct = [[4, 1], [0, 2]]
        use.scatter_heads_(views, [x.to(where.device) for x in parts], rows, [*distinct[0], *distinct[1]])
        for box, whole, size, firsts, some in zip(boxes, wholes, sizes, distinct, parts, strict=True):
            want = whole.clone()
            for part, n in zip(some, firsts, strict=True):
                bytes_of(want)[index, n : n + size] = bytes_of(part)
            box.assert_holds(want)
