"""What every implementation of the kernels has to do, for the CPU, the simulator and the GPU alike.

Each check takes a `Where` and a drawn `Case`; `CHECKS` has them all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

import cp_fast
import cp_ref
from cp_fast.movers.mover_protocol import RowRule
from tests.cp_fast.kernels.checks.case import (
    FLOATS,
    INF,
    NAN,
    NEAR,
    Boxed,
    Case,
    Where,
    assert_same_bits,
    bytes_of,
    cases,
    lse_shape,
    once,
    rows_of,
)

__all__ = [
    "CHECKS",
    "MERGED_SHAPES",
    "ROW_SIZES",
    "Case",
    "Where",
    "cases",
    "many_sequences",
    "merged_shapes",
    "row_sizes",
]


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


def lse_corrections(where: Where, case: Case) -> None:
    cu = where.lengths(case.cu, case.length_dtype)
    for packed in (True, False):
        for dtype, step_dtype in ((torch.float32,) * 2, (torch.float64, torch.float32)):
            lse = case.lse(*lse_shape(case, packed), dtype=dtype)
            step = case.lse(*lse_shape(case, packed, half=True), dtype=step_dtype)
            box, of_step = case.boxed(where, lse), case.boxed(where, step)
            with where.use():
                cp_fast.thd.thd_second_half_lse_correction(box.view, of_step.view, cu, packed)
            want = lse.clone()
            cp_ref.thd.thd_second_half_lse_correction(want, step, case.cu, packed)
            box.assert_holds(want, NEAR[dtype])
            of_step.assert_holds(step)


def out_corrections(where: Where, case: Case) -> None:
    heads, dim = case.shape if len(case.shape) == 2 else (2, 4)
    cu, dtype, step_dtype = where.lengths(case.cu, case.length_dtype), FLOATS[case.seed % 4], FLOATS[case.seed // 4 % 4]
    for packed, half in ((True, True), (True, False), (False, True), (False, False)):
        lse = case.lse(*lse_shape(case, packed, heads=heads)).abs() + 3  # final: not empty, not below a step's
        step_lse = case.lse(*lse_shape(case, packed, half, heads)) / 3
        out = case.random(case.tokens, heads, dim, dtype=dtype)
        step = case.random(case.tokens // 2 if half else case.tokens, heads, dim, dtype=step_dtype)
        if packed:
            step[step_lse.t() == -INF] = NAN
        lse[lse == INF] = 5.0
        boxes = [case.boxed(where, x) for x in (out, step, lse, step_lse)]
        with where.use():
            views = [box.view for box in boxes]
            cp_fast.thd.thd_out_correction(views[0], views[1], views[2], views[3], cu, half, packed)
        want = out.double()
        cp_ref.thd.thd_out_correction(want, step, lse, step_lse, case.cu, half, packed)
        boxes[0].assert_holds(want.to(dtype), NEAR[dtype])


def grad_corrections(where: Where, case: Case) -> None:
    cu, dtype, step_dtype = where.lengths(case.cu, case.length_dtype), FLOATS[case.seed % 4], FLOATS[case.seed // 4 % 4]
    actions = ("add", "copy", "none")
    first, second = actions[case.seed % 3], actions[case.seed // 3 % 3]
    sizes = [case.tokens // 2] if "none" in (first, second) else [case.tokens]
    for tokens in [*sizes, *([case.tokens] if first == second == "none" else [])]:
        for shape in ((case.tokens, *case.shape), (2, case.tokens, 2, 3)):
            axis = int(len(shape) == 4)
            grad = case.random(*shape, dtype=dtype)
            step = case.random(*shape[:axis], tokens, *shape[axis + 1 :], dtype=step_dtype)
            box = case.boxed(where, grad)
            with where.use():
                step_view = case.boxed(where, step).view
                cp_fast.thd.thd_grad_correction(box.view, step_view, cu, first, second)
            want = grad.clone()
            cp_ref.thd.thd_grad_correction(want, step, case.cu, first, second)
            box.assert_holds(want, once(dtype, step_dtype))


def merged(
    out: torch.Tensor, lse: torch.Tensor, step: torch.Tensor, step_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float64: out, step [n, h, d], lse [n, h]."""
    out, lse, step, step_lse = (x.double() for x in (out, lse, step, step_lse))
    new = torch.logaddexp(lse, step_lse)
    parts = [
        torch.where((x == -INF)[..., None], 0.0, torch.exp(x - new)[..., None] * y)
        for x, y in ((lse, out), (step_lse, step))
    ]
    return parts[0] + parts[1], new


