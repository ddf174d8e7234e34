"""The kernels by PyTorch's operators: any device, no compiler, some passes over memory more than the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from cp_fast.movers.mover_protocol import RowRule, Rows, take
from cp_fast.movers.row_arithmetic import row_arithmetic
from cp_ref.batches.tensors import as_integers, wide_dtype

__all__ = [
    "LsePlace",
    "SequenceOfRow",
    "Targets",
    "TorchMovers",
    "assert_lengths",
    "assert_real_lengths",
    "correct_",
    "load",
    "locate",
    "log_add_exp",
    "merge_",
    "merge_padded_halves_",
    "put",
    "rank_lengths",
    "table_of",
    "targets_of",
]

# ---- rules for lengths
#
# Rules for lengths on a GPU, asserted where they lie: `torch._assert_async` waits for nothing.
#
# On a CPU the caller has checked them, and has said which sequence breaks the rule.


def assert_lengths(
    helper: str, lengths: torch.Tensor, divisor: int, total: int, tail_divisor: int = 1, from_zero: bool = True
) -> None:
    """The lengths begin at 0, do not decrease, divide, and end inside `total` rows with a tail that divides."""
    if lengths.device.type == "cpu":
        return
    wide = lengths.long()
    sizes, tail = wide.diff(), total - wide[-1]
    first = wide[0] == 0 if from_zero else wide[0] >= 0
    right = first & (sizes >= 0).all() & (sizes % divisor == 0).all() & (tail >= 0) & (tail % tail_divisor == 0)
    rule = (
        f"lengths must {'begin at 0' if from_zero else 'not be negative'}, not decrease, be multiples of {divisor}, "
        f"and end by {total} with a tail that is a multiple of {tail_divisor}"
    )
    torch.ops.aten._assert_async.msg(right, f"cp_fast {helper}: {rule}")


def assert_real_lengths(helper: str, real_lengths: torch.Tensor, lengths: torch.Tensor) -> None:
    """The real lengths begin at 0 and fit into the slots."""
    if lengths.device.type == "cpu":
        return
    real, slots = real_lengths.long().diff(), lengths.long().diff()
    right = (real_lengths[0] == 0) & (real >= 0).all() & (real <= slots).all()
    rule = "real lengths must begin at 0, not decrease, and fit into the slots"
    torch.ops.aten._assert_async.msg(right, f"cp_fast {helper}: {rule}")


# ---- rows
#
# A row map as tensors of row numbers, for PyTorch's operators: which row of a packed buffer each row of a part is, by
# arithmetic on cumulative lengths.
#
# Native and Numba kernels compute the same rows on the fly, with a search in the lengths for every block; `cp_ref.thd`
# lists them in loops over the sequences, and shares nothing with this file. Nothing here waits for a GPU: sizes come
# from shapes, and every row finds its sequence by a search in the cumulative lengths. The tail behind the last sequence
# is one more run of rows, number b.


class LsePlace(NamedTuple):
    """A row's place in its sequence, for an LSE [b, h, s]: int64 [n]."""

    sequence: torch.Tensor
    in_whole: torch.Tensor
    in_part: torch.Tensor


class Targets(NamedTuple):
    """Rows of a part, and the rows of the whole that they go to, which are distinct. On a GPU nobody waits for the
    number of rows that have a target: the others are masked, and written with what they hold.
    """

    part: Rows
    whole: Rows
    valid: torch.Tensor | None = None  # bool [n]; None for all
    place: LsePlace | None = None


