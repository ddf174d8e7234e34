"""Differences and their bounds, over ranks against one process; and the rounding errors that make the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.checks.budgets import Row, compare

__all__ = ["Rounded", "factor_of", "judge", "narrowest", "norm_of", "weighed"]

_UNDETERMINED = "smaller than its own rounding errors"
_FEW = 64  # values
_ROUNDINGS = 2.0  # by which a weight moves, in units of its dtype's eps


def judge(name: str, got: Any, one: Any, noisy: Sequence[Any], dtype: torch.dtype, *, finite: bool = True) -> Row:
    """One value's errors and bounds (`conformance.checks.budgets`).

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


def narrowest(dtypes: set[torch.dtype]) -> torch.dtype:
    """The dtype with the largest eps."""
    kinds = {dtype for dtype in dtypes if dtype.is_floating_point}
    return max(kinds, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _signs(shape: Any, seed: int, device: Any) -> torch.Tensor:
    chance = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 2, shape, generator=chance, device=device, dtype=torch.float64).mul_(2).sub_(1)


def _local(weight: Any) -> torch.Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


class Rounded(TorchDispatchMode):
    """Gives the one process the rounding errors of its dtypes, so that the baseline says what rounding alone does.

    Weights move once, by some roundings of their dtype. While this context lasts, so does what the step casts to a
    narrower dtype: weights under autocast or a policy of mixed precision, and whatever the step casts itself.
    Autocast's casts of activations do not change. A gradient moves by one rounding of the narrowest dtype in which
    its weight is used: sums over ranks round as often, also where the weights have no part in it, as in a bias's.

    Attributes:
        dtypes: that each weight was cast to.
    """

    def __init__(self, weights: dict[str, torch.Tensor], seed: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._weights, self._seed = list(weights.values()), seed
        self._given = set() if dtype is None else {dtype}
        self._eps = torch.finfo(narrowest({weight.dtype for weight in self._weights})).eps
        self.dtypes: list[set[torch.dtype]] = [set() for _ in self._weights]

    @torch.no_grad()
    def move_weights(self) -> None:
        """Move every weight up or down by some roundings."""
        for number, weight in enumerate(self._weights):
            local = _local(weight)
            if local.is_floating_point() or local.is_complex():
                sign = _signs(local.shape, 1000 * self._seed + number, local.device)
                local.mul_(1 + sign * (_ROUNDINGS * _eps(local)))

    @torch.no_grad()
    def move_gradients(self) -> None:
        """Move every gradient up or down by one rounding."""
        for number, weight in enumerate(self._weights):
            if weight.grad is None:
                continue
            local = _local(weight.grad)
            local = local._values() if local.is_sparse else local
            used = {weight.dtype, *self.dtypes[number], *self._given}
            unit = max(torch.finfo(dtype).eps for dtype in used) / 2
            local.mul_(1 + unit * _signs(local.shape, 10**6 * self._seed + number, local.device))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._to_copy.default:
            return out
        x = args[0]
        if not (x.is_floating_point() and out.is_floating_point()) or _eps(out) <= _eps(x) or not out.numel():
            return out
        number = self._number(x)
        if number is not None or (_eps(out) > self._eps and self._by_hand(x)):
            if number is not None:
                self.dtypes[number].add(out.dtype)
            sign = _signs(out.shape, 1000 * self._seed + (500 if number is None else number), out.device)
            out.mul_((1 + sign * (_ROUNDINGS * _eps(out))).to(out.dtype))
        return out

    def _by_hand(self, x: torch.Tensor) -> bool:
        backward = torch._C._current_graph_task_id() >= 0
        return not backward and not torch.is_autocast_enabled(x.device.type)

    def _number(self, x: torch.Tensor) -> int | None:
        """Which weight's memory a tensor has."""
        try:
            at = x.untyped_storage().data_ptr()
            for number, weight in enumerate(self._weights):
                if at and _local(weight).untyped_storage().data_ptr() == at:
                    return number
        except (RuntimeError, NotImplementedError):  # such tensors have no memory
            pass
        return None


def _eps(x: torch.Tensor) -> float:
    return torch.finfo(x.dtype).eps
