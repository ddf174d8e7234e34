"""Bugs in corners that random problems of a few dozen tokens do not reach: each is seen by one kind of check alone."""

from __future__ import annotations

from typing import Any

import torch

from cp_ref.schedules.problem import Problem
from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]


def _short_table(run_forward: Any, problem: Problem, *arguments: Any, **named: Any) -> Any:
    """Positions are looked up in a table of 1,024: rows beyond count one key too few."""
    results = run_forward(problem, *arguments, **named)
    if max((s.len_kv for s in problem.sequences), default=0) > 1024:
        results.lse[-1] += 1 / 512
    return results


def _memory_of_int32(read_lengths: Any, name: str, x: Any) -> Any:
    """The memory of int64 lengths is read as int32: every second number is 0."""
    if isinstance(x, torch.Tensor) and x.dtype == torch.int64:
        x = x.contiguous().view(torch.int32)[: len(x)]
    return read_lengths(name, x)


def _float16_sums(add: Any, self: Any, kind: str, rows: slice, heads: slice, *values: torch.Tensor) -> None:
    add(self, kind, rows, heads, *values)
    if kind == "dkv" and self.work.cp_size > 4 and self.tensors["q"][0].dtype == torch.float16:
        for x in self.tensors[kind]:
            x[rows, heads] = x[rows, heads].half().to(x.dtype)


def _seldom_together(run_forward: Any, problem: Problem, *arguments: Any, **named: Any) -> Any:
    results = run_forward(problem, *arguments, **named)
    seldom = problem.attn_mask_type == "causal" and problem.d_v > problem.d_qk
    return results._replace(out=results.out * 1.5) if seldom else results


_FORWARD = "cp_ref.reference_attention.run_forward"

MUTANTS: dict[str, Mutant] = {
    "table-of-1024-positions": Mutant(
        "positions beyond 1,024 are not in a table",
        _FORWARD,
        wrap(_short_table),
        "special",
        where="positions-beyond-1024",
    ),
    "int64-lengths-as-int32": Mutant(
        "the memory of int64 lengths is read as int32",
        "cp_ref.contract.read_problem.read_lengths",
        wrap(_memory_of_int32),
        "spellings",
    ),
    "dkv-in-float16-beyond-four-ranks": Mutant(
        "dk and dv of a longer ring are added up in float16",
        "cp_ref.executor.rank_tensors.World.add",
        wrap(_float16_sums),
        "special",
        where="gradients-of-a-ring-of-eight",
    ),
    "causal-with-wide-values": Mutant(
        "a causal mask with d_v > d_qk, which no random problem of the profile quick has",
        _FORWARD,
        wrap(_seldom_together),
        "pairs",
    ),
}
