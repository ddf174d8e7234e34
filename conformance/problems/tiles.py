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
from hypothesis.strategies import DrawFn, SearchStrategy

from conformance.case import dtype_of, wide_dtype
from conformance.checks.baselines import RoundedScope
from conformance.checks.budgets import compare, worst
from conformance.implementation import Implementation
from conformance.problems.problem import LevelProblem, call, parts_of, shape_findings
from conformance.record import Judged
from conformance.scores import scores_of
from cp_ref.schedules.problem import ScoreSpec

__all__ = [
    "UNITS",
    "Merge",
    "Tile",
    "TileGradients",
    "exact_tile",
    "merges",
    "rounding",
    "tile_gradients",
    "tiles",
    "visible",
]

# ---- the definition
#
# One diagonal band tile by the definition: a dense float64 softmax over a mask that is written out, its gradients by
# autograd.
#
#     e = exp(score) where visible, else 0        lse = log(sum of e)        out = sum of e * v / sum of e
#
# No largest score is taken out first: scores of normal inputs are far from the end of float64.


def visible(n: int, m: int, left: int | None, right: int | None) -> torch.Tensor:
    """Whether each of n rows sees each of m columns, bool [n, m]. Row i sees column j if i + (m - n) - left <= j and
    j <= i + (m - n) + right. A side of None is unbounded.

    >>> visible(2, 3, None, 0).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    rows = [
        [(left is None or i + (m - n) - left <= j) and (right is None or j <= i + (m - n) + right) for j in range(m)]
        for i in range(n)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(n, m)


def exact_tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    left: int | None,
    right: int | None,
    scores: ScoreSpec,
) -> dict[str, torch.Tensor]:
    """The results of one diagonal band tile (see `conformance.implementation`), float64: out, lse, dq, dk, dv.

    Args:
        q, k, v: [n, h_q, d_qk], [m, h_kv, d_qk], [m, h_kv, d_v]; query head h uses kv head h // (h_q // h_kv).
        dout: [n, h_q, d_v], the gradient of out; lse has none.
    """
    group = q.shape[1] // k.shape[1]
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        keys, values = (x.repeat_interleave(group, dim=1) for x in leaves[1:])
        s, _ = scores_of(torch.einsum("nhd,mhd->hnm", leaves[0], keys), scores)
        weights = s.exp() * visible(len(q), len(k), left, right).to(q.device)
        total = weights.sum(-1)  # [h, n]
        mean = weights / total.masked_fill(total == 0, 1.0)[..., None]
        out = torch.einsum("hnm,mhd->nhd", mean, values)
        dq, dk, dv = torch.autograd.grad(out, leaves, dout.double())
    return {"out": out.detach(), "lse": total.detach().log(), "dq": dq, "dk": dk, "dv": dv}


# ---- rounding
#
# How far rounding may carry the results of one tile from the exact ones, value by value, from the sizes of what is
# added up.
#
# A sum of n terms of independent signs, such as a product over head dims, has the error eps * sqrt(n * sum of squares).
# A sum of terms that share a sign, such as the denominator, has the error eps * sqrt(n) times its size. A function of a
# value inherits the value's error in proportion. The worst total is one unit; a kernel may have `UNITS` of it.
#
# Where a gradient is a small difference of large numbers, its own size says nothing of its error: with one visible key
# dq is 0, and is computed as p * (dout . v - dout . out) * k.


# Needed by both packages in 1,600 drawn tiles: 0.4 in float32, and 0.6 in float64, where the exact results are rounded
# too. The rest is for fast exponentials, and sums in other orders.
UNITS = 2.0


def rounding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    left: int | None,
    right: int | None,
    scores: ScoreSpec,
) -> dict[str, torch.Tensor]:
    """One unit of rounding, in the dtype of q, of each value of `exact_tile`, which has the same arguments: float64.

    A name that ends in _e is the unit of the value named before it. Scores and weights are [h_q, n, m].
    """
    eps, tiny = torch.finfo(q.dtype).eps, torch.finfo(q.dtype).tiny
    n, m, heads_kv, group = len(q), len(k), k.shape[1], q.shape[1] // k.shape[1]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))

    def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The product a . b of each row of a and each row of b, [h, n, m], and its unit."""
        exact, squares = (torch.einsum("nhd,mhd->hnm", x, y) for x, y in ((a, b), (a.square(), b.square())))
        return exact, eps * (exact.abs() + (a.shape[2] * squares).sqrt())

    scale, softcap = scores.scale, scores.softcap
    s, s_e = (scale * x for x in product(q, keys))
    slope, slope_e = 1.0, 0.0
    if softcap > 0:
        t = torch.tanh(s / softcap)
        slope = 1 - t.square()
        t_e = slope * s_e / softcap + eps * t.abs()
        slope_e = 2 * t.abs() * t_e + eps
        s, s_e = softcap * t, softcap * t_e
    seen = visible(n, m, left, right).to(q.device)
    total = (s.exp() * seen).sum(-1, keepdim=True)
    lse = total.masked_fill(total == 0, 1.0).log()
    p = (s - lse).exp() * seen
    lse_e = (p * s_e).sum(-1, keepdim=True) + eps * (lse.abs() + m**0.5)
    p_e = p * (s_e + lse_e + eps * (s.abs() + 1)) + tiny * seen

    dp, dp_e = product(dout, values)
    delta = (p * dp).sum(-1, keepdim=True)
    delta_e = (p_e * dp.abs() + p * dp_e).sum(-1, keepdim=True)
    rise, rise_e = p * (dp - delta), p_e * (dp - delta).abs() + p * (dp_e + delta_e)
    ds, ds_e = scale * rise * slope, scale * (rise_e * slope + rise.abs() * (slope_e + eps))

    def of_rows(w: torch.Tensor, w_e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The unit of w @ x, [n, h_q, d]."""
        return torch.einsum("hnm,mhd->nhd", w_e + eps * m**0.5 * w.abs(), x.abs())

    def of_columns(w: torch.Tensor, w_e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The unit of w^T @ x, [m, h_kv, d]."""
        unit = torch.einsum("hnm,nhd->mhd", w_e + eps * (n * group) ** 0.5 * w.abs(), x.abs())
        return unit.unflatten(1, (heads_kv, group)).sum(2)

    units = {"out": of_rows(p, p_e, values), "lse": lse_e[..., 0], "dq": of_rows(ds, ds_e, keys)}
    return units | {"dk": of_columns(ds, ds_e, q), "dv": of_columns(p, p_e, dout)}


# ---- tiles


@dataclass(frozen=True)
class Tile(LevelProblem):
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
    def scores(self) -> ScoreSpec:
        """The options of scores."""
        return ScoreSpec(self.dims[0] ** -0.5 if self.scale is None else self.scale, self.softcap)

    def inputs(self, device: str) -> dict[str, torch.Tensor]:
        """q, k, v and dout."""
        generator = self.generator()
        shapes = {
            "q": (self.rows, self.heads[0], self.dims[0]),
            "k": (self.columns, self.heads[1], self.dims[0]),
            "v": (self.columns, self.heads[1], self.dims[1]),
            "dout": (self.rows, self.heads[0], self.dims[1]),
        }
        drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        if self.counting:
            drawn["q"].zero_()
        return {name: x.to(device, dtype_of(self.dtype)) for name, x in drawn.items()}

    def play(self, impl: Implementation, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """out and lse, or with `backward` the gradients too: by `tile_backward`, or by autograd through `tile`."""
        q, k, v, dout = inputs.values()
        by_autograd = self.backward and not impl.offers("tile_backward")
        leaves = [x.detach().requires_grad_(by_autograd) for x in (q, k, v)]
        with torch.set_grad_enabled(by_autograd):
            out, lse = parts_of("tile", call(impl, impl.tile, *leaves, **self.options), "out", "lse")
        results = {"out": out.detach(), "lse": lse.detach()}
        if not self.backward:
            return results
        if by_autograd:
            if not out.requires_grad:
                impl.tile_backward()  # which is missing
            out.backward(dout)
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        else:
            grads = call(impl, impl.tile_backward, *leaves, out, lse, dout, **self.options)
        names = ("dq", "dk", "dv")
        return results | dict(zip(names, parts_of("tile_backward", grads, *names), strict=True))

    def judge(self, inputs: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> Judged:
        """The results against the definition's: up to rounding in float64 and float32, by their budgets in lower
        precision.
        """
        exact, dtype = exact_tile(**inputs, **self.band, scores=self.scores), dtype_of(self.dtype)
        found: list[str] = []
        for name, x in results.items():
            found += shape_findings(name, x, exact[name].shape, (wide_dtype(dtype) if name == "lse" else dtype,))
        if found:
            return Judged(found)
        if self.counting:
            return Judged(_check_count(results["lse"], exact["lse"]))
        if self.dtype in ("float64", "float32"):
            units = rounding(**inputs, **self.band, scores=self.scores)
            return Judged(f for name, x in results.items() for f in worst(name, x, exact[name], UNITS * units[name]))
        unlike = [name for name, x in results.items() if not torch.equal(x.isfinite(), exact[name].isfinite())]
        if unlike:
            return Judged(f"{name} is not finite where it must be" for name in unlike)
        rows = compare(results, exact, _eager(self, inputs), dtype, _rounded(self, inputs))
        ratios = {f"{row.name} max": row.max_error / row.max_bound for row in rows if row.max_bound > 0}
        return Judged([str(row) for row in rows if not row.ok], ratios)


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


tiles, tile_gradients = _tiles(Tile), _tiles(TileGradients)


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


# ---- merges
#
# Level `merge`: partial results over disjoint sets of keys, put together by their log-sum-exp.
#
#     lse = log(sum of exp(lse_i))          out = sum of exp(lse_i - lse) * out_i
#
# computed here in float64. Known failures of merges in practice: -inf with -inf gives NaN; exp of a large LSE
# overflows; partial outputs in low precision are accumulated in low precision; the result depends on the order beyond
# rounding; inputs are overwritten. Where a part saw nothing its out is 0 by contract.


_LARGEST = 5.0  # Of the partial outputs.


@dataclass(frozen=True)
class Merge(LevelProblem):
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

    def inputs(self, device: str) -> dict[str, torch.Tensor]:
        """out and lse of each part: "out 0", "lse 0", "out 1", ..."""
        generator, wide = self.generator(), wide_dtype(self.dtype)
        made: dict[str, torch.Tensor] = {}
        for n in range(self.parts):
            out = torch.randn(self.rows, self.heads, self.dim, generator=generator, dtype=torch.float64)
            lse = torch.randn(self.heads, self.rows, generator=generator, dtype=torch.float64)
            lse = lse * self.spread + self.level
            blind = torch.rand(self.heads, self.rows, generator=generator) < self.blind
            out = out.clamp(-_LARGEST, _LARGEST).masked_fill(blind.t()[..., None], 0.0)
            made[f"out {n}"] = out.to(device, dtype_of(self.dtype))
            made[f"lse {n}"] = lse.masked_fill(blind, -torch.inf).to(device, wide)
        return made

    def play(self, impl: Implementation, inputs: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
        """The merged out and lse, in the order given and in the other one."""
        parts = _parts(inputs)
        orders = {"": parts, " in reverse order": parts[::-1]}
        return {
            order: parts_of(f"merge{order}", call(impl, impl.merge, given), "out", "lse")
            for order, given in orders.items()
        }

    def judge(self, inputs: dict[str, torch.Tensor], results: dict[str, tuple[torch.Tensor, ...]]) -> list[str]:
        """The merged results against the definition."""
        exact = _merged(_parts(inputs))
        return [f"{finding}{order}" for order, got in results.items() for finding in self._judge(got, exact)]

    def _judge(self, result: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, torch.Tensor]) -> list[str]:
        (out, lse), (exact_out, exact_lse) = result, exact
        dtype, wide = dtype_of(self.dtype), wide_dtype(self.dtype)
        wider = (dtype, torch.float32, torch.float64)
        found = shape_findings("out", out, exact_out.shape, wider) + shape_findings(
            "lse", lse, exact_lse.shape, (wide,)
        )
        if found:
            return found
        eps = torch.finfo(wide).eps
        size = abs(self.level) + 4 * self.spread + self.parts  # of the LSEs: a relative error of weights by rounding
        once = torch.finfo(out.dtype).eps / 2 * 1.01  # when the result is stored
        # the weights of a part sum to 1, so errors are relative to the largest partial output
        bound = once * exact_out.abs() + 8 * eps * (1 + size) * _LARGEST
        return worst("lse", lse, exact_lse, 4 * eps * (1 + size)) + worst("out", out, exact_out, bound)


merges: SearchStrategy[Merge] = st.builds(
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


def _parts(inputs: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(out, lse) of each part."""
    values = list(inputs.values())
    return list(zip(values[::2], values[1::2], strict=True))


def _merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = torch.stack([out.double() for out, _ in parts]), torch.stack([lse.double() for _, lse in parts])
    shift = lses.amax(0).nan_to_num(neginf=0.0)
    weights = torch.exp(lses - shift)  # [parts, h, t]
    total = weights.sum(0)
    lse = shift + total.log()
    weights = (weights / total.masked_fill(total == 0, 1.0)).transpose(1, 2)[..., None]
    return (outs * weights).sum(0), lse
