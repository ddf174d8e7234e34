"""Where tokens are: rows of a rank's slice, and of the one process's batch, as (document, position)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from conformance.step.report import Evidence, Finding
from cp_ref.problems.cuts import planned_cut
from cp_ref.schedules.problem import Problem

__all__ = ["BASE", "TokenPlaces", "describe", "of_losses"]

_PADDED_TO = 513  # Smaller multiples are tried, for a process with its own rule of padding.
BASE = 1 << 32  # of documents in a key; positions are below


def describe(key: int) -> str:
    """
    >>> describe(3 * 2**32 + 17)
    'document 3, position 17'
    """
    return f"document {key // BASE}, position {key % BASE}"


class TokenPlaces:
    """The places of one batch's tokens, on every rank and in one process.

    Args:
        problems: of the attention calls of each context parallel group, by group; groups have documents of their own,
            one behind the other.
        ranks: of these groups, by group; by default all from 0.
        own: of the one process's attention call, if that calls cp_fast: how it pads may differ.
    """

    def __init__(
        self, problems: Sequence[Problem], ranks: Sequence[int] | None = None, own: Problem | None = None
    ) -> None:
        self._problems = list(problems)
        self._cp = problems[0].cp_size
        self.ranks = list(range(len(problems) * self._cp) if ranks is None else ranks)
        documents = sum(len(p.lengths.len_q) for p in problems)
        self._own = own if own is not None and own.cp_size == 1 and len(own.lengths.len_q) == documents else None
        counts = [len(p.lengths.len_q) for p in problems]
        self._first = np.cumsum([0, *counts])
        self.packed = problems[0].qkv_format == "thd"
        self.lengths = np.concatenate([np.array(p.lengths.len_q, dtype=np.int64) for p in problems])
        self.slots = np.concatenate([np.array(p.lengths.slots_q, dtype=np.int64) for p in problems])

    def of_rank(self, rank: int, shape: Sequence[int]) -> np.ndarray | None:
        """The key of each token of a slice, -1 for padding; None where the first axes are not those of tokens.

        Args:
            rank: its place in `ranks`.
            shape: the tensor's: [b, s/cp, ...], [s/cp, b, ...], [t/cp, ...] or [1, t/cp, ...].

        Returns:
            [b, s/cp], [s/cp, b], [t/cp] or [1, t/cp], like the tensor's first axes.
        """
        group, inner = rank // self._cp, rank % self._cp
        return _keys_of(self._problems[group], inner, int(self._first[group]), shape)

    def of_one(self, shape: Sequence[int]) -> np.ndarray | None:
        """The same of the one process, which has the whole batch, with or without padding."""
        if self._own is not None and (keys := _keys_of(self._own, 0, 0, shape)) is not None:
            return keys
        documents, form = len(self.lengths), self._problems[0].qkv_format
        longest = int(self.lengths.max(initial=0))
        batch_first = np.arange(documents)[:, None] * BASE
        shapes = [(tuple(shape[:2]), False)] if len(shape) > 1 else []
        shapes += [(tuple(shape[1::-1]), True)] if len(shape) > 1 and form == "sbhd" else []
        if form != "thd" and len(shape) == 1 and shape[0] % max(documents, 1) == 0:
            shapes.append(((documents, shape[0] // max(documents, 1)), False))
        for (count, length), turned in shapes:
            if count == documents and length >= longest - 1:  # without the last token, which has no label
                position = np.arange(length)[None]
                keys = np.where(position < self.lengths[:, None], batch_first + position, -1)
                return keys.reshape(-1) if len(shape) == 1 else keys.T if turned else keys
        lead = 2 if len(shape) > 1 and shape[0] == 1 else 1
        count = int(np.prod(shape[:lead]))
        padded = {tuple(-(-self.lengths // n) * n) for n in range(2, _PADDED_TO)}  # by its own rule
        padded = {sizes for sizes in padded if sum(sizes) == count}
        for sizes in (self.lengths, self.slots, *(np.array(sizes) for sizes in padded if len(padded) == 1)):
            if count == sizes.sum() or (sizes is self.slots and count > sizes.sum()):
                position = np.concatenate([np.arange(n) for n in sizes] or [np.zeros(0, dtype=np.int64)])
                document = np.repeat(np.arange(documents), sizes)
                keys = np.where(position < self.lengths[document], document * BASE + position, -1)
                return np.append(keys, np.full(count - len(keys), -1)).reshape(shape[:lead])
        return None

    def together(self, parts: Sequence[torch.Tensor | None], one: torch.Tensor | None) -> Any:
        """The ranks' tokens, paired with those of the one process.

        Args:
            parts: the tensors of `ranks`. one: the one process's.

        Returns:
            None where they cannot be told; else (found [n, ...], index of each in the flat tokens of `one`, rank [n],
            key [n]). Padding is left out.
        """
        if one is None or any(part is None for part in parts):
            return None
        keys_one = self.of_one(one.shape)
        keys = [self.of_rank(rank, part.shape) for rank, part in enumerate(parts) if part is not None]
        if keys_one is None or any(k is None for k in keys):
            return None
        if self.packed and all(_mostly_tail(k) for k in (keys_one, *keys)):  # rows are heads, or copies for experts
            return None
        flat = [part.flatten(0, k.ndim - 1) for part, k in zip(parts, keys, strict=True)]  # type: ignore[union-attr]
        if any(x.shape[1:] != one.flatten(0, keys_one.ndim - 1).shape[1:] for x in flat):
            return None
        key = np.concatenate([np.asarray(k).reshape(-1) for k in keys])
        rank = np.repeat(self.ranks, [np.asarray(k).size for k in keys])
        order = np.argsort(keys_one, axis=None, kind="stable")
        at = np.searchsorted(keys_one.reshape(-1)[order], key)
        index = order[np.clip(at, 0, len(order) - 1)]
        there = (key >= 0) & (keys_one.reshape(-1)[index] == key)
        return torch.cat(flat)[torch.from_numpy(there)], torch.from_numpy(index[there]), rank[there], key[there]


def _mostly_tail(keys: Any) -> bool:
    """Whether at least half of the rows come behind the last token."""
    real = np.flatnonzero(np.asarray(keys).reshape(-1) >= 0)
    return np.asarray(keys).size >= 2 * (int(real[-1]) + 1 if len(real) else 0)


def _keys_of(problem: Problem, rank: int, first: int, shape: Sequence[int]) -> np.ndarray | None:
    """The key of each token that a rank of a problem holds; its first document has the number `first`."""
    cut, starts = planned_cut(problem, "q"), np.array(problem.starts_q)
    rows = np.asarray(cut.of(rank))
    documents = len(problem.lengths.len_q)
    if problem.qkv_format == "thd" or cut.batch is not None:
        document = np.clip(np.searchsorted(starts, rows, side="right") - 1, 0, max(documents - 1, 0))
        position = rows - starts[document]
        position = np.where(rows < starts[-1], position, BASE)
    else:
        document = np.repeat(np.arange(documents), len(rows))
        position = np.tile(rows, documents)
    real = position < np.array(problem.lengths.len_q)[document]
    keys = np.where(real, (document + first) * BASE + position, -1)
    return _shaped(keys, shape, None if problem.qkv_format == "thd" else documents, problem.qkv_format)


def _shaped(keys: np.ndarray, shape: Sequence[int], documents: int | None, form: str) -> np.ndarray | None:
    """Keys in the order of a tensor's first axes; None where its shape is another."""
    if documents is not None:
        rows = keys.reshape(documents, -1)
        rows = rows.T if form == "sbhd" else rows
        for axes in (rows, rows[:, :-1] if form != "sbhd" else rows[:-1]):  # the last token has no label
            if tuple(shape[:2]) == axes.shape:
                return axes
        for axes in (rows, rows[:, :-1] if form != "sbhd" else rows[:-1]):
            if len(shape) and shape[0] == axes.size:
                return axes.reshape(-1)
        return None
    lead = 2 if len(shape) > 1 and shape[0] == 1 else 1
    count = int(np.prod(shape[:lead]))
    if count == len(keys) - 1:
        keys = keys[:-1]
    if count < len(keys):
        return None
    return np.append(keys, np.full(count - len(keys), -1)).reshape(shape[:lead])


