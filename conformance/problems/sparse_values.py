"""Values of problems of sparse attention: indices of every kind, an indexer's tensors; and how results are judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from conformance.case import Case, dtype_of, wide_dtype
from conformance.checks.budgets import Tensors
from conformance.checks.reference import chosen_keys, dense_index_scores, dense_select_keys, documents_of
from conformance.tensors import packed_rows, real_tokens, take_slice

__all__ = [
    "NAMINGS",
    "EntryRows",
    "as_lse",
    "chosen_pairs",
    "entry_rows",
    "indexer_of",
    "indices_of",
    "misjudged",
    "own_entries",
    "rough",
]

NAMINGS = ("mixed", "any", "visible", "shuffled", "twice", "beyond", "all", "nothing")
"""What indices name, "mixed" for rows of each kind: positions from -3 to beyond the document; visible keys, shuffled;
hidden ones too; two keys, again and again; what the document has not; all keys in order; nothing.
"""

# ---- tensors


class EntryRows(NamedTuple):
    """The compressed keys of a batch, document after document, by the definition: no planner has a part in it."""

    documents: torch.Tensor  # int64 [n]
    numbers: torch.Tensor  # int64 [n]: of the window in its document
    last: torch.Tensor  # int64 [n]: the packed row of the window's last token


def entry_rows(case: Case, rate: int) -> EntryRows:
    """The entries of windows of `rate` tokens; a window that is not full gives none."""
    found = [
        (n, w, start + (w + 1) * rate - 1)
        for n, (s, start) in enumerate(zip(case.problem.sequences, case.problem.starts_q, strict=False))
        for w in range(s.len_q // rate)
    ]
    return EntryRows(*torch.tensor(found, dtype=torch.int64).reshape(-1, 3).unbind(1))


def own_entries(case: Case, rate: int, rank: int) -> torch.Tensor:
    """The entries whose last token the rank has: bool [n]."""
    rows, batch = torch.arange(1, case.rows("q") + 1), len(case.problem.sequences)  # 0: no row
    if case.problem.qkv_format != "thd":
        rows = rows.view(batch, -1) if case.problem.qkv_format == "bshd" else rows.view(batch, -1).t()
    return torch.isin(entry_rows(case, rate).last + 1, take_slice(case, rows, "q", rank))


def indices_of(
    case: Case, naming: str, top_k: int, *, by_head: bool, draw: torch.Generator, rate: int | None = None
) -> torch.Tensor:
    """Global indices of a case, in its format: [..., top_k], or [..., h_kv, top_k] by head. Padding and the tail name
    keys too, which nobody may read.

    naming: one of `NAMINGS`. rate: of compressed keys.
    """
    p, heads = case.problem, case.problem.heads_kv if by_head else 1
    found = torch.randint(0, 4, (case.rows("q"), heads, top_k), generator=draw, dtype=torch.int32)
    for rows, _, visible in documents_of(p, rate=rate):
        shape = (visible.shape[0], heads)
        kinds = dict(_named(visible, shape, top_k, draw))
        if naming != "mixed":
            found[rows] = kinds[naming]
            continue
        which = torch.randint(0, len(kinds), shape, generator=draw)
        for n, made in enumerate(kinds.values()):
            found[rows] = torch.where((which == n)[..., None], made, found[rows])
    packed = found if by_head else found[:, 0]
    if p.qkv_format == "thd":
        return packed
    packed = packed.unflatten(0, (len(p.sequences), -1))
    return packed.transpose(0, 1).contiguous() if p.qkv_format == "sbhd" else packed


def _named(
    visible: torch.Tensor, shape: tuple[int, int], top_k: int, draw: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Indices [n, h, top_k] of each kind, for a document whose rows see these keys, bool [n, m]."""
    keys = visible.shape[1]

    def between(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), (*shape, top_k), generator=draw, dtype=torch.int32)

    def some(order: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(order[..., :top_k], (0, max(0, top_k - keys)), value=-1)
        return padded.to(torch.int32)

    shuffled = torch.rand(*shape, keys, generator=draw).argsort(-1)
    hidden_last = (~visible[:, None].expand(*shape, keys)).gather(-1, shuffled)
    ordered = shuffled.gather(-1, hidden_last.int().sort(stable=True, dim=-1).indices)
    extremes = torch.tensor([2**31 - 1, -(2**31), keys, -1], dtype=torch.int32)[between(0, 4).long()]
    yield "any", between(-3, keys + 3)
    yield "visible", some(ordered).masked_fill(some(hidden_last.int().sort(dim=-1).values) != 0, -1)
    yield "shuffled", some(shuffled)
    yield "twice", between(0, min(keys, 2))
    yield "beyond", torch.where(between(0, 2) == 0, extremes, between(keys, 2 * keys + 2))
    yield "all", some(torch.arange(keys).expand(*shape, keys))
    yield "nothing", between(-1, 0)


def chosen_pairs(case: Case, indices: torch.Tensor, rate: int | None = None) -> torch.Tensor:
    """Which packed rows see which packed keys, of every query head: bool [h_q, rows of q, rows of kv]. With a rate the
    keys are the entries.
    """
    p, named = case.problem, packed_rows(case, indices)
    named = named if named.dim() == 3 else named[:, None].expand(-1, p.heads_kv, -1)
    named = named.repeat_interleave(p.heads_per_kv, dim=1)
    count = case.rows("kv") if rate is None else len(entry_rows(case, rate).last)
    found = torch.zeros(case.rows("q"), p.heads_q, count, dtype=torch.bool)
    for rows, keys, visible in documents_of(p, rate=rate):
        found[rows, :, keys] = chosen_keys(named[rows].cpu(), visible)
    return found.transpose(0, 1)


def as_lse(case: Case, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Packed rows [rows, h] as the LSE's axes, dtype and device."""
    fmt = case.problem.qkv_format
    found = rows.t() if fmt == "thd" else rows.unflatten(0, (len(case.problem.sequences), -1)).transpose(1, 2)
    return found.to(like.device, like.dtype).contiguous()


def indexer_of(
    case: Case,
    heads: int,
    d_index: int,
    *,
    whole: bool,
    draw: torch.Generator,
    device: str,
    rate: int | None = None,
) -> Tensors:
    """q_index, k_index and weights of the whole batch, NaN where there is no token.

    whole: small integers, so that scores are exact, and many are equal. rate: k_index are entries of this rate.
    """
    low, wide = dtype_of(case.problem.dtype), wide_dtype(case.problem.dtype)
    real_q, real_kv = real_tokens(case, "q"), real_tokens(case, "kv")
    if rate is not None:
        real_kv = torch.ones(len(entry_rows(case, rate).last), dtype=torch.bool)
    shapes = {
        "q_index": (real_q, (heads, d_index)),
        "k_index": (real_kv, (d_index,)),
        "weights": (real_q, (heads,)),
    }
    found: Tensors = {}
    for name, (real, last) in shapes.items():
        if whole:
            values = torch.randint(-2, 3, (*real.shape, *last), generator=draw).double()
        else:
            values = torch.randn(*real.shape, *last, generator=draw, dtype=torch.float64)
        hidden = ~real[(..., *[None] * len(last))]
        found[name] = values.masked_fill(hidden, torch.nan).to(device, wide if name == "weights" else low)
    return found


# ---- judging


def misjudged(
    case: Case, given: Tensors, got: torch.Tensor, scale: float | None, *, whole: bool, rate: int | None = None
) -> list[str]:
    """Findings about the keys that an indexer chose: each visible, none twice, the best ones, best first, -1 behind the
    last.

    Args:
        given: from `indexer_of`; whole: as there. Scores that are not exact may differ in their last digits.
    """
    p, top_k = case.problem, got.shape[-1]
    clean = {name: x.double().cpu().nan_to_num() for name, x in given.items()}
    if whole:
        wanted = dense_select_keys(p, **clean, top_k=top_k, scale=scale, rate=rate)
        wrong = (packed_rows(case, got.cpu()) != packed_rows(case, wanted)).any(-1)
        if not wrong.any():
            return []
        row = int(wrong.nonzero()[0])
        has, lacks = (packed_rows(case, x.cpu())[row].tolist() for x in (got, wanted))
        return [f"row {row} chooses {has}, but should {lacks}; {int(wrong.sum())} rows are wrong"]
    q, w = (packed_rows(case, clean[name]) for name in ("q_index", "weights"))
    k = packed_rows(case, clean["k_index"]) if rate is None else clean["k_index"]
    rows_of = packed_rows(case, got.cpu()).long()
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    eps = 1e-12 if p.dtype == "float64" else 1e-5
    outside = torch.ones(len(rows_of), dtype=torch.bool)
    for rows, keys, visible in documents_of(p, rate=rate):
        outside[rows] = False
        scores = dense_index_scores(q[rows], k[keys], w[rows], factor)
        named, count = rows_of[rows], visible.sum(1).clamp(max=top_k)
        place = torch.arange(top_k)
        if not ((named >= 0) == (place < count[:, None])).all() or not (named < max(visible.shape[1], 1)).all():
            return [f"rows {rows.start}:{rows.stop} do not choose as many keys as they see, or {top_k}"]
        if not scores.numel():
            continue
        there = named.clamp(min=0)
        times = torch.zeros_like(scores).scatter_add_(1, there, (named >= 0).double())
        if (times > visible.double()).any():
            return [f"rows {rows.start}:{rows.stop} choose a key twice, or one that is hidden"]
        best = scores.masked_fill(~visible, -torch.inf).sort(1, descending=True).values[:, :top_k]
        best = torch.nn.functional.pad(best, (0, top_k - best.shape[1]))
        sizes = dense_index_scores(q[rows].abs(), k[keys].abs(), w[rows].abs(), abs(factor))
        off = (scores.gather(1, there) - best).masked_fill(named < 0, 0.0).abs()
        if (off > eps * sizes.amax(1, keepdim=True)).any():
            return [
                f"rows {rows.start}:{rows.stop} choose keys whose scores are {off.max().item():.3g} worse than the best"
            ]
    return ["padding or the tail chooses keys"] if (rows_of[outside] != -1).any() else []


_ROUGH = {"bfloat16": 2e-2, "float16": 5e-3}


def rough(dtype: str, results: Tensors, exact: Tensors) -> list[str]:
    """Findings in low precision: the root of the mean square of each error, in units of the result's own and of the
    typical result's.
    """
    typical = sum(_size(exact[name]) for name in results) / max(len(results), 1)
    found: list[str] = []
    for name, got in results.items():
        if not torch.equal(got.isfinite(), exact[name].isfinite()):
            found.append(f"{name} is not finite where it should be, or is where it should not")
            continue
        error, bound = _size(got.double() - exact[name]), _ROUGH[dtype] * max(_size(exact[name]), typical)
        if error > bound:
            found.append(f"{name} has errors of {error:.2g} (root of the mean square), allowed {bound:.2g}")
    return found


def _size(x: torch.Tensor) -> float:
    """The root of the mean square of what is finite."""
    finite = x[x.isfinite()]
    return finite.square().mean().sqrt().item() if finite.numel() else 0.0
