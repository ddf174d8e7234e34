"""Error budgets: how far a result in low precision may be from the exact one.

The unit is the error of the baseline (`eager_attention`: plain PyTorch in the same dtype), or that of
`rounded_results` (float32 inside, as every production kernel) where it is given and larger. Of each result

    the largest error is at most  2   x the unit's largest error  +  one rounding of the largest value
    the mean error is at most     1.2 x the unit's mean error

In float16 and bfloat16 plain PyTorch rounds every score and every weight. Its error is three to four times that of a
good kernel. A bound in its units alone misses partial results that are rounded before they are merged. So there

    the mean error is at most     1.4 x the rounded reference's mean error, too, and 1.48 x for a gradient.

A kernel that returns each partial output in the input dtype stays below (1.3). A running sum in that dtype does not
(without a mask 1.7 on four ranks, 2.3 on eight). Every kernel library returns partial gradients in the input dtype.
Their errors are independent, and as large together as the rounding of the sum: sqrt(2) = 1.41 of it in total.

If every query sees one key, nothing else is rounded: p = 1, and plain PyTorch equals the rounded reference. Then the
mean of both roundings is 1.59 times that of one on two ranks, and 1.68 times on sixteen. The mean of a running sum is
1.87 times on three ranks, and 2.3 on five. So there a gradient may have 1.72 x. A mean over few rows varies, so its
bound is wider, by terms that vanish as 1 / sqrt(rows).

Gradients are small differences of larger numbers, above all if few keys are visible: ds = p * (dp - delta), and every
production kernel computes delta from a rounded output. So "one rounding" is a rounding of the largest gradient. A
gradient of exactly 0 (one visible key) may be the noise of sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from conformance.case import Case, wide_dtype

__all__ = [
    "CAREFUL_FACTOR",
    "CAREFUL_GRADIENT_FACTOR",
    "MAX_FACTOR",
    "MEAN_FACTOR",
    "Row",
    "Tensors",
    "close",
    "compare",
    "largest",
    "same_bits",
    "same_bytes",
    "tolerance",
    "worst",
]

# ---- tensors against exact ones, and against their own copies
#
# Tensors against exact ones, and against their own copies.


Tensors = dict[str, torch.Tensor]  # results of a call by name


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes, dtypes and bits; NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(one, other)


def worst(
    name: str,
    got: torch.Tensor,
    exact: torch.Tensor,
    bound: torch.Tensor | float,
    place: Callable[[Sequence[int]], str] = str,
) -> list[str]:
    """A finding about the value that exceeds its bound by most. NaN is no value; infinities have to be equal.

    >>> worst("out", torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]).double(), 0.1)
    ['out is 2.5 at [1], but should be 2 (error 0.5, allowed 0.1; 1 of 2 values are wrong)']
    """
    got = got.detach().double()
    error = torch.where(got == exact, 0.0, (got - exact).abs()).nan_to_num(nan=torch.inf)
    over = error - bound
    if not over.numel() or over.max() <= 0:
        return []
    at = tuple(int(n) for n in torch.unravel_index(over.argmax(), over.shape))
    allowed = bound[at].item() if isinstance(bound, torch.Tensor) else bound
    return [
        f"{name} is {got[at].item():.12g} at {place(list(at))}, but should be {exact[at].item():.12g} "
        f"(error {error[at].item():.2g}, allowed {allowed:.2g}; {int((over > 0).sum())} of {over.numel()} values are "
        "wrong)"
    ]


def tolerance(case: Case, exact: torch.Tensor) -> float:
    """The largest error that re-ordered sums may make: relative to the largest exact value, 1 at least.

    Scores grow with the square of the magnitude of q and k, and their rounding errors with them. In float16 and
    bfloat16, which this tier does not draw, it is some roundings: the budget tier is closer there.
    """
    eps = torch.finfo(getattr(torch, case.problem.dtype)).eps
    base = {"float64": 1e-10, "float32": 2e-5}.get(case.problem.dtype, 8 * eps)
    return base * case.magnitude**2 * max(1.0, largest(exact))


def same_bits(what: str, one: Tensors, other: Tensors) -> list[str]:
    """Which results are not the same to the last bit (NaN and signs included)."""
    found = []
    for name, x in one.items():
        y = other.get(name)
        if y is None or x.shape != y.shape or x.dtype != y.dtype:
            found.append(f"{name} {what} has another shape or dtype")
        elif not same_bytes(x, y):
            apart = (x.double() - y.double()).abs().nan_to_num(torch.inf).max().item()
            found.append(f"{name} {what} differs, by up to {apart:.3g}")
    return found


def close(what: str, case: Case, one: Tensors, other: Tensors) -> list[str]:
    """Which results differ by more than sums in another order may."""
    found = []
    for name, x in one.items():
        a, b = x.double(), other[name].double()
        if a.shape != b.shape:
            found.append(f"{name} {what} has shape {list(b.shape)}, not {list(a.shape)}")
            continue
        error = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(torch.inf)
        limit = tolerance(case, a)
        if error.numel() and error.max().item() > limit:
            found.append(f"{name} {what} differs by up to {error.max().item():.3g}, more than {limit:.2g}")
    return found


# ---- budgets


MAX_FACTOR = 2.0
MEAN_FACTOR = 1.2
CAREFUL_FACTOR = 1.4
CAREFUL_GRADIENT_FACTOR = 1.48
_ONE_ROUNDING_FACTOR = 1.72  # Of a gradient if the references round only the result.
_ALIKE = 1.05  # They do so if their mean errors are as 1 to this at most.
GRADIENTS = ("dq", "dk", "dv", "d_offset")
_SHARP = ("out", "dq", "dk", "dv")
_WIDE = ("lse", "max_logit", "d_offset")  # Results in float32 for float16 and bfloat16 problems.

# Allowances in addition to the factors. They come from theory and from `conformance.checks.baselines`, never
# from the code under test. That reference is float32 inside and independent of the judged code. The "needed" value is
# the least that keeps 1,500 drawn problems of that reference within every budget (python -m tests.meta.calibration).

# Sums in another order, in units of the accumulation dtype's eps times the size of the largest values. Needed: 0.9.
_NOISE = 4.0
# Float32 results of low-precision operands. A choice, half-way between a rounding of float32 and one of bfloat16:
# matrix units add up with fewer bits than float32 has, and fast exponentials and hyperbolic tangents give 11 to 22
# bits. Needed on a CPU, which has neither: 0.
_WIDE_NOISE = 2.0**-13
# Of either, for the mean: noise that is normally distributed has a mean of 0.8 deviations where the largest of
# thousands has 4 to 6. Needed: 0.004.
_MEAN_NOISE = 0.125
# The baseline's luck, over sqrt(rows), as a share of its mean error. Means over n rows of independent errors have a
# relative deviation of sqrt(pi / 2 - 1) / sqrt(n) = 0.76 / sqrt(n), the ratio of two 1.07 / sqrt(n). Needed: 0.
_LUCK = 1.0
# The error by a delta of rounded outputs, over sqrt(rows), in units of eps times the size of the gradients.
# Needed: 0.3.
_DELTA = 1.0


@dataclass(frozen=True)
class Row:
    """One result's errors and bounds. `note` says in words what is wrong beyond the numbers; empty otherwise."""

    name: str
    max_error: float
    max_bound: float
    mean_error: float
    mean_bound: float
    ok: bool
    note: str = ""

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"NOT OK{': ' if self.note else ''}{self.note}"
        return (
            f"{self.name}: max error {self.max_error:.3g} (bound {self.max_bound:.3g}), "
            f"mean error {self.mean_error:.3g} (bound {self.mean_bound:.3g}): {verdict}"
        )


