"""Evidence in the losses of single tokens: their labels, and the weights with which they count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from conformance.step.evidence.token_places import describe
from conformance.step.report import Finding

__all__ = ["LossEvidence", "of_losses"]

_APART = 1e-3


@dataclass
class LossEvidence:
    """Findings about labels and weights, and the first token with a wrong one."""

    findings: list[Finding] = field(default_factory=list)
    first: str = ""


def of_losses(found: Any, dtype: torch.dtype) -> LossEvidence:
    """Compare the calls of `cross_entropy` of the ranks with those of the one process, pass by pass."""
    calls = [{(x["forward"], x["count"]): x for x in each["look"]["losses"]} for each in found.ranks]
    ones = found.one["look"]["losses"]
    evidence = LossEvidence()
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


def _of_labels(mine: list[Any], one: Any, places: Any, which: str) -> LossEvidence:
    """Labels that are others, or count where they should not, or the other way round."""
    beside = places.together([m["targets"] for m in mine], one["targets"])
    counted = places.together([_counting(m) for m in mine], _counting(one))
    padding = _counted_padding(mine, places)
    if beside is None or counted is None:
        return LossEvidence()
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
            return LossEvidence([Finding("padding", text)], first)
        text = f"{which}{int(differ.sum())} labels are wrong, all where a slice or document ends"
        return LossEvidence([Finding("labels", text)] if ends else [], first)
    gone = [r for r in np.unique(rank).tolist() if _all(should & ~counts, should, rank == r)]
    if gone and len(gone) < len(mine):
        text = f"{which}the tokens of rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))} weigh nothing"
        return LossEvidence([Finding("micro-batches", f"{text}: a micro-batch is skipped")])
    missing = _missing(key, places, one)
    if missing or lost:
        text = f"{which}{missing or lost} tokens that have a label have no loss: the last of their slices"
        return LossEvidence([Finding("labels", text)])
    extra = int((counts & ~should).sum()) + padding
    if extra:
        at = np.flatnonzero((counts & ~should).numpy())
        where = f"{describe(int(key[at[0]]))}, on rank {rank[at[0]]}, counts" if len(at) else "padding counts"
        return LossEvidence([Finding("padding", f"{which}{extra} tokens count that should not")], where)
    return LossEvidence()


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


def _of_weights(factors: list[list[float]]) -> LossEvidence | None:
    """Ranks, or calls, whose tokens weigh more than others'."""
    table = np.array([row for row in factors if not np.isnan(row).all()])
    if not table.size:
        return None
    means = np.nanmean(table, axis=1)
    inside = np.nanmax(table, axis=1) / np.nanmin(table, axis=1)
    if (inside > 1 + _APART).any():
        row = table[int(np.nanargmax(inside))]
        words = ", ".join(f"{x:.4g}" for x in row / np.nanmean(row))
        return LossEvidence([Finding("mean-per-rank", f"tokens of the ranks weigh {words} times what they should")])
    if means.max() / means.min() > 1 + _APART:
        words = ", ".join(f"{x:.4g}" for x in means / means.mean())
        text = f"tokens of the micro-batches weigh {words} times what they should"
        return LossEvidence([Finding("micro-batches", text)])
    return None
