"""A record of a running step: modules, losses of tokens, gradients before they are reduced, calls of cp_fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from conformance.dtypes import wide_dtype
from conformance.step.evidence.step_without import CLIPPING, PARTS

__all__ = ["Look"]

_NUMBERS = 2  # for the features of a token: products with random vectors


class Look(TorchFunctionMode):
    """Records one step of a model, as a context around it.

    A module's inputs and outputs are kept as two numbers a token, so that a large model's fit into memory. Losses are
    those of `cross_entropy` and `nll_loss`, also where a loss module or transformers calls them.
    """

    def __init__(self, model: torch.nn.Module, plain_name: Callable[[str], str]) -> None:
        super().__init__()
        self._over = False
        self.begin()
        self._names = {id(weight): plain_name(name) for name, weight in model.named_parameters()}
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._entered(plain_name(name), name == "")))
            self._hooks.append(
                module.register_forward_hook(self._left(plain_name(name)), with_kwargs=True, always_call=True)
            )
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                self._hooks.append(weight.register_hook(self._share_of(plain_name(name))))

    def __enter__(self) -> Any:
        self._patched = patch.object(clip_grad, CLIPPING, self._clips(getattr(clip_grad, CLIPPING)))
        self._patched.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patched.stop()
        super().__exit__(*error)

    def begin(self) -> None:
        """A step begins: what was recorded of another is forgotten."""
        self._stack: list[str] = []
        self._forward = -1
        self._modules: list[dict[str, Any]] = []
        self._losses: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._shares: dict[str, list[Any]] = {}
        self._parts: set[str] = set()
        self._offsets: set[str] = set()

    def close(self) -> None:
        """Nothing more is recorded."""
        self._over = True
        for hook in self._hooks:
            hook.remove()

    def record(self) -> dict[str, Any]:
        """Everything that was seen, on the CPU."""
        losses = [_closed(loss) for loss in self._losses]
        seen = {"modules": self._modules, "losses": losses, "calls": self._calls, "shares": self._shares}
        return seen | {"parts": sorted(self._parts), "offsets": sorted(self._offsets), "forwards": self._forward + 1}

    def call(self, problem: Any, offset: Any) -> None:
        """A call of attention, of a linear layer or of a convolution begins."""
        if not self._over:
            self._calls.append({"inside": tuple(self._stack), "forward": self._forward, "problem": problem})
            if offset is not None and id(offset) in self._names:
                self._offsets.add(self._names[id(offset)])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PARTS and not self._over:
            chance = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            silent = "dropout" in getattr(func, "__name__", "") and (chance == 0 or kwargs.get("training") is False)
            self._parts |= set() if silent else {PARTS[func]}
        if func not in (F.cross_entropy, F.nll_loss) or self._over:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            out = func(*args, **kwargs)
            self._loss(func, out, *args, **kwargs)
        return out

    def _loss(self, func: Any, out: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(("input", "target"), args, strict=False)) | kwargs
        target, ignored = given["target"], given.get("ignore_index", -100)
        if target.is_floating_point():
            return
        with torch.no_grad(), torch.autocast(target.device.type, enabled=False):
            each = func(given["input"].detach().float(), target, ignore_index=ignored, reduction="none")
        box: dict[str, Any] = {"counted": (target != ignored).cpu(), "how": given.get("reduction", "mean")}
        if out.requires_grad:
            out.register_hook(partial(_keep, box))
        shown = {"forward": max(self._forward, 0), "targets": target.cpu(), "each": each.double().cpu(), "box": box}
        self._losses.append(shown)

    def _entered(self, name: str, root: bool) -> Any:
        def hook(*_: Any) -> None:
            if not self._over and not torch._C._current_graph_task_id() >= 0:  # not while it is recomputed
                self._forward += root
            self._stack.append(name)

        return hook

    def _left(self, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            if self._stack and self._stack[-1] == name:
                self._stack.pop()
            if self._over or torch._C._current_graph_task_id() >= 0:
                return
            inputs = {str(n): x for n, x in enumerate(args)} | kwargs
            kept = {key: _numbers(x) for key, x in inputs.items() if isinstance(x, torch.Tensor)}
            record = {"name": name, "forward": self._forward, "inside": tuple(self._stack), "inputs": kept}
            self._modules.append(record | {"out": _numbers(_first(out)), "kind": type(module).__name__})

        return hook

    def _share_of(self, name: str) -> Any:
        def hook(grad: torch.Tensor) -> None:
            if not self._over and not hasattr(grad, "full_tensor"):
                self._shares.setdefault(name, []).append(grad.detach().clone().cpu())

        return hook

    def _clips(self, original: Any) -> Any:
        def clips(*args: Any, **kwargs: Any) -> Any:
            self._parts.add("clipping")
            return original(*args, **kwargs)

        return clips


def _first(out: Any) -> Any:
    """The first tensor of a module's output."""
    while isinstance(out, dict | tuple | list) and len(out):
        out = next(iter(out.values())) if isinstance(out, dict) else out[0]
    return out


def _numbers(x: Any) -> torch.Tensor | None:
    """Integers unchanged; other tensors as two numbers for each token."""
    if not isinstance(x, torch.Tensor) or x.ndim == 0 or x.is_complex() or hasattr(x, "full_tensor"):
        return None
    if not x.is_floating_point() or x.ndim == 1:
        return x.detach().clone().cpu()
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False), torch._C.DisableTorchFunction():
        wide = wide_dtype(x.dtype)
        chance = torch.Generator().manual_seed(x.shape[-1])
        vectors = torch.randn(x.shape[-1], _NUMBERS, generator=chance, dtype=wide).to(x.device)
        return (x.detach().to(wide) @ vectors).cpu()


def _weights_of(box: dict[str, Any]) -> torch.Tensor | None:
    """The weight with which each token's loss enters the step's; None where nothing was differentiated."""
    counted, grad = box["counted"], box.get("grad")
    if grad is None:
        return None
    if box["how"] == "none":
        return torch.where(counted, grad, 0.0)
    return counted.double() * grad / (counted.sum().clamp(min=1) if box["how"] == "mean" else 1)


def _keep(box: dict[str, Any], grad: torch.Tensor) -> None:
    box.setdefault("grad", grad.detach().double().cpu())


def _closed(loss: dict[str, Any]) -> dict[str, Any]:
    box = loss.pop("box")
    return loss | {"weights": _weights_of(box), "counted": box["counted"]}