def table_of(rule: RowRule, tokens: int) -> torch.Tensor:
    """The row of every row of the part, int64 [n]; -1 for none.

    >>> cu = torch.tensor([0, 8, 12])
    >>> table_of(RowRule("rows", "slice", cu, a=2, b=0), 14).tolist()  # Two chunks of each, and a tail.
    [0, 1, 6, 7, 8, 11, 12]
    >>> table_of(RowRule("rows", "rank_order", cu, a=2), 14).tolist()
    [0, 1, 6, 7, 8, 11, 12, 2, 3, 4, 5, 9, 10, 13]
    >>> table_of(RowRule("rows", "sequence_order", cu, a=2), 14).tolist()
    [0, 1, 7, 8, 9, 10, 2, 3, 4, 11, 12, 5, 6, 13]
    >>> table_of(RowRule("rows", "half", cu, a=1), 14).tolist()
    [4, 5, 6, 7, 10, 11, 13]
    >>> table_of(RowRule("rows", "unpad", torch.tensor([0, 4, 6]), torch.tensor([0, 3, 4]), a=8), 5).tolist()
    [0, 1, 2, -1, 3, -1, 4, -1]
    """
    unpads, (divisor, tail_divisor) = rule.kind == "unpad", rule.divisors()
    assert_lengths(rule.helper, rule.lengths, divisor, rule.a if unpads else tokens, tail_divisor)
    if unpads:
        assert rule.real is not None
        assert_lengths(rule.helper, rule.real, 1, tokens)
        assert_real_lengths(rule.helper, rule.real, rule.lengths)
    return _rows_of(rule, tokens)[0]


def targets_of(rows: Rows | RowRule, tokens: int) -> Targets:
    """Where a scatter or a merge writes.

    >>> targets_of(RowRule("rows", "in_half", torch.tensor([0, 4, 6]), a=1), 7).whole.tolist()
    [2, 3, 5]
    >>> targets_of(RowRule("rows", "valid", torch.tensor([1, 4, 6]), torch.tensor([0, 2, 3])), 7).whole.tolist()
    [1, 2, 4]
    """
    if not isinstance(rows, RowRule):
        return Targets(slice(None), rows)
    lengths = rows.lengths
    assert_lengths(rows.helper, lengths, rows.divisors()[0], tokens, from_zero=rows.kind != "valid")
    if rows.real is not None:
        assert_real_lengths(rows.helper, rows.real, lengths)
    found, located = _rows_of(rows, tokens)
    part = torch.arange(rows.count(tokens), device=lengths.device)
    valid, whole, part_start = found >= 0, part, located.start
    if rows.kind == "half":
        valid, whole, part_start = located.seq < len(lengths) - 1, found, located.start // 2
    place = LsePlace(located.seq, whole - located.start, part - part_start)
    if lengths.device.type != "cpu":
        return Targets(slice(None), whole, valid, place)
    return Targets(part[valid], whole[valid], None, LsePlace(*(x[valid] for x in place)))


class SequenceOfRow(NamedTuple):
    """For every row: its sequence, and where that begins and ends. All int64 [n]."""

    seq: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor


def locate(rows: torch.Tensor, lengths: torch.Tensor, total: int) -> SequenceOfRow:
    """The sequences of some rows of a buffer of `total` rows; number b is the tail.

    >>> located = locate(torch.tensor([0, 7, 8, 13]), torch.tensor([0, 8, 8, 12]), 14)
    >>> located.seq.tolist(), located.start.tolist(), located.stop.tolist()
    ([0, 0, 2, 3], [0, 0, 8, 12], [8, 8, 12, 14])
    """
    bounds = functional.pad(lengths.long(), (0, 1), value=total)
    seq = (torch.searchsorted(bounds[:-1], rows, right=True) - 1).clamp_(min=0)
    return SequenceOfRow(seq, bounds[seq], bounds[seq + 1])


