"""What every implementation of the kernels has to do, for the CPU, the simulator and the GPU alike.

Movers are compared with `cp_ref.thd` bit by bit, in guarded memory, with odd strides and NaN in padding; merges within
the rounding of the dtype they are stored in. Each check takes a `Where` and a drawn `Case`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

import cp_fast
import cp_ref
from cp_fast.kernels import kernels, use
from cp_fast.kernels.base import Kernels
from tests.cp_fast.kernels.memory import Boxed, assert_same_bits

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


@dataclass(frozen=True)
class Where:
    """An implementation on a device."""

    name: str
    device: str

    @property
    def kernels(self) -> Kernels:
        return kernels(self.device, self.name)

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


# ---- movers


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
    got = where.kernels.partition([case.boxed(where, x).view, ids.to(where.device)], cu, case.cp_size, case.rank)
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
        box.assert_holds(want)
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


# ---- sums and merges


def lse_shape(case: Case, packed: bool, half: bool = False, heads: int = 2) -> tuple[int, ...]:
    """Of an LSE of the local lengths, or of their halves; a padded one has columns to spare."""
    if packed:
        return heads, case.tokens // 2 if half else case.tokens
    longest = max(case.slots, default=0)
    return len(case.slots), heads, (longest // 2 if half else longest) + 1 + half


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
            box.assert_holds(want)


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


def merges(where: Where, case: Case) -> None:
    """Rows that were never written hold NaN; a step's empty rows too."""
    heads, dim = case.shape if len(case.shape) == 2 else (2, 4)
    step_dtype = FLOATS[case.seed % 4]
    dtype = torch.float64 if case.seed % 3 == 0 else torch.float32
    near = NEAR[dtype]
    lse = case.lse(heads, case.tokens, dtype=dtype)
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
        want_out[index], want_lse.t()[index] = new_out.to(dtype), new_lse.to(dtype)
        boxes[0].assert_holds(want_out, near)
        boxes[1].assert_holds(want_lse, near)


