"""A fixed list of score_mods by name, so that a case is text. Each is one way in which scores may depend on places.

near          on the distance of query and key, with another slope beyond it
by_key        on a captured vector, by the key's position
capped        on the score alone
by_document   on the number of the document
by_head       on the head
hidden        hides pairs by all four places: a mask that counting inputs can see exactly
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cp_ref.schedules.problem import Problem

__all__ = ["BY_DOCUMENT", "SCORE_MODS", "aux_tensors", "score_features", "score_mod_of"]

Tensor = torch.Tensor


def near(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Keys 4 and more positions away have half the score, less 1."""
    return torch.where(torch.abs(q_idx - kv_idx) < 4, score, score * 0.5 - 1.0)


def by_key(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, bias: Tensor) -> Tensor:
    """bias [positions] of the key is added."""
    return score + bias[kv_idx]


def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """3 tanh(s / 3)."""
    return 3.0 * torch.tanh(score / 3.0)


def by_document(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, factor: Tensor) -> Tensor:
    """Scores times factor [documents]."""
    return score * factor[b]


def by_head(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, factor: Tensor) -> Tensor:
    """Scores times factor [heads]."""
    return score * factor[h]


def hidden(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, rows: Tensor, keys: Tensor, heads: Tensor,
    documents: Tensor,
) -> Tensor:  # fmt: skip
    """Pairs for which the numbers of their four places add up to 0 or more are hidden."""
    total = rows[q_idx] + keys[kv_idx] + heads[h] + documents[b]
    return torch.where(total < 0.0, score, float("-inf"))


SCORE_MODS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (near, by_key, capped, by_document, by_head, hidden)
}
BY_DOCUMENT = ("by_document", "hidden")  # those whose result depends on the document's number


def score_mod_of(problem: Problem) -> Callable[..., Tensor] | None:
    """The function that the problem of a case names; None for none."""
    return SCORE_MODS[problem.score_mod] if problem.score_mod else None


def score_features(problem: Problem, alibi: str = "") -> tuple[str, ...]:
    """The parameters of `attention` that a problem needs for its scores.

    >>> score_features(Problem(1, (), dropout_p=0.5), "head")
    ('alibi_slopes', 'dropout_p')
    """
    needed = {"alibi_slopes": alibi, "score_mod": problem.score_mod, "dropout_p": problem.dropout_p}
    return tuple(name for name, value in needed.items() if value)


# score_mod -> its captured tensors: what their one axis counts, and the smallest and largest value
_AUX: dict[str, dict[str, tuple[str, float, float]]] = {
    "by_key": {"bias": ("position", -1.0, 0.75)},
    "by_document": {"factor": ("document", 0.5, 1.375)},
    "by_head": {"factor": ("head", 0.5, 1.375)},
    "hidden": {
        "rows": ("position", -1.0, 0.75),
        "keys": ("position", -1.0, 0.75),
        "heads": ("head", -0.5, 0.375),
        "documents": ("document", -0.5, 0.375),
    },
}


def aux_tensors(problem: Problem, device: str | torch.device = "cpu") -> dict[str, Tensor] | None:
    """The tensors that the problem's score_mod takes by name: float32, multiples of 1/8; None without any.

    >>> from cp_ref.schedules.problem import Sequence
    >>> aux_tensors(Problem(1, (Sequence(3, 3, 3, 3),), heads_q=4, score_mod="by_head"))
    {'factor': tensor([1.0000, 0.6250, 1.2500, 0.8750])}
    """
    if problem.score_mod not in _AUX:
        return None
    positions = max((max(s.slots_q, s.slots_kv) for s in problem.sequences), default=0)
    counts = {"position": positions, "document": len(problem.sequences), "head": problem.heads_q}
    made = enumerate(_AUX[problem.score_mod].items())
    return {name: _values(counts[axis], low, high, n).to(device) for n, (name, (axis, low, high)) in made}


def _values(count: int, low: float, high: float, salt: int) -> Tensor:
    """[count], at least one: eight values from low to high, in an order that looks random."""
    n = torch.arange(1, max(1, count) + 1, dtype=torch.int64) + 1000 * salt
    return low + (n * 2654435761 % 2**32 >> 29) * ((high - low) / 7)