# ---- losses of tokens
#
# Evidence in the losses of single tokens: their labels, and the weights with which they count.


_APART = 1e-3


def of_losses(found: Any) -> Evidence:
    """Compare the calls of `cross_entropy` of the ranks with those of the one process, pass by pass."""
    calls = [{(x["forward"], x["count"]): x for x in each["look"]["losses"]} for each in found.ranks]
    ones = found.one["look"]["losses"]
    evidence = Evidence()
    factors: list[list[float]] = []
    for number, one in enumerate(ones):
        given = found.passes.get(one["forward"])
        mine = [] if given is None else [calls[rank].get((k, one["count"])) for rank, k in given.forwards.items()]
        if given is None or any(each is None for each in mine):
            continue
        which = f"call {number + 1} of cross_entropy: " * (len(ones) > 1)
        evidence = _of_labels(mine, one, given.places, which)
        if evidence.findings or evidence.first:
            return evidence
        row = dict(zip(given.forwards, _weights(mine, one, given.places), strict=False))
        factors.append([row.get(rank, float("nan")) for rank in range(len(found.ranks))])
    return _of_weights(factors) or evidence


def _of_labels(mine: list[Any], one: Any, places: Any, which: str) -> Evidence:
    """Labels that are others, or count where they should not, or the other way round."""
    beside = places.together([m["targets"] for m in mine], one["targets"])
    counted = places.together([_counting(m) for m in mine], _counting(one))
    padding = _counted_padding(mine, places)
    if beside is None or counted is None:
        return Evidence()
    got, index, rank, key = beside
    expected = one["targets"].reshape(-1)[index]
    counts, should = counted[0], _counting(one).reshape(-1)[counted[1]]
    differ = ((got != expected) & (counts | should)).numpy()
    lost = int((should & ~counts).sum())
    if differ.any():
        at = int(np.flatnonzero(differ)[np.argmin(key[differ])])
        first = f"{which}the label of {describe(int(key[at]))}, on rank {rank[at]}, is {int(got[at])}, in one process "
        first += str(int(expected[at]))
        more, both = (counts & ~should).numpy(), (counts & should).numpy()
        ends = _at_ends(key[differ], rank[differ], key, rank)
        if not (differ & both).any() and (more.any() or not ends):  # labels are right where both count
            text = f"{which}{int(more.sum())} tokens count that have no label, {lost} do not count that have one"
            return Evidence([Finding("padding", text)], first)
        text = f"{which}{int(differ.sum())} labels are wrong, all where a slice or document ends"
        return Evidence([Finding("labels", text)] if ends else [], first)
    gone = [r for r in np.unique(rank).tolist() if _all(should & ~counts, should, rank == r)]
    if gone and len(gone) < len(mine):
        text = f"{which}the tokens of rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))} weigh nothing"
        return Evidence([Finding("micro-batches", f"{text}: a micro-batch is skipped")])
    missing = _missing(key, places, one)
    if missing or lost:
        text = f"{which}{missing or lost} tokens that have a label have no loss: the last of their slices"
        return Evidence([Finding("labels", text)])
    extra = int((counts & ~should).sum()) + padding
    if extra:
        at = np.flatnonzero((counts & ~should).numpy())
        where = f"{describe(int(key[at[0]]))}, on rank {rank[at[0]]}, counts" if len(at) else "padding counts"
        return Evidence([Finding("padding", f"{which}{extra} tokens count that should not")], where)
    return Evidence()


