"""The global tensors of a case, and the call's arguments.

    legend   b = batch, s = slots per sequence, t = packed slots with the tail, h = heads

Every slot that is no real token (padding, tail) holds NaN in q, k, v, dout and dlse: nothing may ever read it. Where a
query sees nothing dlse is -inf: what a loss such as the mean of lse squared sends back from an lse of -inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from conformance.case import Case, dtype_of, score_features, score_mod_of, wide_dtype
from conformance.scores import PairPlaces
from cp_ref.problems.arguments import OF_PLACES, SCORE_OPTIONS
from cp_ref.problems.cuts import Cut, planned_cut, planned_positions
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.problem import Sequence as SequenceLengths

__all__ = [
    "DiagonalBand",
    "GlobalTensors",
    "Scope",
    "assemble",
    "attention_arguments",
    "batch_axis",
    "build",
    "cumulative",
    "global_rows",
    "in_format",
    "marked_slots",
    "packed_rows",
    "plan_arguments",
    "positions",
    "real_tokens",
    "scopes",
    "seen",
    "seen_table",
    "sequence_axis",
    "slice_rows_of",
    "take_slice",
    "unsharded",
    "where",
]

# ---- who sees whom, by the definition: no planner has a part in it


class Scope(NamedTuple):
    """Queries and keys that see each other, and none besides: a sequence, or with areas all real tokens."""

    rows: Any  # an index that takes them from q and out
    keys: Any  # from k and v
    lse_rows: Any  # from lse
    visible: torch.Tensor  # bool [queries, keys]
    places: PairPlaces


class DiagonalBand(NamedTuple):
    """The visible pairs of one sequence: lo <= j - i <= hi, None for unbounded."""

    lo: int | None
    hi: int | None

    def row(self, i: int, k0: int, k1: int) -> tuple[int, int]:
        """The keys of [k0, k1) that query i sees, as a span [start, stop); empty when stop <= start.

        >>> DiagonalBand(-2, 0).row(4, 0, 8)
        (2, 5)
        """
        start = k0 if self.lo is None else max(k0, i + self.lo)
        stop = k1 if self.hi is None else min(k1, i + self.hi + 1)
        return start, stop

    @staticmethod
    def of(problem: Problem, lengths: SequenceLengths) -> DiagonalBand:
        """That of a sequence of a problem without areas, by its mask and window.

        >>> one = SequenceLengths(7, 7, 8, 8)
        >>> DiagonalBand.of(Problem(2, (one,), attn_mask_type="padding_causal"), one)
        DiagonalBand(lo=None, hi=0)
        """
        left, right = problem.window_size
        right = 0 if problem.causal else right
        shift = lengths.len_kv - lengths.len_q if problem.bottom_right else 0
        return DiagonalBand(None if left < 0 else shift - left, None if right < 0 else shift + right)


def seen(problem: Problem) -> Iterator[tuple[int, Sequence[int]]]:
    """(query, its keys) as rows of the packed buffers, sequence after sequence with their padding; in bshd and sbhd,
    batch after batch. A query may come several times, with other keys.

    >>> from cp_ref.schedules.problem import Sequence
    >>> one = Problem(1, (Sequence(2, 3, 4, 4),), qkv_format="thd", areas=((0, 4, 0, 4, 0, 1),))
    >>> [(i, list(keys)) for i, keys in seen(one)]  # rows 2 and 3 are padding, and so is key 3
    [(0, [0, 1]), (1, [1, 2])]
    """
    if problem.areas is None:
        for s, q, k in zip(problem.sequences, problem.starts_q, problem.starts_kv, strict=False):
            band = DiagonalBand.of(problem, s)
            for i in range(s.len_q):
                start, stop = band.row(i, 0, s.len_kv)
                yield q + i, range(k + start, k + max(start, stop))
        return
    queries, keys = (set(_tokens(problem, side)) for side in ("q", "kv"))
    for q_start, q_stop, k_start, k_stop, left, right in problem.areas:
        for i in range(q_start, q_stop):
            aligned = i + k_stop - q_stop
            first = k_start if left < 0 else max(k_start, aligned - left)
            last = k_stop - 1 if right < 0 else min(k_stop - 1, aligned + right)
            if i in queries:
                yield i, [j for j in range(first, last + 1) if j in keys]


def seen_table(problem: Problem, rows_q: int, rows_kv: int) -> torch.Tensor:
    """Which packed query row sees which packed key row: bool [rows_q, rows_kv]."""
    visible = torch.zeros(rows_q, rows_kv, dtype=torch.bool)
    for row, keys in seen(problem):
        visible[row, slice(keys.start, keys.stop) if isinstance(keys, range) else keys] = True
    return visible


def scopes(problem: Problem, device: torch.device | str) -> Iterator[Scope]:
    """All scopes of a problem; padding is in none."""
    if problem.areas is not None:
        rows, keys = (torch.tensor(_tokens(problem, side), dtype=torch.int64, device=device) for side in ("q", "kv"))
        visible = seen_table(problem, problem.starts_q[-1], problem.starts_kv[-1])
        places = PairPlaces(*(x.to(device) for x in _places(problem)))
        yield Scope((rows,), (keys,), (slice(None), rows), visible.to(device)[rows][:, keys], places)
        return
    for n, (s, q, k) in enumerate(zip(problem.sequences, problem.starts_q, problem.starts_kv, strict=False)):
        band = DiagonalBand.of(problem, s)
        offset = torch.arange(s.len_kv, device=device)[None] - torch.arange(s.len_q, device=device)[:, None]
        visible = torch.ones_like(offset, dtype=torch.bool)
        if band.lo is not None:
            visible &= offset >= band.lo
        if band.hi is not None:
            visible &= offset <= band.hi
        rows, keys = _index(problem, n, q, s.len_q), _index(problem, n, k, s.len_kv)
        lse_rows = (slice(None), *rows) if problem.qkv_format == "thd" else (n, slice(None), slice(0, s.len_q))
        positions = (torch.arange(length, device=device) for length in (s.len_q, s.len_kv))
        sequence, shift = (torch.full((1, 1), x, device=device) for x in (n, s.len_kv - s.len_q))
        q_idx, kv_idx = positions
        yield Scope(rows, keys, lse_rows, visible, PairPlaces(sequence, q_idx[:, None], kv_idx, shift))


def _places(problem: Problem) -> PairPlaces:
    """Those of all real tokens. A pair of two sequences has none, and is hidden."""
    rows = [(n, i, s.len_kv - s.len_q) for n, s in enumerate(problem.sequences) for i in range(s.len_q)]
    columns = [j for s in problem.sequences for j in range(s.len_kv)]
    sequence, q_idx, shift = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return PairPlaces(sequence[:, None], q_idx[:, None], torch.tensor(columns, dtype=torch.int64), shift[:, None])


def _index(problem: Problem, n: int, start: int, length: int) -> Any:
    if problem.qkv_format == "thd":
        return (slice(start, start + length),)
    return (n, slice(0, length)) if problem.qkv_format == "bshd" else (slice(0, length), n)


def _tokens(problem: Problem, side: str) -> list[int]:
    """The packed rows of real tokens."""
    places = zip(problem.starts(side), problem.lengths.tokens(side), strict=False)
    return [row for start, length in places for row in range(start, start + length)]


# ---- global tensors, and arguments


@dataclass(frozen=True)
class GlobalTensors:
    """The global tensors that all ranks together compute on. `real_*` mark the real tokens: [b, s], [s, b] or [t]."""

    q: torch.Tensor  # [b, s_q, h_q, d_qk], [s_q, b, h_q, d_qk] or [t_q, h_q, d_qk], in the problem's dtype.
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor  # Like q, with d_v.
    dlse: torch.Tensor  # [b, h_q, s_q] or [h_q, t_q]; float32, or float64 for float64 problems.
    softmax_offset: torch.Tensor | None  # [h_q], in dlse's dtype.
    real_q: torch.Tensor
    real_kv: torch.Tensor


def build(case: Case, device: str = "cpu") -> GlobalTensors:
    """The case's tensors, equal for equal cases, whatever the device."""
    p = case.problem
    dtype, wide = dtype_of(p.dtype), wide_dtype(p.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    real_q, real_kv = real_tokens(case, "q"), real_tokens(case, "kv")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def rows(real: torch.Tensor, heads: int, dim: int, magnitude: float) -> torch.Tensor:
        x = normal(*real.shape, heads, dim) * magnitude
        return x.masked_fill(~real[..., None, None], float("nan")).to(device, dtype)

    q = rows(real_q, p.heads_q, p.d_qk, case.magnitude)
    k = rows(real_kv, p.heads_kv, p.d_qk, case.magnitude)
    v = rows(real_kv, p.heads_kv, p.d_v, 1.0)
    dout = rows(real_q, p.heads_q, p.d_v, 1.0)
    dlse = normal(*real_q.shape, p.heads_q).masked_fill(~real_q[..., None], float("nan"))
    if p.softmax_type == "vanilla":
        dlse.masked_fill_(_blind(case)[..., None], float("-inf"))
    offset = normal(p.heads_q).to(device, wide) if p.softmax_type == "learnable" else None
    dlse = rows_to_lse(dlse, p.qkv_format).to(device, wide).contiguous()
    return GlobalTensors(q, k, v, dout, dlse, offset, real_q.to(device), real_kv.to(device))


def real_tokens(case: Case, side: str) -> torch.Tensor:
    """Which slots hold a real token: bool [b, s] (bshd), [s, b] (sbhd) or [t + tail] (thd); side is "q" or "kv"."""
    lengths = case.problem.lengths
    per_sequence = [torch.arange(n) < m for n, m in zip(lengths.slots(side), lengths.tokens(side), strict=True)]
    return marked_slots(case, side, per_sequence, tail=False)


def marked_slots(case: Case, side: str, per_sequence: list[torch.Tensor], *, tail: bool) -> torch.Tensor:
    """A mark for each slot, axes as in `real_tokens`: bool [slots] of each sequence, and that of the tail."""
    if case.problem.qkv_format == "thd":
        return torch.cat([*per_sequence, torch.full((case.tail(side),), tail)])
    rows = torch.stack(per_sequence)
    return rows if case.problem.qkv_format == "bshd" else rows.t().contiguous()


def _blind(case: Case) -> torch.Tensor:
    """Which queries are real and see nothing; axes as in `real_tokens`."""
    problem, blind = case.problem, real_tokens(case, "q")
    packed = {"thd": blind, "bshd": blind, "sbhd": blind.t()}[problem.qkv_format].flatten()
    packed[[row for row, keys in seen(problem) if len(keys)]] = False
    return packed.view(blind.t().shape).t() if problem.qkv_format == "sbhd" else packed.view(blind.shape)


def sequence_axis(qkv_format: str) -> int:
    """The axis of q, k, v that counts tokens."""
    return 1 if qkv_format == "bshd" else 0


def batch_axis(qkv_format: str) -> int | None:
    """The axis of q, k, v that counts sequences; None in thd."""
    return {"bshd": 0, "sbhd": 1, "thd": None}[qkv_format]


def rows_to_lse(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """From the format's rows, [b, s, h], [s, b, h] or [t, h], to the LSE's axes: [b, h, s] or [h, t]."""
    return x.permute({"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "thd": (1, 0)}[qkv_format])


def packed_rows(case: Case, x: torch.Tensor) -> torch.Tensor:
    """The format's rows, sequence after sequence: [rows, h, d]."""
    fmt = case.problem.qkv_format
    return x if fmt == "thd" else (x.transpose(0, 1) if fmt == "sbhd" else x).flatten(0, 1)


def in_format(case: Case, rows: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """The inverse of `packed_rows`, in the dtype of `model` and with NaN where it has NaN."""
    if case.problem.qkv_format == "sbhd" and rows.numel():
        rows = rows.unflatten(0, (len(case.problem.sequences), -1)).transpose(0, 1)
    return rows.reshape(model.shape).to(model.dtype).masked_fill(model.isnan(), float("nan"))


def attention_arguments(problem: Problem, device: str) -> dict[str, Any]:
    """The problem arguments of `attention` (no tensors, no offset). Lengths equal to their default are left
    out, and so are options of scores of places, which others may not have."""
    arguments: dict[str, Any] = {
        "qkv_format": problem.qkv_format,
        **{name: getattr(problem, name) for name in SCORE_OPTIONS if name not in OF_PLACES},
        **{name: getattr(problem, name) for name in score_features(problem)},
    }
    if "score_mod" in arguments:
        arguments["score_mod"] = score_mod_of(problem)
    if problem.areas is None:
        arguments |= {"attn_mask_type": problem.attn_mask_type, "window_size": problem.window_size}
    else:
        arguments["areas"] = torch.tensor(problem.areas, dtype=torch.int64).reshape(-1, 6)
    if problem.qkv_format != "thd" and not problem.attn_mask_type.startswith("padding"):
        return arguments
    lens_q, lens_kv = cumulative(problem, "len_q"), cumulative(problem, "len_kv")
    lengths = {"cu_seqlens_q": lens_q}
    if lens_kv != lens_q:
        lengths["cu_seqlens_kv"] = lens_kv
    if problem.qkv_format == "thd":
        slots_q, slots_kv = cumulative(problem, "slots_q"), cumulative(problem, "slots_kv")
        if slots_q != lens_q:
            lengths["cu_seqlens_q_padded"] = slots_q
        if slots_kv != (slots_q if lens_kv == lens_q else lens_kv):
            lengths["cu_seqlens_kv_padded"] = slots_kv
    return arguments | {name: torch.tensor(cu, dtype=torch.int32, device=device) for name, cu in lengths.items()}


def plan_arguments(problem: Problem, device: str = "cpu") -> dict[str, Any]:
    """The arguments of `make_plan` and `supports` without `cp`."""
    sizes: dict[str, Any] = {name: getattr(problem, name) for name in ("heads_q", "heads_kv", "d_qk", "d_v")}
    if problem.qkv_format != "thd":
        sizes |= {"batch_size": len(problem.sequences)}
        sizes |= {"seqlen_q": problem.sequences[0].slots_q, "seqlen_kv": problem.sequences[0].slots_kv}
    types = {"dtype": dtype_of(problem.dtype), "device": torch.device(device)}
    table = {} if isinstance(problem.layout, str) else {"layout": list(problem.layout)}
    return attention_arguments(problem, device) | sizes | types | table


def cumulative(problem: Problem, name: str) -> list[int]:
    """cu_seqlens of a field of its sequences."""
    return list(accumulate((getattr(s, name) for s in problem.sequences), initial=0))


# ---- slices of ranks
#
# From global tensors to the ranks' slices and back, by the specified ownership instead of the implementation's `shard`
# and `unshard`.
#
#     lined up     [rows, ...]: one row after the other along the sequence axis; where a layout cuts the sequences of
#     bshd and sbhd differently, all rows of the first sequence, then those of the second lengthened   the same, with
#     rows behind them until every slice is full


@lru_cache(maxsize=256)
def _cut(problem: Problem, side: str, tail: int) -> Cut:
    return planned_cut(problem, side, tail)


def global_rows(case: Case, side: str, rank: int) -> tuple[int, ...]:
    """The rows of the lengthened global tensor that a rank's local rows are, in order; its part of the tail last."""
    return _global_rows(case.problem, side, case.tail(side), rank)


@lru_cache(maxsize=256)
def _global_rows(problem: Problem, side: str, tail: int, rank: int) -> tuple[int, ...]:
    return tuple(_cut(problem, side, tail).of(rank).tolist())


def slice_rows_of(case: Case, side: str) -> int:
    """How many rows the sequence axis of every rank's slice has."""
    return _cut(case.problem, side, case.tail(side)).rows


def positions(problem: Problem, rank: int) -> list[int] | list[list[int]]:
    """The position inside its sequence of each of a rank's query rows: what `position_ids` has to say."""
    return planned_positions(problem, rank).tolist()


def take_slice(case: Case, x: torch.Tensor, side: str, rank: int, *, lse: bool = False) -> torch.Tensor:
    """A rank's slice of a global tensor; NaN, or 0 in integers, where it has no row of it. lse: x has an LSE's axes."""
    cut, axes = _cut(case.problem, side, case.tail(side)), _axes(case.problem, lse)
    rows = _lined_up(x, cut, axes)
    missing = rows.new_full(
        (cut.cp_size * cut.rows * (cut.batch or 1) - len(rows), *rows.shape[1:]),
        float("nan") if x.is_floating_point() else 0,
    )
    index = torch.tensor(global_rows(case, side, rank), dtype=torch.int64, device=x.device)
    return _in_format(torch.cat([rows, missing]).index_select(0, index), cut, axes)


def unsharded(case: Case, x: torch.Tensor, side: str) -> torch.Tensor:
    """The result of `unshard` for the slices of x. It is x, except for thd with a tail: zeros fill x up to
    the rows of all slices, or x ends before its tail.
    """
    tail = case.tail(side)
    cut = _cut(case.problem, side, tail)
    if not tail:
        return x
    if cut.rows == _cut(case.problem, side, 0).rows:  # the tail is no longer than what fills the slices up
        return x[: len(x) - tail]
    return torch.cat([x, x.new_zeros(cut.cp_size * cut.rows - len(x), *x.shape[1:])])


def assemble(case: Case, parts: list[torch.Tensor], side: str, *, lse: bool = False) -> torch.Tensor:
    """The global tensor of the ranks' local ones. Each part must have all rows of its rank."""
    p = case.problem
    cut, axes = _cut(p, side, case.tail(side)), _axes(p, lse)
    index = [row for rank in range(p.cp_size) for row in global_rows(case, side, rank)]
    order = torch.tensor(index, dtype=torch.int64, device=parts[0].device).argsort()[: cut.size * (cut.batch or 1)]
    return _in_format(torch.cat([_lined_up(part, cut, axes) for part in parts]).index_select(0, order), cut, axes)


def where(case: Case, side: str, batch: int | None, row: int) -> str:
    """A row of the global tensor in words: its sequence, position and rank. For thd, `batch` has to be None."""
    p = case.problem
    cut, starts = _cut(p, side, case.tail(side)), p.starts(side)
    lined_up = row if cut.batch is None or batch is None else starts[batch] + row
    rank = next(r for r in range(p.cp_size) if lined_up in global_rows(case, side, r))
    what = "query" if side == "q" else "key"
    if batch is None:
        if row >= starts[-1]:
            return f"tail slot {row - starts[-1]} (rank {rank})"
        batch = next(n for n in range(len(p.sequences)) if starts[n] <= row < starts[n + 1])
        row -= starts[batch]
    padding = row >= p.lengths.tokens(side)[batch]
    return f"sequence {batch} {'padding slot' if padding else what} {row} (rank {rank})"


def _axes(problem: Problem, lse: bool) -> tuple[int, int | None]:
    """The axes of tokens and of sequences."""
    batch = batch_axis(problem.qkv_format)
    return (-1, None if batch is None else 0) if lse else (sequence_axis(problem.qkv_format), batch)


def _lined_up(x: torch.Tensor, cut: Cut, axes: tuple[int, int | None]) -> torch.Tensor:
    tokens, batch = axes
    if cut.batch is None or batch is None:
        return x.movedim(tokens, 0)
    return x.movedim((batch, tokens), (0, 1)).flatten(0, 1)


def _in_format(rows: torch.Tensor, cut: Cut, axes: tuple[int, int | None]) -> torch.Tensor:
    """The inverse of `_lined_up`."""
    tokens, batch = axes
    if cut.batch is None or batch is None:
        return rows.movedim(0, tokens).contiguous()
    x = rows.unflatten(0, (cut.batch, len(rows) // cut.batch))
    return x.movedim((0, 1), (batch, tokens)).contiguous()
