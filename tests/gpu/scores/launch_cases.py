"""Launches with scores, and their checks: each is one process's work, so that kernels compile side by side.

python -m tests.gpu.scores.launch_cases all | NAME ...
"""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cp_fast.kernels.attention.backend_protocol import (
    Backend,
    BackwardOperands,
    LaunchOptions,
    LaunchPositions,
    LaunchScores,
)
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.calls.scores import ScoreTensors, kept_by_dropout
from cp_ref.schedules.problem import ScoreSpec
from tests.gpu.scores.launch_oracle import LaunchResults, Operands, dense

__all__ = ["CASES", "Case", "run_case"]


def biased(
    score: torch.Tensor,
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    table: torch.Tensor,
    kinds: torch.Tensor,
) -> torch.Tensor:
    """A bias by head and distance, and less for pairs of different kinds."""
    same = kinds[q_idx] == kinds[kv_idx]
    bias = table[h, (q_idx - kv_idx).clamp(0, table.shape[1] - 1)]
    return torch.where(same, score, 0.5 * score) + bias + 0.1 * b


def curved(
    score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
) -> torch.Tensor:
    """Many operations; keys three apart from a query are hidden; NaN where a causal mask hides the pair."""
    far = torch.log((q_idx - kv_idx + 1).float())
    score = 20 * torch.tanh(score / 20) + torch.exp(-score.abs()) - 0.1 * far
    score = torch.maximum(score, torch.minimum(-0.5 * score, score * score - 3)) + (h % 3) / 4 + (q_idx // 7) % 2
    return torch.where((q_idx - kv_idx) % 11 == 3, float("-inf"), score)


class Case(NamedTuple):
    """One kind of launch."""

    lengths: tuple[tuple[int, int], ...] = ((300, 300), (65, 129), (200, 333))  # of segments: queries, keys
    window: tuple[int | None, int | None] = (None, 0)
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    first_head: int = 0
    softcap: float = 0.0
    alibi: int = 0  # 1: [h], 2: [b, h]
    score_mod: Callable[..., torch.Tensor] | None = None
    dropout_p: float = 0.0
    by_segment: bool = True
    starts: tuple[int, int] = (0, 0)  # the first positions of queries and keys in each segment
    deterministic: bool = False


CASES: dict[str, Case] = {
    "alibi": Case(alibi=1),
    "alibi by rows": Case(alibi=2, by_segment=False, window=(None, None), first_head=3, starts=(17, 3)),
    "alibi mha d64": Case(alibi=1, heads=(4, 4), dims=(64, 64), window=(100, 20)),
    "biased": Case(score_mod=biased),
    "biased by rows": Case(score_mod=biased, by_segment=False, window=(64, 0), first_head=2),
    "curved": Case(score_mod=curved, heads=(4, 4), lengths=((300, 300), (129, 129))),
    "dropout": Case(dropout_p=0.1),
    "dropout by rows": Case(dropout_p=0.25, by_segment=False, window=(None, None), starts=(5, 37), first_head=1),
    "dropout, aligned starts": Case(dropout_p=0.5, window=(None, None), starts=(32, 480), heads=(4, 4)),
    "dropout d64": Case(dropout_p=0.1, dims=(64, 64), window=(None, None)),
    "dropout d96": Case(dropout_p=0.1, dims=(96, 96), heads=(4, 4), window=(None, None)),
    "dropout 192/128": Case(dropout_p=0.1, dims=(192, 128), heads=(4, 4)),
    "dropout d256": Case(dropout_p=0.1, dims=(256, 256), heads=(4, 2)),
    "everything": Case(alibi=2, score_mod=biased, softcap=30.0, dropout_p=0.2, by_segment=False, window=(200, 0)),
    "everything, deterministic": Case(alibi=1, score_mod=biased, dropout_p=0.2, deterministic=True, heads=(4, 2)),
}


class Problem(NamedTuple):
    """The tensors of a case."""

    operands: Operands
    batch: VarlenBatch
    options: LaunchOptions


def problem_of(case: Case, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """Random tensors for a case."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths_q, lengths_kv = ([pair[n] for pair in case.lengths] for n in (0, 1))
    batch = VarlenBatch.pack(lengths_q, lengths_kv, *case.window, device)
    n, m, (h_q, h_kv), (d_qk, d_v) = sum(lengths_q), sum(lengths_kv), case.heads, case.dims
    operands = Operands(
        torch.randn(n, h_q, d_qk, device=device, dtype=dtype),
        torch.randn(m, h_kv, d_qk, device=device, dtype=dtype),
        torch.randn(m, h_kv, d_v, device=device, dtype=dtype),
        torch.randn(n, h_q, d_v, device=device, dtype=dtype),
        0.5 * torch.randn(h_q, n, device=device),
    )
    inputs = _inputs(case, h_q + case.first_head, device)
    scores = LaunchScores(_positions(case, lengths_q, lengths_kv, device), case.first_head, inputs)
    options = LaunchOptions(ScoreSpec(d_qk**-0.5, case.softcap), case.deterministic, scores)
    return Problem(operands, batch, options)


def _inputs(case: Case, heads: int, device: torch.device) -> ScoreTensors:
    documents = len(case.lengths)
    slopes = torch.rand(heads if case.alibi == 1 else (documents, heads), device=device) / 8
    aux = {}
    if case.score_mod is biased:
        aux = {
            "table": torch.randn(heads, 50, device=device),
            "kinds": torch.randint(0, 3, (2000,), device=device),
        }
    seed = torch.tensor(2**40 + 12345, device=device) if case.dropout_p else None
    return ScoreTensors(slopes if case.alibi else None, case.score_mod, aux, case.dropout_p, seed)


def _positions(case: Case, lengths_q: list[int], lengths_kv: list[int], device: torch.device) -> LaunchPositions:
    (first_q, first_kv), count = case.starts, len(lengths_q)
    shifts = [m - n for n, m in zip(lengths_q, lengths_kv, strict=True)]

    def table(columns: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(columns).to(torch.int32).to(device)

    places = [[s, first_q, first_q + shifts[s], first_kv] for s in range(count)]
    return LaunchPositions(
        table([torch.full((n,), s) for s, n in enumerate(lengths_q)]),
        table([first_q + torch.arange(n) for n in lengths_q]),
        table([first_q + shifts[s] + torch.arange(n) for s, n in enumerate(lengths_q)]),
        table([first_kv + torch.arange(m) for m in lengths_kv]),
        torch.tensor(places, dtype=torch.int32, device=device).T.contiguous() if case.by_segment else None,
        case.by_segment and all(x % 16 == 0 for line in places for x in (line[1], line[3])),
    )


def launched(backend: Backend, problem: Problem) -> LaunchResults:
    """Both passes of a launch, by a kernel library."""
    (q, k, v, dout, dlse), batch, options = problem
    out, lse, *_ = backend.forward(q, k, v, batch, options)
    grads = backend.backward([BackwardOperands(dout, q, k, v, out, lse, dlse)], batch, options)
    return LaunchResults(out, lse, *grads)


def run_case(case: Case) -> list[str]:
    """What is wrong with a case: nothing, or lines of text."""
    backend = by_name("fa4")
    problem = problem_of(case)
    wide, plain = (
        dense(problem.operands.to(dtype), problem.batch, problem.options) for dtype in (torch.float64, torch.bfloat16)
    )
    wrong = list[str]()
    for turn in range(3):  # The second is recorded, the third repeats it.
        found = launched(backend, problem)
        for name, ours, exact, theirs in zip(LaunchResults._fields, found, wide, plain, strict=True):
            (largest, mean), (allowed, usual) = _errors(ours, exact), _errors(theirs, exact)
            line = f"{name}: largest {largest:.2e} mean {mean:.2e}; plain bf16 {allowed:.2e} {usual:.2e}"
            if turn == 0:
                print(f"    {line}")
            if not largest <= 2 * allowed + 1e-3 or not mean <= 1.2 * usual + 1e-4:
                wrong.append(f"turn {turn} {line}")
    if case.deterministic and not all(map(torch.equal, launched(backend, problem), launched(backend, problem))):
        wrong.append("two equal launches differ")
    if case.dropout_p:
        wrong += wrong_masks(case, backend)
    return wrong


def _errors(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    empty = torch.isinf(exact)
    if not torch.equal(torch.isinf(found) & (found < 0), empty & (exact < 0)):
        return float("nan"), float("nan")
    difference = (found.double() - exact).masked_fill(empty, 0.0).abs()
    return float(difference.max()), float(difference.mean())


def wrong_masks(case: Case, backend: Backend) -> list[str]:
    """Compare which pairs are kept, bit for bit, in both passes. With q = 0 and v a row of the identity the output says
    which keys a query has; with dout a row of the identity dv says which queries a key has.
    """
    problem = problem_of(case._replace(score_mod=None, alibi=0, softcap=0.0, window=(None, None)))
    (q, k, v, dout, _), batch, options = problem
    assert options.score_inputs is not None
    positions, inputs = options.score_inputs.positions, options.score_inputs.inputs
    assert inputs.dropout_seed is not None
    heads = torch.arange(q.shape[1], device=q.device) + case.first_head
    q, wrong, d = torch.zeros_like(q), list[str](), v.shape[2]
    for s in range(len(case.lengths)):
        rows, columns = (slice(cu[s], cu[s + 1]) for cu in (batch.cu_q, batch.cu_kv))
        expected = kept_by_dropout(
            positions.q_sequences[rows][None, :, None],
            heads[:, None, None],
            positions.q_positions[rows][None, :, None],
            positions.k_positions[columns][None, None],
            inputs.dropout_seed,
            case.dropout_p,
        )
        forward, backward = torch.zeros_like(expected), torch.zeros_like(expected)
        n, m = expected.shape[1:]
        group = q.shape[1] // k.shape[1]
        for start in range(0, m, d):
            size = min(d, m - start)
            v.zero_()
            v[columns][start : start + size, :, :size] = torch.eye(size, device=v.device, dtype=v.dtype)[:, None]
            out = backend.forward(q, k, v, batch, options).out[rows]
            forward[:, :, start : start + size] = (out[:, :, :size] > 0).transpose(0, 1)
        if group == 1:
            _, lse, *_ = backend.forward(q, k, v, batch, options)
            for start in range(0, n, d):
                size = min(d, n - start)
                dout.zero_()
                dout[rows][start : start + size, :, :size] = torch.eye(size, device=v.device, dtype=v.dtype)[:, None]
                given = BackwardOperands(dout, q, k, v, torch.zeros_like(dout), lse, None)
                dv = backend.backward([given], batch, options).dv[columns]
                backward[:, start : start + size] = (dv[:, :, :size] > 0).permute(1, 2, 0)
        else:  # The queries of a group share dv: give each head its turn.
            _, lse, *_ = backend.forward(q, k, v, batch, options)
            for head in range(group):
                for start in range(0, n, d):
                    size = min(d, n - start)
                    dout.zero_()
                    one = torch.eye(size, device=v.device, dtype=v.dtype)[:, None]
                    dout[rows][start : start + size, head::group, :size] = one
                    given = BackwardOperands(dout, q, k, v, torch.zeros_like(dout), lse, None)
                    dv = backend.backward([given], batch, options).dv[columns]
                    backward[head::group, start : start + size] = (dv[:, :, :size] > 0).permute(1, 2, 0)
        for name, found in (("forward", forward), ("backward", backward)):
            if not torch.equal(found, expected):
                wrong.append(f"segment {s}: {int((found != expected).sum())} of {expected.numel()} bits differ, {name}")
    return wrong


def main(names: list[str]) -> int:
    """Run cases in this process, or all of them in a process each. The number of failures."""
    if names != ["all"]:
        return sum(_shown(name) for name in names)
    began, failed = time.monotonic(), list[str]()
    running = {name: _process(name) for name in CASES}
    for name, process in running.items():
        text, _ = process.communicate()
        print(text, end="", flush=True)
        if process.returncode:
            failed.append(name)
    print(
        f"{len(CASES) - len(failed)} of {len(CASES)} cases right in {time.monotonic() - began:.0f} s; wrong: {failed}"
    )
    return len(failed)


def _process(name: str) -> Any:
    command = [sys.executable, "-m", "tests.gpu.scores.launch_cases", name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _shown(name: str) -> int:
    began = time.monotonic()
    print(f"{name}:")
    try:
        wrong = run_case(CASES[name])
    except Exception:
        wrong = [traceback.format_exc()]
    print(f"  {name}: {'WRONG' if wrong else 'right'} ({time.monotonic() - began:.0f} s)")
    for line in wrong:
        print(f"    {line}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["all"]))