def _rows_of(rule: RowRule, tokens: int) -> tuple[torch.Tensor, SequenceOfRow]:
    """The row of every row of the part, int64 [n], and the sequences that hold them."""
    keys, rows = row_arithmetic(lambda a, b: a // b, torch.where)
    i = torch.arange(rule.count(tokens), device=rule.lengths.device)
    at = locate(keys[rule.kind](i, tokens, rule.a), rule.lengths, rule.a if rule.kind == "unpad" else tokens)
    first = last = at.start
    if rule.real is not None:  # Real rows end with the buffer, in the tail.
        bounds = functional.pad(rule.real.long(), (0, 1), value=tokens)
        first, last = bounds[at.seq], bounds[at.seq + 1]
    tail = at.seq == len(rule.lengths) - 1
    return rows[rule.kind](i, at.start, at.stop, tail, first, last, tokens, rule.a, rule.b), at


def rank_lengths(
    real_lengths: torch.Tensor, lengths: torch.Tensor, cp_size: int, cp_rank: int, first_half: bool, second_half: bool
) -> torch.Tensor:
    """Cumulative numbers of real rows in a rank's early and/or late chunks, [b + 1] of real_lengths' dtype.

    >>> rank_lengths(torch.tensor([0, 5]), torch.tensor([0, 8]), 2, 1, True, True).tolist()
    [0, 3]
    """
    real, chunk = real_lengths.long().diff(), lengths.long().diff() // (2 * cp_size)
    held = torch.zeros_like(real_lengths, dtype=torch.int64)
    for number, counted in ((cp_rank, first_half), (2 * cp_size - 1 - cp_rank, second_half)):
        if counted:
            held[1:] += torch.minimum((real - number * chunk).clamp_(min=0), chunk)
    return held.cumsum(0).to(real_lengths.dtype)


# ---- merges
#
# Partial results into accumulators, by PyTorch's operators.


INF = float("inf")


def put(out: torch.Tensor, x: torch.Tensor, rows: Rows, valid: torch.Tensor | None = None) -> None:
    """out[rows] = x, rounded to out's dtype, where `valid`, bool [n]."""
    if isinstance(rows, slice):
        out[rows].copy_(x)
        return
    rows, x = rows.long(), x.to(out.dtype)
    if valid is not None:
        x = torch.where(valid.view(-1, *[1] * (x.ndim - 1)), x, out.index_select(0, rows))
    out.index_copy_(0, rows, x)


def merge_(out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor, at: Targets) -> None:
    """`Movers.merge_` of the part's rows: out_step [n, h, d], lse_step [n, h]."""
    old = take(lse.t(), at.whole)
    merged, new = _merged(take(out, at.whole), old, out_step, lse_step)
    put(out, merged, at.whole, at.valid)
    put(lse.t(), new, at.whole, at.valid)


def correct_(out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor, at: Targets) -> None:
    """`Movers.merge_` with `final`: out_step [n, h, d] of the part's rows, both LSEs whole."""
    total, step = _lse_of(lse, at, whole=True), _lse_of(lse_step, at, whole=False)
    wide = wide_dtype(out.dtype, out_step.dtype, lse.dtype, lse_step.dtype)
    weight = torch.exp(step.to(wide) - total.to(wide))[..., None]
    share = (weight * out_step).masked_fill((step == -INF)[..., None], 0.0)
    put(out, take(out, at.whole) + share, at.whole, at.valid)


def merge_padded_halves_(lse: torch.Tensor, lse_step: torch.Tensor, rows: RowRule) -> None:
    """LSEs [b, h, s] of halves into those of whole sequences."""
    if not lse_step.numel():
        return
    assert_lengths(rows.helper, rows.lengths, 2, torch.iinfo(torch.int64).max)
    half = (rows.lengths.long().diff() // 2)[:, None, None]
    offset = torch.arange(lse.shape[2], device=lse.device) - rows.a * half
    valid = (offset >= 0) & (offset < half)
    step = lse_step.gather(2, offset.clamp(0, lse_step.shape[2] - 1).expand(-1, lse.shape[1], -1))
    lse.copy_(torch.where(valid, torch.logaddexp(lse, step).to(lse.dtype), lse))


def _lse_of(lse: torch.Tensor, at: Targets, *, whole: bool) -> torch.Tensor:
    """The LSE of the part's rows, [n, h], from that of the whole tensor or of the part."""
    if lse.ndim == 2:
        return take(lse.t(), at.whole if whole else at.part)
    assert at.place is not None
    position = at.place.in_whole if whole else at.place.in_part
    if not lse.numel():  # All sequences are empty: these rows are the tail.
        return lse.new_full((len(position), lse.shape[1]), -INF)
    sequence = at.place.sequence.clamp(max=lse.shape[0] - 1)
    return lse.transpose(1, 2)[sequence, position.clamp(0, lse.shape[2] - 1)]


def log_add_exp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """log(exp(a) + exp(b)) of each pair, with the same bits at any position in the tensors.

    On a processor `torch.logaddexp` rounds the last values, which fill no whole vector register, differently. On a GPU
    it does not, and is one launch.

    >>> log_add_exp(torch.tensor([0.0, -INF, -INF]), torch.tensor([0.0, 2.0, -INF]))
    tensor([0.6931, 2.0000,   -inf])
    """
    if a.is_cuda:
        return torch.logaddexp(a, b)
    apart = (a - b).abs_().nan_to_num_(0.0)  # Of two infinities.
    return torch.maximum(a, b).add_(apart.neg_().exp_().log1p_())


def _merged(
    out: torch.Tensor, lse: torch.Tensor, out_step: torch.Tensor, lse_step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted mean [n, h, d] and the LSE [n, h] of two partial results, in the wide dtype."""
    wide = wide_dtype(out.dtype, lse.dtype, out_step.dtype, lse_step.dtype)
    old, step = lse.to(wide), lse_step.to(wide)
    new = log_add_exp(old, step)
    return _weighted(out.to(wide), old, new).add_(_weighted(out_step.to(wide), step, new)), new


def _weighted(out: torch.Tensor, lse: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """out * exp(lse - new); 0 where lse is -inf, for any out."""
    return (out * torch.exp(lse - new)[..., None]).masked_fill_((lse == -INF)[..., None], 0.0)


# ---- the protocol


class TorchMovers:
    """`cp_fast.movers.mover_protocol.Movers`, which says what each method does."""

    name = "torch"

    def row_indices(self, rows: RowRule, tokens: int) -> torch.Tensor:
        return table_of(rows, tokens).to(rows.lengths.dtype)

    def gather(self, xs: Sequence[torch.Tensor], rows: Rows | RowRule) -> list[torch.Tensor]:
        if isinstance(rows, slice):
            return [x[rows] for x in xs]
        index = table_of(rows, xs[0].shape[0]) if isinstance(rows, RowRule) else rows
        return [as_integers(x).index_select(0, index).view(x.dtype) for x in xs]

    def scatter_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows | RowRule, add: bool = False
    ) -> None:
        if not outs:
            return
        at = targets_of(rows, outs[0].shape[0])
        for out, x in zip(outs, xs, strict=True):
            wide = wide_dtype(out.dtype, x.dtype)
            if add and isinstance(at.whole, slice) and out.dtype == wide:
                out[at.whole].add_(x)
            elif add:
                put(out, take(out, at.whole).to(wide).add(take(x, at.part)), at.whole, at.valid)
            else:
                same = out.dtype == x.dtype
                put(as_integers(out) if same else out, take(as_integers(x) if same else x, at.part), at.whole, at.valid)

    def gather_heads(
        self, xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int], heads: Sequence[int]
    ) -> list[torch.Tensor]:
        found, parts = list[torch.Tensor](), len(first_heads) // len(xs)
        for number, (x, size) in enumerate(zip(xs, heads, strict=True)):
            moved = as_integers(x)
            count = len(moved[rows]) if isinstance(rows, slice) else len(rows)
            result = moved.new_empty(parts, count, size, *x.shape[2:])
            for box, first in zip(result, first_heads[number * parts :], strict=False):
                box.copy_(take(moved[:, first : first + size], rows))
            found.append(result.view(x.dtype))
        return found

    def scatter_heads_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int]
    ) -> None:
        ranges = iter(first_heads)
        for out, x in zip(outs, xs, strict=True):
            for part, first in zip(as_integers(x), ranges, strict=False):
                self.scatter_([as_integers(out)[:, first : first + x.shape[2]]], [part], rows)

    def merge_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        out_step: torch.Tensor,
        lse_step: torch.Tensor,
        rows: Rows | RowRule,
        final: bool = False,
    ) -> None:
        if lse.ndim == 3 and not final:
            assert isinstance(rows, RowRule)
            assert not out.numel(), "with a padded LSE only LSEs are merged"
            merge_padded_halves_(lse, lse_step, rows)
            return
        at = targets_of(rows, out.shape[0])
        step = take(out_step, at.part)
        if final:
            correct_(out, lse, step, lse_step, at)
        else:
            merge_(out, lse, step, take(lse_step.t(), at.part), at)


def load(device: str) -> TorchMovers:
    """The kernels for a device type: one for all."""
    return TorchMovers()