def _all(these: torch.Tensor, of: torch.Tensor, where: np.ndarray) -> bool:
    there = torch.from_numpy(where)
    return bool(of[there].any() and these[of & there].all())


def _counting(call: Any) -> torch.Tensor:
    """Which tokens enter the step's loss."""
    counted, weights = call["counted"], call["weights"]
    return counted if weights is None else counted & (weights.expand(counted.shape) != 0)


def _counted_padding(mine: list[Any], places: Any) -> int:
    """How many tokens of padding enter the loss."""
    count = 0
    for rank, call in enumerate(mine):
        keys, counting = places.of_rank(rank, call["targets"].shape), _counting(call)
        if keys is not None:
            count += int((np.asarray(keys) < 0)[counting.reshape(np.shape(keys)).numpy()].sum())
    return count


def _missing(key: np.ndarray, places: Any, one: Any) -> int:
    """How many counted tokens of the one process no rank has a loss of."""
    keys = np.asarray(places.of_one(one["targets"].shape)).reshape(-1)
    wanted = keys[_counting(one).reshape(-1).numpy() & (keys >= 0)]
    return int((~np.isin(wanted, key)).sum())


def _at_ends(wrong: np.ndarray, ranks: np.ndarray, key: np.ndarray, rank: np.ndarray) -> bool:
    """Whether the wrong tokens' next tokens, one or two behind them, lie elsewhere."""
    here = set(zip(key.tolist(), rank.tolist(), strict=True))
    each = zip(wrong.tolist(), ranks.tolist(), strict=True)
    return all((k + 1, r) not in here or (k + 2, r) not in here for k, r in each)


def _weights(mine: list[Any], one: Any, places: Any) -> list[float]:
    """By rank, how much its tokens weigh, relative to the same tokens in one process; NaN where it has none."""
    if one["weights"] is None or any(m["weights"] is None for m in mine):
        return []
    expected = one["weights"].expand(one["targets"].shape)
    beside = places.together([m["weights"].expand(m["targets"].shape) for m in mine], expected)
    if beside is None:
        return []
    got, index, rank, _ = beside
    expected = expected.reshape(-1)[index]
    found = []
    for number in places.ranks:
        there = torch.from_numpy(rank == number) & (expected != 0)
        ratio = got[there] / expected[there]
        found.append(float(ratio.mean()) if len(ratio) else float("nan"))
    return found


def _of_weights(factors: list[list[float]]) -> Evidence | None:
    """Ranks, or calls, whose tokens weigh more than others'."""
    table = np.array([row for row in factors if not np.isnan(row).all()])
    if not table.size:
        return None
    means = np.nanmean(table, axis=1)
    inside = np.nanmax(table, axis=1) / np.nanmin(table, axis=1)
    if (inside > 1 + _APART).any():
        row = table[int(np.nanargmax(inside))]
        words = ", ".join(f"{x:.4g}" for x in row / np.nanmean(row))
        return Evidence([Finding("mean-per-rank", f"tokens of the ranks weigh {words} times what they should")])
    if means.max() / means.min() > 1 + _APART:
        words = ", ".join(f"{x:.4g}" for x in means / means.mean())
        text = f"tokens of the micro-batches weigh {words} times what they should"
        return Evidence([Finding("micro-batches", text)])
    return None