def compare(
    fast: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    baseline: dict[str, torch.Tensor],
    dtype: torch.dtype,
    rounded: dict[str, torch.Tensor] | None = None,
) -> list[Row]:
    """Hold results against their budgets.

    Args:
        fast: what is judged, under any of the names out, lse, dq, dk, dv, d_offset, max_logit; any shapes, padding left
            in or cut out alike in all three.
        exact: the same of the oracle, float64. Give all that there is, lse and every gradient: the sizes of results
            that `fast` lacks help to judge the noise of those that it has.
        baseline: the same of `eager_attention`, on the same inputs in `dtype`.
        dtype: of q, k and v. (lse, max_logit and d_offset are float32 results for float16 and bfloat16.)
        rounded: the same of `rounded_results`. A kernel forms delta from an output that was rounded, which the
            baseline does not. Where few keys are seen, gradients are small differences, and that error is the larger
            one.

    Returns:
        One row for each result in `fast`, in its order. `ok` is false for an error beyond a bound, for a NaN, for an
        infinity where the exact result has none (or none where it has one), for another shape, and where the baseline
        itself is plainly wrong.

    Raises:
        KeyError: `exact` or `baseline` lacks a result of `fast`.

    >>> exact = {"out": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    >>> eager = {"out": torch.tensor([1.0, 2.0]).bfloat16()}
    >>> compare({"out": torch.tensor([1.0, 2.5])}, exact, eager, torch.bfloat16)[0].ok
    False
    """
    gradients = [exact[name] for name in ("out", *GRADIENTS) if name in exact]
    gradient_size, gradient_mean = (max(map(of, gradients), default=0.0) for of in (largest, _mean))
    # large scores have large rounding errors, and weights inherit them as relative errors
    spread = 1.0 + largest(exact["lse"]) if "lse" in exact else 1.0
    rows = []
    for name, got in fast.items():
        sizes = _Sizes(max(largest(exact[name]), 1.0 if name in _WIDE else 0.0), 0.0, spread if name == "out" else 1.0)
        if name in GRADIENTS:
            sizes = _Sizes(gradient_size, gradient_mean, spread)
        references = [baseline[name], *([] if rounded is None else [rounded[name]])]
        rows.append(_row(name, got, exact[name], references, dtype, sizes))
    return rows


