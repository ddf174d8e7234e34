"""Speed of launches with scores on one GPU, against FlashAttention 4's own score_mod, written by hand in CuTe.

python -m tests.gpu.scores.launch_speed [--tokens 8192] [--out speed.csv]
"""

from __future__ import annotations

import argparse
import csv
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cp_fast.kernels.attention.backend_protocol import BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.fa4.fa4_backend import _interface
from cp_fast.kernels.attention.fa4.scores.score_tiles import library
from cp_ref.schedules.problem import ScoreSpec
from tests.gpu.scores.launch_cases import Case, Problem, problem_of

Step = Callable[[], Any]


def near(
    score: torch.Tensor,
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """A scaled score and a bias by head and distance."""
    return score * 0.5 + table[h, (q_idx - kv_idx).clamp(0, 49)]


def by_hand() -> dict[str, tuple[Any, Any]]:
    """The same two functions for the library itself, and their derivatives."""
    cutlass, cute = library("cutlass"), library("cutlass.cute")

    @cute.jit
    def alibi(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        slope = aux_tensors[0][h[0]]
        distance = q_idx - kv_idx
        distance = cute.where(distance < cute.full_like(distance, 0), cute.full_like(distance, 0) - distance, distance)
        return score - distance.to(cutlass.Float32) * cute.full_like(score, slope)

    @cute.jit
    def alibi_bwd(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return grad

    @cute.jit
    def near(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        distance = q_idx[0] - kv_idx[0]
        distance = cutlass.min(cutlass.max(distance, 0), 49)
        bias = aux_tensors[0][h[0], distance]
        return score * cute.full_like(score, 0.5) + cute.full_like(score, bias)

    @cute.jit
    def near_bwd(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return grad * cute.full_like(grad, 0.5)

    return {"alibi": (alibi, alibi_bwd), "near": (near, near_bwd)}


def ours(problem: Problem) -> tuple[Step, Step]:
    """Both passes by the backend."""
    backend = by_name("fa4")
    (q, k, v, dout, _), batch, options = problem
    out, lse, *_ = backend.forward(q, k, v, batch, options)
    operands = BackwardOperands(dout, q, k, v, out, lse, None)
    return lambda: backend.forward(q, k, v, batch, options), lambda: backend.backward([operands], batch, options)


def theirs(problem: Problem, mods: tuple[Any, Any], aux: list[torch.Tensor]) -> tuple[Step, Step]:
    """Both passes by the library alone, with its own score_mod."""
    interface: Any = _interface()
    (q, k, v, dout, _), batch, options = problem
    common: dict[str, Any] = {
        "cu_seqlens_q": batch.device_cu_q,
        "cu_seqlens_k": batch.device_cu_kv,
        "window_size_left": batch.left,
        "window_size_right": batch.right,
        "softmax_scale": options.scores.scale,
        "aux_tensors": aux,
    }

    def forward() -> Any:
        return interface._flash_attn_fwd(q, k, v, **common, score_mod=mods[0], return_lse=True)

    out, lse, *_ = forward()

    def backward() -> Any:
        return interface._flash_attn_bwd(q, k, v, out, dout, lse, **common, score_mod=mods[0], score_mod_bwd=mods[1])

    return forward, backward


def milliseconds(step: Step, turns: int = 15) -> float:
    """The median time of a step on the GPU."""
    for _ in range(4):
        step()
    times = list[float]()
    for _ in range(turns):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times)


def main() -> None:
    """Measure all, and write a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    base = Case(lengths=((given.tokens, given.tokens),), heads=(32, 8))
    plain = problem_of(base)
    plain = plain._replace(options=LaunchOptions(ScoreSpec(128**-0.5)))
    alibi = problem_of(base._replace(alibi=1))
    assert alibi.options.score_inputs is not None
    inputs = alibi.options.score_inputs.inputs
    slopes, table = inputs.alibi_slopes, torch.randn(32, 50, device="cuda")
    assert slopes is not None
    bias = alibi.options.score_inputs._replace(
        inputs=inputs._replace(alibi_slopes=None, score_mod=near, aux_tensors={"table": table})
    )
    cases: dict[str, Callable[[], tuple[Step, Step]]] = {
        "plain": lambda: ours(plain),
        "alibi, the library's score_mod": lambda: theirs(plain, by_hand()["alibi"], [slopes]),
        "alibi": lambda: ours(alibi),
        "alibi by rows": lambda: ours(problem_of(base._replace(alibi=1, by_segment=False))),
        "bias, the library's score_mod": lambda: theirs(plain, by_hand()["near"], [table]),
        "bias, traced": lambda: ours(alibi._replace(options=alibi.options._replace(score_inputs=bias))),
        "dropout": lambda: ours(problem_of(base._replace(dropout_p=0.1))),
        "dropout by rows": lambda: ours(problem_of(base._replace(dropout_p=0.1, by_segment=False))),
        "alibi and dropout": lambda: ours(problem_of(base._replace(alibi=1, dropout_p=0.1))),
        "plain again": lambda: ours(plain),
    }
    lines = list[dict[str, Any]]()
    for name, make in cases.items():
        try:
            forward, backward = make()
            times = milliseconds(forward), milliseconds(backward)
        except Exception:
            print(f"{name} FAILED:\n{traceback.format_exc()}", flush=True)
            continue
        lines.append({"case": name, "tokens": given.tokens, "forward_ms": times[0], "backward_ms": times[1]})
        first = lines[0]
        ratios = [ms / first[key] for key, ms in zip(("forward_ms", "backward_ms"), times, strict=True)]
        print(f"{name:34s} forward {times[0]:7.3f} ms ({ratios[0]:.2f})  backward {times[1]:7.3f} ms ({ratios[1]:.2f})")
    if given.out is not None and lines:
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
