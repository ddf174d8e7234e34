"""A call's arguments for scores, from the case alone: slopes, captured tensors and the seed of dropout."""

from __future__ import annotations

from typing import Any

import torch

from conformance.case import Case
from conformance.scores.score_mods import BY_DOCUMENT, aux_tensors

__all__ = ["alibi_slopes", "depends_on_number", "dropout_seed", "score_arguments"]


def score_arguments(case: Case, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Arguments of `attention` in addition to its plan: those that the case needs, no others."""
    p = case.problem
    found = {
        "alibi_slopes": alibi_slopes(case, device),
        "aux_tensors": aux_tensors(p, device),
        "dropout_seed": _given_seed(case, device) if p.dropout_p else None,
    }
    return {name: x for name, x in found.items() if x is not None}


def depends_on_number(case: Case) -> bool:
    """Whether scores depend on the numbers of the sequences."""
    return case.alibi == "document" or case.problem.dropout_p > 0 or case.problem.score_mod in BY_DOCUMENT


def alibi_slopes(case: Case, device: str | torch.device = "cpu") -> torch.Tensor | None:
    """float32 [h_q], or [b, h_q]; None without ALiBi.

    >>> from cp_ref.schedules.problem import Problem, Sequence
    >>> alibi_slopes(Case(Problem(1, (Sequence(3, 3, 3, 3),), heads_q=3), alibi="head"))
    tensor([0.5000, 0.2500, 0.1250])
    """
    if not case.alibi:
        return None
    p = case.problem
    slopes = 0.5 ** (torch.arange(p.heads_q) % 6 + 1).float()
    if case.alibi == "document":
        slopes = slopes * (1.0 + torch.arange(len(p.sequences)) % 4)[:, None]
    return slopes.to(device)


def dropout_seed(case: Case) -> int:
    """64 bits, signed, of which both halves differ from case to case."""
    seed = (case.seed + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
    return seed - 2**64 if seed >= 2**63 else seed


def _given_seed(case: Case, device: str | torch.device) -> int | torch.Tensor:
    """A tensor in every second case."""
    seed = dropout_seed(case)
    return torch.tensor([seed], dtype=torch.int64, device=device) if case.seed % 2 else seed