@dataclass(frozen=True)
class _Sizes:
    """Of the values whose rounding shows in a result: the largest, their mean, and how scores magnify the noise."""

    largest: float
    mean: float
    spread: float


def _row(
    name: str, got: torch.Tensor, exact: torch.Tensor, references: list[torch.Tensor], dtype: torch.dtype, sizes: _Sizes
) -> Row:
    baseline = references[0]
    if got.shape != exact.shape or baseline.shape != exact.shape:
        shapes = f"shape {list(got.shape)}, baseline {list(baseline.shape)}, exact {list(exact.shape)}"
        return Row(name, torch.inf, 0.0, torch.inf, 0.0, False, shapes)
    exact, (baseline, *others) = exact.double(), (x.detach().double().to(exact.device) for x in references)
    got = got.detach().double().to(exact.device)
    counted = (exact != 0) | (got != 0) | (baseline != 0)  # padding has no error, and would dilute every mean
    max_error, mean_error, unlike = _errors(got, exact, counted)
    max_unit, mean_baseline, unlike_baseline = _errors(baseline, exact, counted)
    max_baseline, mean_unit = max_unit, MEAN_FACTOR * mean_baseline
    for other in others:
        max_other, mean_other, unlike_other = _errors(other, exact, counted)
        if unlike_other:
            continue
        max_unit, mean_unit = max(max_unit, max_other), MEAN_FACTOR * max(mean_baseline, mean_other)
        if name in _SHARP and dtype in (torch.float16, torch.bfloat16):
            gradient = name in GRADIENTS
            mean_unit = min(mean_unit, (CAREFUL_GRADIENT_FACTOR if gradient else CAREFUL_FACTOR) * mean_other)
            if gradient and mean_baseline <= _ALIKE * mean_other:
                mean_unit = _ONE_ROUNDING_FACTOR * mean_other
    wide_eps = torch.finfo(wide_dtype(dtype)).eps
    eps = wide_eps if name in _WIDE else torch.finfo(dtype).eps
    rows = max(int((exact.isfinite() & counted).sum()) // (1 if name in _WIDE else exact.shape[-1] or 1), 1)
    low = name in _WIDE and torch.finfo(dtype).eps > wide_eps
    floor = (_WIDE_NOISE if low else _NOISE * wide_eps * sizes.spread) * sizes.largest
    by_delta = torch.finfo(dtype).eps if name in ("dq", "dk", "d_offset") else 0.0
    few = 1.0 / rows**0.5
    one_rounding = max(eps * largest(exact), (1.0 + _DELTA * few) * by_delta * sizes.largest)
    max_bound = MAX_FACTOR * max_unit + one_rounding + floor
    mean_bound = (1.0 + _LUCK * few) * mean_unit + _DELTA * few * by_delta * sizes.mean + _MEAN_NOISE * floor
    if name in ("max_logit", "d_offset"):  # one value a head: their mean says no more than their maximum
        mean_bound = max_bound
    note = ""
    if unlike:
        note = f"{unlike} values are NaN, or infinite where the exact ones are not, or the other way round"
    elif unlike_baseline or max_baseline > 0.5 * max(largest(exact), sizes.largest) + floor:
        note = f"the baseline itself is wrong (max error {max_baseline:.3g}): nothing can be said"
    ok = not note and max_error <= max_bound and mean_error <= mean_bound
    return Row(name, max_error, max_bound, mean_error, mean_bound, ok, note)


def _errors(got: torch.Tensor, exact: torch.Tensor, counted: torch.Tensor) -> tuple[float, float, int]:
    """Largest and mean error where `counted` and exact is finite, and how many values are not finite alike."""
    finite = exact.isfinite()
    unlike = int((~torch.where(finite, got.isfinite(), got == exact)).sum())
    if unlike:
        return torch.inf, torch.inf, unlike
    errors = (got - exact)[finite & counted].abs()
    return (errors.max().item(), errors.mean().item(), 0) if errors.numel() else (0.0, 0.0, 0)


def largest(x: torch.Tensor) -> float:
    """The largest size of the finite values; 0 without any."""
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _mean(x: torch.Tensor) -> float:
    """The mean size of the finite values that are not 0."""
    counted = x[x.isfinite() & (x != 0)]
    return counted.abs().mean().item() if counted.numel() else 0.0
