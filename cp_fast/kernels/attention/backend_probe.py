"""Check a backend against the definition in `VarlenBatch`, by a few launches whose right results are counts.

With q = 0 every visible column weighs the same: exp(lse) is the number of visible columns, an indicator for v makes
out say which ones, and an indicator for dout makes dv say which rows saw a column. One key too many is off by a whole
number, where an error bound on random data would not notice it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature

__all__ = ["probe", "probe_segments"]

_HEADS = (4, 2, 64, 64)  # `h_q, h_kv, d_qk, d_v`.

_CASES: tuple[tuple[tuple[int, ...], tuple[int, ...], int | None, int | None], ...] = (
    # lengths_q, lengths_kv, left, right; every row sees a column
    ((1, 5, 64, 70, 70), (1, 9, 100, 70, 71), None, None),
    ((1, 5, 64, 70, 70), (1, 9, 100, 70, 71), None, 0),
    ((1, 5, 64, 70, 70), (1, 9, 100, 70, 71), 0, 0),
    ((1, 5, 64, 70, 70), (1, 9, 100, 70, 71), 7, 3),
    ((1, 5, 64, 70, 70), (1, 9, 100, 70, 71), None, 4),
    ((1, 5, 64, 70, 70), (1, 9, 100, 70, 71), 5, None),
    ((30, 90, 3), (10, 70, 3), None, None),  # More rows than columns.
    ((30, 90, 3), (10, 70, 3), None, 22),
    ((30, 90, 3), (10, 70, 3), 6, 22),
    ((30, 4), (10, 2), None, 22),  # A side longer than any segment's columns that still hides some.
    ((30, 4), (10, 2), 3, 22),
    ((30, 90, 3), (10, 70, 3), 6, None),
    ((3, 1, 4, 1, 5, 9, 2, 6, 5), (3, 1, 4, 1, 5, 9, 2, 6, 5), None, 0),  # One shift for all of many segments.
    ((70, 33), (100, 63), 40, 5),
)


def probe(backend: Backend, device: torch.device | str) -> str | None:
    """None if the backend's masks, alignment, head groups, lse and dv are right on this device, else the error."""
    dtype = torch.float32 if Feature.FLOAT32 in backend.features else torch.bfloat16
    for lengths_q, lengths_kv, left, right in _CASES:
        problem = probe_segments(backend, lengths_q, lengths_kv, left, right, device, dtype, _HEADS)
        if problem is not None:
            return problem
    return None


def probe_segments(
    backend: Backend,
    lengths_q: Sequence[int],
    lengths_kv: Sequence[int],
    left: int | None,
    right: int | None,
    device: torch.device | str,
    dtype: torch.dtype,
    heads: tuple[int, int, int, int],
) -> str | None:
    """One launch of the probe with (h_q, h_kv, d_qk, d_v): None where it is right, else one sentence."""
    h_q, h_kv, d_qk, d_v = heads
    segments = VarlenBatch.pack(lengths_q, lengths_kv, left, right, device)
    n, m, group, options = segments.cu_q[-1], segments.cu_kv[-1], h_q // h_kv, LaunchOptions(ScoreSpec(d_qk**-0.5))
    seen = _visible(segments).to(device)  # [n, m]
    count = seen.sum(1)
    mark_v = _indicator(m, h_kv, d_v, device)  # column j of kv head h is marked at (j + h) % d_v
    mark_dout = _indicator(n, h_q, d_v, device)
    q = torch.zeros(n, h_q, d_qk, dtype=dtype, device=device)
    k = torch.randn(m, h_kv, d_qk, dtype=dtype, device=device)
    what = f"backend {backend.name!r}, q {list(lengths_q)} x kv {list(lengths_kv)}, window ({left}, {right})"

    out, lse, _ = backend.forward(q, k, mark_v.to(dtype), segments, options)
    if lse.shape != (h_q, n) or lse.dtype not in (torch.float32, torch.float64):
        return f"{what}: lse is {lse.dtype} {list(lse.shape)} instead of float32 [{h_q}, {n}]"
    counted = lse.double().exp()
    wrong = ~((counted - count).abs() < 0.25)
    if wrong.any():
        head, row = (int(x) for x in wrong.nonzero()[0])
        found = float(counted[head, row])
        return f"{what}: row {row} of head {head} sees {found:.2f} columns instead of {int(count[row])}"
    marks = mark_v.repeat_interleave(group, 1).double()
    share = seen.double() / count[:, None]
    problem = _compare(out, torch.einsum("nm,mhd->nhd", share, marks), f"{what}: out")
    if problem is not None:
        return problem
    operands = BackwardOperands(mark_dout.to(dtype), q, k, mark_v.to(dtype), out.to(dtype), lse, None)
    dq, dk, dv = backend.backward([operands], segments, options)
    saw = torch.einsum("nm,nhd->mhd", share, mark_dout.double())
    problem = _compare(dv, saw.view(m, h_kv, group, d_v).sum(2), f"{what}: dv")
    problem = problem or _compare(dk, torch.zeros_like(k).double(), f"{what}: dk")
    return problem if problem is not None or bool(dq.isfinite().all()) else f"{what}: dq is not finite"


def _visible(segments: VarlenBatch) -> torch.Tensor:
    """Bool [n, m], by the definition in `VarlenBatch`."""
    seen = torch.zeros(segments.cu_q[-1], segments.cu_kv[-1], dtype=torch.bool, device="cpu")
    for (q0, q1), (kv0, kv1) in zip(pairwise(segments.cu_q), pairwise(segments.cu_kv), strict=True):
        lq, lk = q1 - q0, kv1 - kv0
        diagonal, j = torch.arange(lq, device="cpu")[:, None] + lk - lq, torch.arange(lk, device="cpu")
        tile = torch.ones(lq, lk, dtype=torch.bool, device="cpu")
        if segments.left is not None:
            tile &= j >= diagonal - segments.left
        if segments.right is not None:
            tile &= j <= diagonal + segments.right
        seen[q0:q1, kv0:kv1] = tile
    return seen


def _indicator(rows: int, heads: int, d: int, device: torch.device | str) -> torch.Tensor:
    """Float32 [rows, heads, d], 1 at (row + head) % d and 0 elsewhere."""
    place = (torch.arange(rows, device=device)[:, None] + torch.arange(heads, device=device)) % d
    return torch.nn.functional.one_hot(place, d).float()


def _compare(got: torch.Tensor, expected: torch.Tensor, what: str) -> str | None:
    """None where equal up to three roundings to bfloat16, else where they differ.

    Rounded are the weights, the result, and in FlashAttention 2 each query head's share of dk and dv before they are
    summed. A missing or surplus key changes a result by more than that: by a row's 1 / n, with n at most some dozens.
    """
    if got.shape != expected.shape:
        return f"{what} has shape {list(got.shape)} instead of {list(expected.shape)}"
    wrong = ~((got.double() - expected).abs() <= 1.2e-2 * expected.abs() + 1e-6)
    if not wrong.any():
        return None
    at = tuple(int(x) for x in wrong.nonzero()[0])
    return f"{what}{list(at)} is {float(got[at]):.6f} instead of {float(expected[at]):.6f}"
