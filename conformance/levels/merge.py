"""Level `merge`: partial results over disjoint sets of keys, put together by their log-sum-exp.

    lse = log(sum of exp(lse_i))          out = sum of exp(lse_i - lse) * out_i

computed here in float64. Known failures of merges in practice: -inf with -inf gives NaN; exp of a large LSE overflows;
partial outputs in low precision are accumulated in low precision; the result depends on the order beyond rounding;
inputs are overwritten. Where a part saw nothing its out is 0 by contract.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance.dtypes import dtype_of, wide_dtype
from conformance.implementation import Implementation
from conformance.judge.compare_tensors import same_bytes, worst
from conformance.levels.level_calls import call, parts_of, shape_findings
from conformance.levels.problem_text import LevelCase

__all__ = ["Merge", "check", "strategy"]

_LARGEST = 5.0  # Of the partial outputs.


@dataclass(frozen=True)
class Merge(LevelCase):
    """Partial results to merge.

    `blind` is the share of (part, row, head) that saw nothing; rows that no part saw come with it. `level` is added to
    every LSE, `spread` is the size of their differences.
    """

    parts: int = 1
    rows: int = 1
    heads: int = 1
    dim: int = 1
    dtype: str = "float32"  # Of out.
    level: float = 0.0
    spread: float = 1.0
    blind: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        if min(self.parts, self.heads, self.dim) < 1 or self.rows < 0 or not hasattr(torch, self.dtype):
            raise ValueError(f"{self} has no meaning")


strategy: SearchStrategy[Merge] = st.builds(
    Merge,
    parts=st.integers(1, 9),
    rows=st.integers(0, 9),
    heads=st.integers(1, 4),
    dim=st.sampled_from([1, 2, 5, 8, 64, 128]),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "float16"]),
    level=st.sampled_from([0.0, 0.0, 100.0, -100.0, 3000.0, -3000.0]),
    spread=st.sampled_from([1.0, 0.0, 30.0, 1000.0]),
    blind=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 99),
)


def check(impl: Implementation, case: Merge, device: str = "cpu") -> list[str]:
    """The merged result against the definition, in the order given and in another one."""
    parts = _parts(case, device)
    exact_out, exact_lse = _exact(parts)
    copies = [(out.clone(), lse.clone()) for out, lse in parts]
    found, results = [], []
    for order, given in (("", copies), (" in reverse order", copies[::-1])):
        result = call(impl, impl.merge, list(given))
        result = parts_of(f"merge{order}", result, "out", "lse")
        found += [f"{finding}{order}" for finding in _judge(case, result, exact_out, exact_lse)]
        results.append(result)
    if not all(same_bytes(a, b) for old, new in zip(parts, copies, strict=True) for a, b in zip(old, new, strict=True)):
        found.append("merge changed its inputs")
    return found


def _judge(
    case: Merge, result: tuple[torch.Tensor, ...], exact_out: torch.Tensor, exact_lse: torch.Tensor
) -> list[str]:
    out, lse = result
    dtype, wide = dtype_of(case.dtype), wide_dtype(case.dtype)
    wider = (dtype, torch.float32, torch.float64)
    found = shape_findings("out", out, exact_out.shape, wider) + shape_findings("lse", lse, exact_lse.shape, (wide,))
    if found:
        return found
    eps = torch.finfo(wide).eps
    size = abs(case.level) + 4 * case.spread + case.parts  # Of the LSEs: their rounding is a relative error of weights.
    rounding = torch.finfo(out.dtype).eps / 2 * 1.01  # Once, when the result is stored.
    found += worst("lse", lse, exact_lse, 4 * eps * (1 + size))
    # The weights of a part sum to 1, so errors are relative to the largest partial output.
    bound = rounding * exact_out.abs() + 8 * eps * (1 + size) * _LARGEST
    return found + worst("out", out, exact_out, bound)


def _parts(case: Merge, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(case.seed)
    wide = wide_dtype(case.dtype)
    parts = []
    for _ in range(case.parts):
        out = torch.randn(case.rows, case.heads, case.dim, generator=generator, dtype=torch.float64).clamp(
            -_LARGEST, _LARGEST
        )
        lse = torch.randn(case.heads, case.rows, generator=generator, dtype=torch.float64) * case.spread + case.level
        blind = torch.rand(case.heads, case.rows, generator=generator) < case.blind
        out, lse = out.masked_fill(blind.t()[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
        parts.append((out.to(device, dtype_of(case.dtype)), lse.to(device, wide)))
    return parts


def _exact(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = torch.stack([out.double() for out, _ in parts]), torch.stack([lse.double() for _, lse in parts])
    shift = lses.amax(0).nan_to_num(neginf=0.0)
    weights = torch.exp(lses - shift)  # [parts, h, t]
    total = weights.sum(0)
    lse = shift + total.log()
    weights = (weights / total.masked_fill(total == 0, 1.0)).transpose(1, 2)[..., None]
    return (outs * weights).sum(0), lse
