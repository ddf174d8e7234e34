"""Tier `probes`: inputs for which attention counts. Probes see a single key too many or too few, in any dtype, in rows
of any length.

With q = 0 every score is 0, so every visible key has the weight 1 / n, where n is the number of visible keys (and 1
more with a sink of logit 0):

    exp(lse) = n                       how many keys each query sees
    n * out  = sum of v                v spells each key's number in digits, one per head dim: which keys it sees
    dv       = sum of dout / n         dout is n times each query's number in digits: which queries saw the key

The right answers are integers, counted by the definition (`conformance.tensors`), with no oracle. Scores of
places are seen as exactly:

    score_mod    becomes one that hides pairs by sequence, head and both positions (`hidden`)
    dropout      n * out and dv count what is kept, times 1 / (1 - p); by an implementation of the documented hash in
                 numpy. Where d_v has room, v and dout are indicators: then every bit of the mask is one number
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from conformance.case import Case, aux_tensors, hidden
from conformance.checks.play import play
from conformance.checks.reference import UnsupportedCase
from conformance.implementation import Implementation
from conformance.record import MOST, Pair
from conformance.scores import dropout_seed, kept_pairs
from conformance.tensors import GlobalTensors, build, in_format, packed_rows, seen_table, where

__all__ = ["check_probes", "digits", "observed_pairs", "plain_but_for_counts", "probe_pairs", "visible_pairs"]

_BLOCK = 4096  # Queries.


def check_probes(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Queries that see the wrong keys, and keys that are seen by the wrong queries.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    case = plain_but_for_counts(case)
    visible = visible_pairs(case).to(device)  # [rows of q, rows of kv], bool.
    if case.problem.score_mod:
        visible = visible & shown_pairs(case).to(device)  # [h, rows of q, rows of kv]
    return probe_pairs(impl, case, visible, device)


def probe_pairs(impl: Any, case: Case, visible: torch.Tensor, device: str) -> list[str]:
    """`check_probes` of a case from `plain_but_for_counts` with these visible pairs: bool [rows of q, rows of kv], or
    of each head [h, rows of q, rows of kv].
    """
    plain = build(case, device)
    sink = 0.0 if case.problem.softmax_type == "vanilla" else 1.0
    count = visible.sum(-1).double()  # [rows] or [h, rows]
    tensors = _counting(case, plain, count + sink)
    try:
        played = play(impl, case, tensors)
    except UnsupportedCase:  # Perhaps it lacks an lse: then n * out has to show it.
        played = play(impl, replace(case, return_lse=False), tensors)
    if played.findings:
        return played.findings
    found: list[str] = []
    if "lse" in played.results:
        found = _check_counts(case, played.results["lse"].double().exp(), count, sink, tensors)
    weights = visible
    if case.problem.dropout_p:
        weights = visible * dropout_factors(case).to(device)
    out = packed_rows(case, played.results["out"].double())
    values = packed_rows(case, tensors.v.double()).nan_to_num(0.0).repeat_interleave(case.problem.heads_per_kv, dim=1)
    # All weights at once would take a matrix in float64.
    want = torch.cat([_sums(block, values) for block in weights.split(_BLOCK, dim=-2)])
    found += _check_digits(case, "q", "n * out", out * _by_head(count + sink), want)
    upstream = packed_rows(case, tensors.dout.double()).nan_to_num(0.0) / _by_head((count + sink).clamp(min=1))
    want = torch.zeros(visible.shape[-1], *upstream.shape[1:], dtype=torch.float64, device=upstream.device)
    for block, rows in zip(weights.split(_BLOCK, dim=-2), upstream.split(_BLOCK), strict=True):
        want += _sums(block.mT, rows)
    want = want.unflatten(1, (case.problem.heads_kv, case.problem.heads_per_kv)).sum(2)
    return found + _check_digits(case, "kv", "dv", packed_rows(case, played.results["dv"].double()), want)


def plain_but_for_counts(case: Case) -> Case:
    """Without ALiBi; a score_mod becomes the one that hides pairs: then every weight of a row is the same."""
    problem = replace(case.problem, score_mod="hidden" if case.problem.score_mod else "")
    plain = {"return_lse": True, "return_max_logit": False, "loss": "out", "grads": "v", "magnitude": 1.0, "alibi": ""}
    return replace(case, problem=problem, **plain)


def _sums(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Weights [n, m], or of each head, [h, n, m], times rows [m, h, d]: [n, h, d]."""
    return torch.einsum("nm,mhd->nhd" if weights.dim() == 2 else "hnm,mhd->nhd", weights.double(), rows)


