"""Which derivatives there are: one backward pass, by autograd. Any other is refused, never left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, cast

import torch

__all__ = ["differentiable_once", "raise_for_batched", "refuse_batched", "refuse_transforms"]


def refuse_transforms() -> None:
    """Raise NotImplementedError inside a transform of torch.func: these cannot follow messages between ranks."""
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportPrivateUsage]  # there is no other way
        raise NotImplementedError(
            "attention and linear layers inside torch.func (vmap, grad, vjp, jvp, ...) are not supported; use backward"
        )


def refuse_batched(*grads: torch.Tensor | None) -> None:
    """Raise NotImplementedError for the gradients of `torch.autograd.grad(..., is_grads_batched=True)`, or of a vmap
    around a backward pass: many gradients at once, in tensors that hide their batch axis.
    """
    functorch = cast(Any, torch)._C._functorch  # there is no other way
    if any(x is not None and (functorch.is_legacy_batchedtensor(x) or functorch.is_batchedtensor(x)) for x in grads):
        raise_for_batched()


def raise_for_batched(*_: Any, **__: Any) -> NoReturn:
    """Raise the error of `refuse_batched`."""
    raise NotImplementedError(
        "torch.autograd.grad(..., is_grads_batched=True) is not supported by attention, linear layers, unshard, roll "
        "and the helpers in thd; call torch.autograd.grad once for each gradient, with retain_graph=True"
    )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd function: its results are constants, or raise when differentiated. Batched
    gradients are refused.

    PyTorch's `once_differentiable` lets results through as constants where only the saved tensors require grad, so that
    a penalty on a gradient has no gradient, without a word.
    """

    @wraps(backward)
    def guarded(ctx: Any, *grads: torch.Tensor | None) -> Any:
        refuse_batched(*grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # it is with create_graph=True alone
            return results
        tensors = [x.detach().requires_grad_() for x in results if isinstance(x, torch.Tensor)]
        marked = iter(cast(Any, _Last).apply(*tensors))  # torch leaves apply untyped
        return tuple(next(marked) if isinstance(x, torch.Tensor) else x for x in results)

    return guarded


class _Last(torch.autograd.Function):
    """Tensors with the same values, whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in grads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "attention, linear layers, unshard and roll are differentiable once: a gradient that one of them gave has "
            "no gradient"
        )