def merges(where: Where, case: Case) -> None:
    """Rows that were never written hold NaN; a step's empty rows too."""
    heads, dim = case.shape if len(case.shape) == 2 else (2, 4)
    step_dtype = FLOATS[case.seed % 4]
    dtype = FLOATS[case.seed // 4 % 4]
    lse = case.lse(heads, case.tokens, dtype=torch.float64 if case.seed % 3 == 0 else torch.float32)
    out = case.random(case.tokens, heads, dim, dtype=dtype)
    out[lse.t() == -INF] = NAN
    for rows, index in rows_of(case, where, case.tokens):
        step, step_lse = case.random(len(index), heads, dim, dtype=step_dtype), case.lse(heads, len(index))
        step[step_lse.t() == -INF] = NAN
        boxes = [case.boxed(where, x) for x in (out, lse, step, step_lse)]
        views = [box.view for box in boxes]
        where.kernels.merge_(views[0], views[1], views[2], views[3], rows)
        want_out, want_lse = out.clone(), lse.clone()
        new_out, new_lse = merged(out[index], lse.t()[index], step, step_lse.t())
        want_out[index], want_lse.t()[index] = new_out.to(dtype), new_lse.to(lse.dtype)
        boxes[0].assert_holds(want_out, NEAR[dtype])
        boxes[1].assert_holds(want_lse, NEAR[lse.dtype])


def additions(where: Where, case: Case) -> None:
    """Two pairs in one call, of any float dtypes: sums are wide, and rounded once."""
    dtype, step_dtype = FLOATS[case.seed % 4], FLOATS[case.seed // 4 % 4]
    for rows, index in rows_of(case, where, case.tokens):
        shapes = (case.shape, (2, 3))
        outs = [case.random(case.tokens, *shape, dtype=dtype) for shape in shapes]
        xs = [case.random(len(index), *shape, dtype=step_dtype) for shape in shapes]
        boxes = [case.boxed(where, out) for out in outs]
        steps = [case.boxed(where, x).view for x in xs]
        where.kernels.scatter_([box.view for box in boxes], steps, rows, add=True)
        wide = torch.float64 if torch.float64 in (dtype, step_dtype) else torch.float32
        for box, out, x in zip(boxes, outs, xs, strict=True):
            want = out.clone()
            want[index] = (out[index].to(wide) + x.to(wide)).to(dtype)
            box.assert_holds(want, once(dtype, step_dtype))


CHECKS: dict[str, Callable[[Where, Case], None]] = {
    check.__name__: check
    for check in (
        indices_and_lengths,
        reorders,
        partitions,
        halves,
        half_lses,
        valid_tokens,
        padding,
        lse_corrections,
        out_corrections,
        grad_corrections,
        merges,
        additions,
        rows_and_heads,
    )
}

MERGED_SHAPES = ((1, 128), (3, 128), (9, 64), (5, 32), (2, 192), (7, 96), (1, 256), (2, 264), (6, 16))  # heads, dim
ROW_SIZES = (1, 2, 3, 6, 14, 16, 18, 34, 62, 64, 96, 128, 250, 256, 768, 2046, 2048, 4098, 8190, 8192)


def row_sizes(where: Where, size: int) -> None:
    """Rows of any number of bytes, behind an odd offset or an even one."""
    cu = torch.tensor([0, 8, 8, 20, 24])
    for offset in (0, 1, 16):
        x = torch.randint(0, 255, (26, size), dtype=torch.uint8)
        view = Boxed.of(x, where.device, (), offset).view
        lengths = cu.to(where.device)
        got = where.kernels.gather([view], RowRule("reorder", "rank_order", lengths, a=2))[0]
        assert_same_bits(got, cp_ref.thd.thd_sequence_order_to_cp_rank_order(x, cu, 2))
        assert_same_bits(where.kernels.gather([got], RowRule("reorder", "sequence_order", lengths, a=2))[0], x)
        box, index = Boxed.of(x, where.device, (offset,), offset), torch.arange(24, 0, -2)
        want = x.index_copy(0, index, x[:12])
        where.kernels.scatter_([box.view], [view[:12]], index.to(where.device))
        box.assert_holds(want)


def merged_shapes(where: Where, heads: int, dim: int) -> None:
    """Heads and dims of models, that kernels may take by vectors or whole rows; all dtypes of the step."""
    for seed in (*range(12), 16, 25):
        gaps = ((0, 0), (16, 0), (8, 4))[(seed + seed // 3) % 3]  # rows apart, and then heads apart as well
        chunks, dtypes = (2, 0, 3), (torch.float32, torch.float32)
        case = Case(2, chunks, (8, 0, 5), seed % 2, (heads, dim), dtypes, torch.int32, gaps, seed // 6 * 16, seed)
        for check in (merges, out_corrections):
            check(where, case)


def many_sequences(where: Where, count: int) -> None:
    cu = torch.tensor([0, *accumulate(8 * (n % 3) for n in range(count))], dtype=torch.int32)
    total = int(cu[-1]) + 8
    x, lengths = torch.arange(total), cu.to(where.device)
    with where.use():
        got = cp_fast.thd.thd_sequence_order_to_cp_rank_order(x.to(where.device), lengths, 4)
        indices = cp_fast.thd.thd_get_partitioned_indices(lengths, total, 4, 1)
        back = cp_fast.thd.thd_cp_rank_order_to_sequence_order(got, lengths, 4)
        late = cp_fast.thd.thd_read_half_tensor(indices, lengths // 4, 1)
    want = cp_ref.thd.thd_sequence_order_to_cp_rank_order(x, cu, 4)
    assert torch.equal(got.cpu(), want)
    assert torch.equal(indices.cpu().long(), want.view(4, -1)[1])
    assert torch.equal(back.cpu(), x)
    assert torch.equal(late.cpu(), cp_ref.thd.thd_read_half_tensor(indices.cpu(), cu // 4, 1))