def merges_of_halves(where: Where, case: Case) -> None:
    heads, dim = case.shape if len(case.shape) == 2 else (2, 4)
    cu, step_dtype = where.lengths(case.cu, case.length_dtype), FLOATS[case.seed % 4]
    out = case.random(case.tokens, heads, dim)
    step = case.random(case.tokens // 2, heads, dim, dtype=step_dtype)
    for packed in (True, False):
        lse, step_lse = case.lse(*lse_shape(case, packed, heads=heads)), case.lse(*lse_shape(case, packed, True, heads))
        boxes = [case.boxed(where, x) for x in (out, lse, step, step_lse)]
        views = [box.view for box in boxes]
        where.kernels.merge_halves_(views[0], views[1], views[2], views[3], cu, packed)
        want_out, want_lse = out.clone(), lse.clone()
        for s, (start, length) in enumerate(zip(case.cu.tolist(), case.slots, strict=False)):
            half = length // 2
            of, of_step = slice(start + half, start + length), slice(start // 2, start // 2 + half)
            old = lse[:, of] if packed else lse[s, :, half:length]
            new = step_lse[:, of_step] if packed else step_lse[s, :, :half]
            new_out, new_lse = merged(out[of], old.t(), step[of_step], new.t())
            want_out[of] = new_out.float()
            target = want_lse[:, of] if packed else want_lse[s, :, half:length]
            target.copy_(new_lse.t())
        boxes[0].assert_holds(want_out, NEAR[torch.float32])
        boxes[1].assert_holds(want_lse, NEAR[torch.float32])


def additions(where: Where, case: Case) -> None:
    """Two pairs in one call, of any float dtypes: sums are wide, and rounded once."""
    dtype, step_dtype = FLOATS[case.seed % 4], FLOATS[case.seed // 4 % 4]
    for rows, index in rows_of(case, where, case.tokens):
        shapes = (case.shape, (2, 3))
        outs = [case.random(case.tokens, *shape, dtype=dtype) for shape in shapes]
        xs = [case.random(len(index), *shape, dtype=step_dtype) for shape in shapes]
        boxes = [case.boxed(where, out) for out in outs]
        steps = [case.boxed(where, x).view for x in xs]
        where.kernels.add_rows_([box.view for box in boxes], steps, rows)
        wide = torch.float64 if torch.float64 in (dtype, step_dtype) else torch.float32
        for box, out, x in zip(boxes, outs, xs, strict=True):
            want = out.clone()
            want[index] = (out[index].to(wide) + x.to(wide)).to(dtype)
            box.assert_holds(want)


def rows_and_heads(where: Where, case: Case) -> None:
    """take_rows, put_rows_, heads_to_front, heads_to_back_."""
    use, all_heads, heads = where.kernels, 6, 2
    dtype = case.dtypes[0]
    for rows, index in rows_of(case, where, case.tokens):
        x, y = case.random(case.tokens, *case.shape, dtype=dtype), case.random(case.tokens, 5, dtype=case.dtypes[1])
        boxes = case.boxed(where, x), case.boxed(where, y)
        for got, source in zip(use.take_rows([box.view for box in boxes], rows), (x, y), strict=True):
            assert_same_bits(got, source.index_select(0, index))
        news = [case.random(len(index), *source.shape[1:], dtype=source.dtype) for source in (x, y)]
        use.put_rows_([box.view for box in boxes], [case.boxed(where, new).view for new in news], rows)
        for box, source, new in zip(boxes, (x, y), news, strict=True):
            want = source.clone()
            bytes_of(want)[index] = bytes_of(new)
            box.assert_holds(want)

        whole = case.random(case.tokens, all_heads, 4, dtype=dtype)
        box = case.boxed(where, whole)
        overlapping = [0, 2, 2, 4]
        want = torch.stack([bytes_of(whole)[index][:, n : n + heads] for n in overlapping])
        assert torch.equal(bytes_of(use.heads_to_front(box.view, rows, overlapping, heads).cpu()), want)
        parts, distinct = case.random(2, len(index), heads, 4, dtype=dtype), [4, 1]
        use.heads_to_back_(box.view, parts.to(where.device), rows, distinct, False)
        want = whole.clone()
        for part, n in zip(parts, distinct, strict=True):
            bytes_of(want)[index, n : n + heads] = bytes_of(part)
        box.assert_holds(want)

        total = case.random(case.tokens, all_heads, 4)
        parts = case.random(4, len(index), heads, 4, dtype=FLOATS[case.seed % 3])
        box = case.boxed(where, total)
        use.heads_to_back_(box.view, parts.to(where.device), rows, overlapping, True)
        exact = total.double()
        for part, n in zip(parts, overlapping, strict=True):
            exact[index, n : n + heads] += part.double()
        box.assert_holds(exact.float(), NEAR[torch.float32])


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """8-bit dtypes as integers, for operators that do not know them."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


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
        merges_of_halves,
        additions,
        rows_and_heads,
    )
}


# ---- sizes


ROW_SIZES = (1, 2, 3, 6, 14, 16, 18, 34, 62, 64, 96, 128, 250, 256, 768, 2046, 2048, 4098, 8190, 8192)


def row_sizes(where: Where, size: int) -> None:
    """Rows of any number of bytes, behind an odd offset or an even one."""
    cu = torch.tensor([0, 8, 8, 20, 24])
    for offset in (0, 1, 16):
        x = torch.randint(0, 255, (26, size), dtype=torch.uint8)
        view = Boxed.of(x, where.device, (), offset).view
        got = where.kernels.reorder([view], cu.to(where.device), 2, True)[0]
        assert_same_bits(got, cp_ref.thd.thd_sequence_order_to_cp_rank_order(x, cu, 2))
        assert_same_bits(where.kernels.reorder([got], cu.to(where.device), 2, False)[0], x)
        box, index = Boxed.of(x, where.device, (offset,), offset), torch.arange(24, 0, -2)
        want = x.index_copy(0, index, x[:12])
        where.kernels.put_rows_([box.view], [view[:12]], index.to(where.device))
        box.assert_holds(want)


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
