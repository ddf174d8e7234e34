"""Find the pairs of a small problem that an implementation reads; the report draws them next to the expected mask."""

from __future__ import annotations

from dataclasses import replace

import torch

from conformance.case import Case
from conformance.implementation import Implementation
from conformance.judge.ranks import UnsupportedCase
from conformance.report.mask_differences import MOST, Pair
from conformance.run.case_tensors import GlobalTensors, build, in_format, packed_rows
from conformance.run.play_case import play

__all__ = ["observed_pairs"]


def observed_pairs(impl: Implementation, case: Case, device: str = "cpu") -> tuple[Pair, ...] | None:
    """The pairs that carry weight in the output of query head 0.

    With q = 0 all visible keys have equal weight. v is 1 in one head dim for each of d_v keys, and 0 elsewhere. So the
    output says which of these keys a query saw; it is played once for every d_v keys.

    Args:
        case: what failed; only its problem, its seed, its strides and its plan matter here.

    Returns:
        Pairs of packed rows, for `record.Played.pairs`; None when either side has more than 64 rows, or when no output
        came back.
    """
    p = case.problem
    rows, keys = case.rows("q"), case.rows("kv")
    if max(rows, keys) > MOST:
        return None
    masked = replace(p, score_mod="", dropout_p=0.0)  # The mask is what is drawn.
    case = replace(case, problem=masked, alibi="", magnitude=1.0, return_lse=False, return_max_logit=False, loss="out")
    case = replace(case, grads="")
    plain, found = build(case, device), []
    for first in range(0, keys, p.d_v):
        try:
            played = play(impl, case, _indicators(case, plain, first))
        except UnsupportedCase:
            return None
        if played.findings:
            return None
        out = packed_rows(case, played.results["out"])[:, 0].double().nan_to_num(1.0)  # a NaN came from somewhere
        found += [(q, first + d) for q, d in (out.abs() > 1e-6).nonzero().tolist() if first + d < keys]
    return tuple(sorted(found))


def _indicators(case: Case, plain: GlobalTensors, first: int) -> GlobalTensors:
    """q = 0, and v with 1 in head dim d for key `first + d`; NaN stays in padding."""
    p = case.problem
    keys = case.rows("kv")
    v = torch.zeros(keys, p.heads_kv, p.d_v, dtype=plain.v.dtype, device=plain.v.device)
    for d in range(min(p.d_v, keys - first)):
        v[first + d, :, d] = 1.0
    offset = None if plain.softmax_offset is None else torch.zeros_like(plain.softmax_offset)
    return replace(plain, q=plain.q * 0.0, v=in_format(case, v, plain.v), softmax_offset=offset)