def _by_head(numbers: torch.Tensor) -> torch.Tensor:
    """[rows], or [h, rows], as they broadcast against [rows, h, d]."""
    return numbers[:, None, None] if numbers.dim() == 1 else numbers.t()[..., None]


def visible_pairs(case: Case) -> torch.Tensor:
    """Which packed query row sees which packed key row, over all sequences and tails: bool [rows of q, rows of kv]."""
    return seen_table(case.problem, case.rows("q"), case.rows("kv"))


def digits(rows: int, dims: int) -> torch.Tensor:
    """The numbers 1 ... rows, spelled in `dims` digits of the smallest base that has room, at least 2: float64 [rows,
    dims].

    >>> digits(3, 2).tolist()          # 1 = 01, 2 = 10, 3 = 11, the last digit first
    [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    """
    base = 2
    while base**dims <= rows:
        base += 1
    numbers = torch.arange(1, rows + 1)
    powers = [min(base**n, rows + 1) for n in range(dims)]  # Beyond the number's length all digits are 0.
    return torch.stack([numbers // power % base for power in powers], dim=1).double()


def indicators(rows: int, dims: int) -> torch.Tensor:
    """Row n is 1 in dimension n and 0 in the others, so that a result has each pair by itself: float64 [rows, dims]."""
    return torch.eye(rows, dims, dtype=torch.float64)


def shown_pairs(case: Case) -> torch.Tensor:
    """Which pairs the score_mod `hidden` leaves, of every head: bool [h, rows of q, rows of kv]."""
    p = case.problem
    assert p.score_mod == "hidden"
    b, i, j = _places(case)
    h = torch.arange(p.heads_q)[:, None, None]
    aux = aux_tensors(p) or {}
    return hidden(torch.zeros(()), b[:, None], h, i[:, None], j, **aux) == 0.0


def dropout_factors(case: Case) -> torch.Tensor:
    """Dropout's factor for each pair's probability, of every head: float64 [h, rows of q, rows of kv].

    It is 0 in tails, and for pairs of two sequences.
    """
    p = case.problem
    b, i, j = (x.numpy() for x in _places(case))
    kept = torch.zeros(p.heads_q, len(i), len(j), dtype=torch.bool)
    edges = zip(pairwise(p.starts_q), pairwise(p.starts_kv), strict=True)
    for (q0, q1), (k0, k1) in edges:
        for head in range(p.heads_q if q1 > q0 else 0):
            pairs = kept_pairs(int(b[q0]), head, i[q0:q1], j[k0:k1], dropout_seed(case), p.dropout_p)
            kept[head, q0:q1, k0:k1] = torch.from_numpy(pairs)
    return kept.double() / (1 - p.dropout_p)


def _places(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of packed rows: the sequence and the position of queries, and the position of keys; 0 in tails. int64 [rows]."""
    p = case.problem
    sequences = [n for n, (a, b) in enumerate(pairwise(p.starts_q)) for _ in range(b - a)]
    rows = [[i for a, b in pairwise(starts) for i in range(b - a)] for starts in (p.starts_q, p.starts_kv)]
    tails = (case.tail_q, case.tail_q, case.tail_kv)
    columns = zip((sequences, *rows), tails, strict=True)
    sequence, q_idx, kv_idx = (torch.tensor(x + [0] * tail, dtype=torch.int64) for x, tail in columns)
    return sequence, q_idx, kv_idx


def _counting(case: Case, plain: GlobalTensors, denominators: torch.Tensor) -> GlobalTensors:
    """The case's tensors with q = 0, v and dout as described above, the sink's logit 0; NaN in padding as before."""
    p = case.problem
    spelled = indicators if p.dropout_p and p.d_v >= max(case.rows("q"), case.rows("kv")) else digits
    v = spelled(case.rows("kv"), p.d_v)[:, None].repeat(1, p.heads_kv, 1)
    v *= torch.arange(1, p.heads_kv + 1)[None, :, None]  # A wrong kv head is seen too.
    dout = spelled(case.rows("q"), p.d_v)[:, None].repeat(1, p.heads_q, 1)
    dout = dout.to(denominators.device) * _by_head(denominators)
    return replace(
        plain,
        q=plain.q * 0.0,  # NaN stays.
        v=in_format(case, v.to(plain.v.device), plain.v),
        dout=in_format(case, dout, plain.dout),
        softmax_offset=None if plain.softmax_offset is None else torch.zeros_like(plain.softmax_offset),
    )


def _check_counts(case: Case, got: torch.Tensor, count: torch.Tensor, sink: float, tensors: GlobalTensors) -> list[str]:
    """exp(lse) against the number of visible keys; the first wrong row."""
    fmt = case.problem.qkv_format
    got = got.t() if fmt == "thd" else got.transpose(1, 2).flatten(0, 1)  # [rows, h]
    real = (tensors.real_q.t() if fmt == "sbhd" else tensors.real_q).flatten()
    want = torch.where(real, count + sink, 0.0)
    want = (want[:, None] if want.dim() == 1 else want.t()).expand(got.shape)
    wrong = ((got - want).abs() > (1e-3 * want.clamp(min=1)).clamp(max=0.25)).logical_or(got.isnan())
    if not wrong.any():
        return []
    row, head = (int(n) for n in wrong.nonzero()[0])
    sinks = " (1 of it the sink)" if sink and real[row] else ""
    return [
        f"{_row(case, 'q', row)}, head {head} counts {got[row, head].item():.6g} visible keys by exp(lse), "
        f"but there are {want[row, head].item():g}{sinks}; {int(wrong.any(1).sum())} queries count wrong"
    ]


def _check_digits(case: Case, side: str, what: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    """Sums of digits, exact integers up to the rounding of n * (sum / n); the first wrong row."""
    eps = torch.finfo(getattr(torch, case.problem.dtype)).eps
    error = (got - want).abs().nan_to_num(nan=torch.inf)
    wrong = error > 4 * eps * want.abs() + (1024 * eps * (1 + want.abs())).clamp(max=0.25)
    if not wrong.any():
        return []
    row, head = (int(n) for n in wrong.any(-1).nonzero()[0])
    has, lacks = [round(n, 3) for n in got[row, head].tolist()], want[row, head].tolist()
    other = "keys that it sees" if side == "q" else "queries that saw it"
    return [
        f"{_row(case, side, row)}, head {head}: {what}, the digit sums of the {other}, is {_few(has)}, "
        f"but should be {_few(lacks)}; "
        f"{int(wrong.any(-1).any(-1).sum())} rows are wrong"
    ]


def _few(values: list[float]) -> str:
    """The first digit sums, which say the most."""
    return f"{values[:8]}" if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def _row(case: Case, side: str, row: int) -> str:
    if case.problem.qkv_format == "thd":
        return where(case, side, None, row)
    batch, row = divmod(row, case.problem.lengths.slots(side)[0])
    return where(case, side, batch, row)


# ---- the pairs that an implementation reads
#
# Find the pairs of a small problem that an implementation reads; the report draws them next to the expected mask.


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
