"""Level `kernel`: one diagonal band tile against its definition in float64, forward and backward.

Known failures of tiles:

- A window side of -1 means "unbounded" to one library and minus one to the next.
- Rows that see nothing are NaN, or the mean of all values.
- The diagonal is aligned to the first key, not to the last.
- lse is in base 2, in another layout or in low precision.
- A side larger than the number of keys is taken for unbounded, or the reverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from conformance.dtypes import dtype_of, wide_dtype
from conformance.implementation import Implementation
from conformance.judge.budgets import compare
from conformance.judge.compare_tensors import same_bytes, worst
from conformance.judge.rounded_reference import RoundedScope
from conformance.judge.run_record import Judged
from conformance.levels.level_calls import call, parts_of, shape_findings
from conformance.levels.problem_text import LevelCase
from conformance.levels.tile_definition import exact_tile, visible
from conformance.levels.tile_rounding import UNITS, rounding
from conformance.scores.score_formula import scores_of
from cp_ref.schedules.problem import ScoreOptions

__all__ = ["Tile", "TileGradients", "check", "gradients_strategy", "strategy"]


@dataclass(frozen=True)
class Tile(LevelCase):
    """One call of `tile`; see `conformance.implementation` for what it means."""

    backward: ClassVar[bool] = False
    rows: int = 1  # n
    columns: int = 1  # m
    left: int | None = None
    right: int | None = None
    heads: tuple[int, int] = (1, 1)  # (h_q, h_kv)
    dims: tuple[int, int] = (8, 8)  # (d_qk, d_v)
    scale: float | None = None  # None: d_qk ** -0.5
    softcap: float = 0.0
    dtype: str = "float32"
    counting: bool = False  # q = 0: exp(lse) is the number of visible keys
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        if min(self.rows, self.columns) < 0 or min(*self.heads, *self.dims) < 1 or self.heads[0] % self.heads[1]:
            raise ValueError(f"{self} has no meaning")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        return {**self.band, **self.scores._asdict()}

    @property
    def band(self) -> dict[str, Any]:
        """The sides of the diagonal band."""
        return {"left": self.left, "right": self.right}

    @property
    def scores(self) -> ScoreOptions:
        """The options of scores."""
        return ScoreOptions(self.dims[0] ** -0.5 if self.scale is None else self.scale, self.softcap)


@dataclass(frozen=True)
class TileGradients(Tile):
    """The same, and its gradients."""

    backward: ClassVar[bool] = True


@st.composite
def _tiles(draw: DrawFn, kind: type[Tile]) -> Tile:
    """A tile; its sides are at, before and beyond every border."""
    sizes = st.one_of(st.integers(1, 12), st.sampled_from([0, 1, 16, 17, 64, 65, 129]))
    rows, columns = draw(sizes), draw(sizes)
    border = sorted({0, 1, -1, -2, rows, columns, columns - rows, rows - columns, -rows, -columns, columns + rows})
    sides = st.one_of(st.none(), st.sampled_from(border), st.integers(-12, 12))
    return kind(
        rows=rows,
        columns=columns,
        left=draw(sides),
        right=draw(sides),
        heads=draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)])),
        dims=draw(st.sampled_from([(8, 8), (16, 8), (8, 16), (64, 64), (128, 128)])),
        scale=draw(st.sampled_from([None, 1.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.5])),
        dtype=draw(st.sampled_from(["float32", "float64", "bfloat16", "float16"])),
        counting=False if kind.backward else draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


strategy, gradients_strategy = _tiles(Tile), _tiles(TileGradients)


def check(impl: Implementation, case: Tile, device: str = "cpu") -> Judged:
    """The tile's results against the definition's: up to rounding in float64 and float32, by its budget in lower
    precision.
    """
    inputs = _inputs(case, device)
    kept = {name: x.clone() for name, x in inputs.items()}
    results = _call(impl, case, inputs)
    found = [f"tile changed {name}" for name, x in inputs.items() if not same_bytes(x, kept[name])]
    exact = exact_tile(**kept, **case.band, scores=case.scores)
    dtypes = {"lse": wide_dtype(case.dtype)}
    for name, x in results.items():
        found += shape_findings(name, x, exact[name].shape, (dtypes.get(name, dtype_of(case.dtype)),))
    if found:
        return Judged(found)
    if case.counting:
        return Judged(_check_count(results["lse"], exact["lse"]))
    if case.dtype in ("float64", "float32"):
        units = rounding(**kept, **case.band, scores=case.scores)
        for name, x in results.items():
            found += worst(name, x, exact[name], UNITS * units[name])
        return Judged(found)
    found += [
        f"{name} is not finite where it must be"
        for name, x in results.items()
        if not torch.equal(x.isfinite(), exact[name].isfinite())
    ]
    rows = [] if found else compare(results, exact, _eager(case, kept), dtype_of(case.dtype), _rounded(case, kept))
    ratios = {f"{row.name} max": row.max_error / row.max_bound for row in rows if row.max_bound > 0}
    return Judged(found + [str(row) for row in rows if not row.ok], ratios)


def _call(impl: Implementation, case: Tile, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """out and lse, or with `case.backward` the gradients too: by `tile_backward`, or by autograd through `tile`."""
    q, k, v, dout = inputs.values()
    by_autograd = case.backward and not impl.offers("tile_backward")
    leaves = [x.detach().requires_grad_(by_autograd) for x in (q, k, v)]
    with torch.set_grad_enabled(by_autograd):
        out, lse = parts_of("tile", call(impl, impl.tile, *leaves, **case.options), "out", "lse")
    results = {"out": out.detach(), "lse": lse.detach()}
    if not case.backward:
        return results
    if by_autograd:
        if not out.requires_grad:
            impl.tile_backward()  # which is missing
        out.backward(dout)
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    else:
        grads = call(impl, impl.tile_backward, *leaves, out, lse, dout, **case.options)
    names = ("dq", "dk", "dv")
    return results | dict(zip(names, parts_of("tile_backward", grads, *names), strict=True))


def _inputs(case: Tile, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    shapes = {
        "q": (case.rows, case.heads[0], case.dims[0]),
        "k": (case.columns, case.heads[1], case.dims[0]),
        "v": (case.columns, case.heads[1], case.dims[1]),
        "dout": (case.rows, case.heads[0], case.dims[1]),
    }
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    if case.counting:
        drawn["q"].zero_()
    return {name: x.to(device, dtype_of(case.dtype)) for name, x in drawn.items()}


def _check_count(lse: torch.Tensor, exact: torch.Tensor) -> list[str]:
    count, want = lse.double().exp(), exact.exp().round()
    wrong = ((count - want).abs() > 0.25) | count.isnan()
    if not wrong.any():
        return []
    head, row = (int(n) for n in wrong.nonzero()[0])
    return [
        f"row {row}, head {head} counts {count[head, row].item():.6g} visible keys by exp(lse), but there are "
        f"{want[head, row].item():g}; {int(wrong.any(0).sum())} of {lse.shape[1]} rows count wrong"
    ]


def _rounded(case: Tile, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same in float32 inside, with delta from a rounded output. With few visible keys, gradients are small
    differences, and that error is larger than the baseline's.
    """
    q, k, v, dout = inputs.values()
    seen = visible(case.rows, case.columns, case.left, case.right).to(q.device)
    one = RoundedScope(case.scores, seen, q, k, v, torch.float32)
    out, lse, _ = one.forward(None)
    dq, dk, dv, _ = one.backward(dout, torch.zeros_like(lse), out, lse, None)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _eager(case: Tile, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The baseline: the same by plain PyTorch, every intermediate in the inputs' dtype; gradients by autograd."""
    q, k, v, dout = inputs.values()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(case.heads[0] // case.heads[1], dim=1) for x in leaves[1:])
    hidden = ~visible(case.rows, case.columns, case.left, case.right).to(q.device)
    with torch.enable_grad():
        scores, _ = scores_of(torch.einsum("nhd,mhd->hnm", leaves[0], wide_k), case.scores)
        empty = hidden.all(-1)
        weights = torch.softmax(scores.masked_fill(hidden & ~empty[:, None], -torch.inf), dim=-1)
        out = torch.einsum("hnm,mhd->nhd", weights.masked_fill(hidden, 0.0), wide_v)
        grads = torch.autograd.grad(out, leaves, dout)
    double = exact_tile(**inputs, **case.band, scores=case.scores)["lse"]  # a float32 result everywhere
    results = {"out": out.detach(), "lse": double.float()}
    return results | dict(zip(("dq", "dk", "dv"), grads, strict=True))
