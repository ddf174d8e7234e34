"""Experiments: the step without one of its parts. Where a difference vanishes with the part, the part is its cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

__all__ = ["CLIPPING", "ENGINE", "EXPERIMENTS", "PARTS", "without"]

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
_NOISE = (torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli, torch.multinomial)
_NOISE_HERE = tuple(getattr(torch.Tensor, name) for name in ("normal_", "uniform_", "bernoulli_", "bernoulli"))
_ANGLES: dict[Any, Callable[..., Any]] = {
    torch.cos: torch.ones_like,
    torch.Tensor.cos: torch.ones_like,
    torch.sin: torch.zeros_like,
    torch.Tensor.sin: torch.zeros_like,
    torch.polar: lambda size, angle: torch.complex(size, torch.zeros_like(angle)),
}
PARTS: dict[Any, str] = (  # what a function is a sign of
    dict.fromkeys((*_DROPOUTS, *_NOISE, *_NOISE_HERE), "random") | dict.fromkeys(_ANGLES, "positions")
)
CLIPPING = "_clip_grads_with_norm_"  # of torch.nn.utils.clip_grad
ENGINE = "_engine_run_backward"  # of torch.autograd: every backward pass goes through it
EXPERIMENTS = ("random", "positions", "clipping")


def without(part: str) -> Any:
    """A context in which the step has no random numbers, no rotation by positions, or no clipping of gradients.

    Args:
        part: one of `EXPERIMENTS`, or "" for a context that changes nothing.

    >>> with without("random"):
    ...     torch.nn.functional.dropout(torch.ones(3), 0.5).tolist()
    [1.0, 1.0, 1.0]
    """
    if part == "clipping":
        return _without_clipping()
    return _Without(part) if part else nullcontext()


@contextmanager
def _without_clipping() -> Iterator[None]:
    with patch.object(clip_grad, CLIPPING, lambda *_, **__: None):
        yield


class _Without(TorchFunctionMode):
    """Random numbers are 0 and dropout keeps all; or every angle is 0, so that rotary embeddings rotate nothing."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def __enter__(self) -> Any:
        original = getattr(torch.autograd, ENGINE)

        def again(*args: Any, **kwargs: Any) -> Any:
            """PyTorch leaves the mode in Tensor.backward; what checkpointing computes again needs it."""
            if any(mode is self for mode in _get_current_function_mode_stack()):
                return original(*args, **kwargs)
            super(_Without, self).__enter__()
            try:
                return original(*args, **kwargs)
            finally:
                super(_Without, self).__exit__(None, None, None)

        self._patched = patch.object(torch.autograd, ENGINE, again)
        self._patched.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patched.stop()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if PARTS.get(func) != self._part:
            return func(*args, **kwargs)
        if func in _ANGLES:
            return _ANGLES[func](*args, **{name: x for name, x in kwargs.items() if name != "out"})
        if func in _DROPOUTS:
            return kwargs.get("input", args[0] if args else None)
        made = func(*args, **kwargs)
        return made.zero_() if func in _NOISE_HERE[:3] else torch.zeros_like(made)
