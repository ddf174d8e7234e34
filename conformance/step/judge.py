"""Differences and their bounds: of numbers and tensors over ranks against one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from conformance.judge.budgets import Row, compare

__all__ = ["Row", "factor_of", "judge", "norm_of", "weighed"]

_UNDETERMINED = "smaller than its own rounding errors"
_FEW = 64  # values


def judge(name: str, got: Any, one: Any, noisy: Sequence[Any], dtype: torch.dtype, *, finite: bool = True) -> Row:
    """One value's errors and bounds (`conformance.judge.budgets`).

    The baseline is the one process again, with weights moved by two roundings. A difference counts if rounding alone
    does not make as large a one.

    Args:
        got, one: over ranks, and of the one process; numbers or tensors of any shape; None: there is none.
        noisy: the one process's, with moved weights.
        dtype: whose rounding counts.
        finite: whether all values must be finite; otherwise infinite ones may be equal, as those of a mask.

    >>> noisy = [torch.tensor([1.0, 2.0001])] * 2
    >>> judge("loss", torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), noisy, torch.float32).ok
    False
    """
    if got is None or one is None:
        same = got is None and one is None
        note = "" if same else f"only {'one process' if got is None else 'the ranks'} has it"
        return Row(name, 0.0 if same else torch.inf, 0.0, 0.0 if same else torch.inf, 0.0, same, note)
    mine, exact, *noise = (torch.as_tensor(x, dtype=torch.float64).reshape(-1) for x in (got, one, *noisy))
    if mine.shape != exact.shape:
        note = f"shape {list(torch.as_tensor(got).shape)}, in one process {list(torch.as_tensor(one).shape)}"
        return Row(name, torch.inf, 0.0, torch.inf, 0.0, False, note)
    odd = " and ".join(who for who, x in (("the ranks", mine), ("one process", exact)) if not x.isfinite().all())
    if odd and (finite or not torch.equal(mine, exact)):
        return Row(name, torch.inf, 0.0, torch.inf, 0.0, False, f"NaN or infinite: {odd}")
    noise.sort(key=lambda x: (x - exact).abs().max().nan_to_num(torch.inf) if x.numel() else 0.0, reverse=True)
    row = compare({"": mine}, {"": exact}, {"": noise[0]}, dtype, {"": noise[-1]})[0]
    if row.note.startswith("the baseline"):
        return replace(row, name=name, ok=row.max_error <= row.max_bound, note=_UNDETERMINED)
    if exact.numel() < _FEW and not row.note:  # their mean says no more than their maximum
        row = replace(row, mean_bound=row.max_bound, ok=row.max_error <= row.max_bound)
    return replace(row, name=name)


def norm_of(grads: dict[str, torch.Tensor | None]) -> float:
    """The norm of all gradients as one vector."""
    squares = [grad.double().square().sum() for grad in grads.values() if grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def factor_of(got: torch.Tensor, one: torch.Tensor) -> float:
    """The factor with which `one` is nearest to `got`.

    >>> round(factor_of(torch.tensor([2.0, 4.1]), torch.tensor([1.0, 2.0])), 2)
    2.04
    """
    got, one = got.double().reshape(-1), one.double().reshape(-1)
    size = one @ one
    return float((got @ one) / size) if size > 0 else 1.0


def weighed(target: dict[str, torch.Tensor], parts: Sequence[dict[str, torch.Tensor]]) -> tuple[list[float], float]:
    """The weights with which the parts add up to the target, and how much of it is left, relative to its norm.

    >>> a, b = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}
    >>> weighed({"w": torch.tensor([2.0, 3.0])}, [a, b])
    ([2.0, 3.0], 0.0)
    """
    flat = torch.cat([x.double().reshape(-1) for x in target.values()])
    columns = torch.stack([torch.cat([part[name].double().reshape(-1) for name in target]) for part in parts], 1)
    gram, right = columns.T @ columns, columns.T @ flat
    weights = torch.linalg.lstsq(gram, right[:, None], driver="gelsd").solution[:, 0]
    left = float((flat - columns @ weights).norm() / flat.norm().clamp(min=1e-300))
    return weights.tolist(), left
