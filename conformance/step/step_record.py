"""A record of a running step: modules, losses of tokens, gradients before they are reduced, calls of cp_fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from conformance.case import wide_dtype

__all__ = ["CLIPPING", "ENGINE", "EXPERIMENTS", "PARTS", "Job", "Look", "StepError", "table_of", "without"]


class StepError(RuntimeError):
    """The step could not be run or compared: a process raised, died or did not end, or there is nothing to compare."""


@dataclass(frozen=True)
class Job:
    """One process. `build` and `batch` are the user's, or their names, "module:name", which the process imports.

    Attributes:
        name: in errors.
        folder: where `Runs` puts stores.
        store: a file that the processes of one group share, and no others.
        rank, world: the place in that group. world is dp_size * cp_size; 0 for the one process without a context.
        noise: 0, or the seed of the rounding errors that its weights and gradients are given.
        dtype: whose rounding errors gradients have at least; None: of those in which their weights are used.
        look: whether modules, losses and gradients on their way are recorded too.
        without: an experiment: "", "random", "positions" or "clipping", which the step then does not have.
    """

    build: Any
    batch: Any
    name: str
    folder: Path
    store: str
    rank: int = 0
    world: int = 0
    cp_size: int = 1
    cp_comm_type: str = "p2p"
    layout: str = "dual_chunk"
    device: str = "cpu"
    noise: int = 0
    dtype: torch.dtype | None = None
    look: bool = False
    without: str = ""
    threads: int = 1
    limit_s: float = 600.0


# ---- the step without one of its parts
#
# Experiments: the step without one of its parts. Where a difference vanishes with the part, the part is its cause.


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


# ---- the record


_NUMBERS = 2  # for the features of a token: products with random vectors
_LINEAR = ("mul", "div", "neg", "tocopy", "view", "reshape", "unsafeview", "alias", "clone", "select", "index", "where")
_LINEAR += ("maskedfill", "squeeze", "unsqueeze", "transpose", "permute", "slice", "expand")
_DEEPEST = 3  # functions by which a term is named
_MIXING = ("attention", "softmax", "conv", "roll", "pad", "cumsum", "cumprod", "logcumsumexp", "flip", "einsum")


def table_of(each: Any) -> dict[Any, Any]:
    """A process's records of modules by (forward pass, name, how often before in it), in the order of their ends."""
    return {(record["forward"], record["name"], record["count"]): record for record in each["look"]["modules"]}


class Look(TorchFunctionMode):
    """Records one step of a model, as a context around it.

    A module's inputs and outputs are kept as two numbers a token, so that a large model's fit into memory. Losses are
    those of `cross_entropy` and `nll_loss`, also where a loss module or transformers calls them. Every
    record has its time, so that the records between two modules are known.

    A forward pass is a call of the model with gradients. If the model itself is not called, a pass begins where the
    first of its modules is called again. Calls without gradients, as of `prepare` or of an evaluation, do not count.
    """

    def __init__(self, model: torch.nn.Module, plain_name: Callable[[str], str]) -> None:
        super().__init__()
        self._over = False
        self.begin()
        self._names = {id(weight): plain_name(name) for name, weight in model.named_parameters()}
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._entered(plain_name(name))))
            self._hooks.append(
                module.register_forward_hook(self._left(plain_name(name)), with_kwargs=True, always_call=True)
            )
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                self._hooks.append(weight.register_hook(self._share_of(plain_name(name))))

    def __enter__(self) -> Any:
        self._patched = (
            patch.object(clip_grad, CLIPPING, self._clips(getattr(clip_grad, CLIPPING))),
            patch.object(torch.autograd, ENGINE, self._runs_backward(getattr(torch.autograd, ENGINE))),
        )
        for patched in self._patched:
            patched.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for patched in self._patched:
            patched.stop()
        super().__exit__(*error)

    def begin(self) -> None:
        """A step begins: what was recorded of another is forgotten."""
        self._stack: list[tuple[str, int, int]] = []  # names, when they were entered, how often before in the pass
        self._forward, self._moment = -1, 0
        self._first: str | None = None  # the module whose call begins a pass
        self._quiet = False
        self._counts: dict[tuple[int, str], int] = {}
        self._mixing: list[int] = []
        self._masks: list[int] = []
        self._terms: list[str] = []
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
        losses = [_closed(loss) for loss in self._losses if loss["graded"] or not self._graded]
        seen = {"modules": self._modules, "losses": losses, "calls": self._calls, "shares": self._shares}
        seen |= {"mixing": self._mixing, "masks": self._masks, "terms": self._terms}
        return seen | {"parts": sorted(self._parts), "offsets": sorted(self._offsets), "forwards": self._forward + 1}

    def call(self, problem: Any, offset: Any, what: str) -> None:
        """A call of attention, of a linear layer or of a convolution begins."""
        if self._counting():
            inside = tuple(name for name, *_ in self._stack)
            call = {"inside": inside, "forward": max(self._forward, 0), "problem": problem, "what": what}
            self._calls.append(call | {"at": self._now()})
            if offset is not None and id(offset) in self._names:
                self._offsets.add(self._names[id(offset)])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PARTS and not self._over:
            chance = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            silent = "dropout" in getattr(func, "__name__", "") and (chance == 0 or kwargs.get("training") is False)
            self._parts |= set() if silent else {PARTS[func]}
        name = getattr(func, "__name__", "")
        if func not in (F.cross_entropy, F.nll_loss) or not self._counting():
            out = func(*args, **kwargs)
            if self._counting() and any(word in name for word in _MIXING):
                self._mixing.append(self._now())
            if "dropout" in name and self._counting() and isinstance(out, torch.Tensor):
                self._masks.append(_mask(out))
            return out
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
        shown = {"forward": max(self._forward, 0), "graded": torch.is_grad_enabled()}
        count = sum(all(loss[name] == shown[name] for name in shown) for loss in self._losses)
        self._losses.append(shown | {"count": count, "targets": target.cpu(), "box": box, "each": each.double().cpu()})

    @property
    def _graded(self) -> bool:
        """Whether losses were computed with gradients. Then those without do not count, as where a Trainer that the
        step makes calls `prepare`.
        """
        return any(loss["graded"] for loss in self._losses)

    def _now(self) -> int:
        self._moment += 1
        return self._moment

    def _counting(self) -> bool:
        """Whether what happens belongs to a pass: not while the backward pass computes it again."""
        return not (self._over or self._quiet or torch._C._current_graph_task_id() >= 0)

    def _entered(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            if torch._C._current_graph_task_id() < 0 and not self._stack:
                self._quiet = not torch.is_grad_enabled()
                self._first = name if self._first is None and not self._quiet else self._first
                self._forward += name == self._first and not self._quiet
            key = (self._forward, name)
            self._stack.append((name, self._now(), self._counts.get(key, 0)))
            if self._counting():
                self._counts[key] = self._counts.get(key, 0) + 1

        return hook

    def _left(self, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            start, count = 0, 0
            if self._stack and self._stack[-1][0] == name:
                _, start, count = self._stack.pop()
            if self._counting():
                inputs = {str(n): x for n, x in enumerate(args)} | kwargs
                kept = {key: _numbers(x) for key, x in inputs.items() if isinstance(x, torch.Tensor)}
                inside = tuple((outer, before) for outer, _, before in self._stack)
                record = {"name": name, "count": count, "forward": max(self._forward, 0), "inside": inside}
                record |= {"inputs": kept, "out": _numbers(_first(out)), "kind": type(module).__name__}
                record["bits"] = _all_bits(inputs | {"out": _first(out)})
                self._modules.append(record | {"start": start, "end": self._now()})
            if not self._stack and torch._C._current_graph_task_id() < 0:
                self._quiet = False

        return hook

    def _share_of(self, name: str) -> Any:
        def hook(grad: torch.Tensor) -> None:
            if not self._over and not hasattr(grad, "full_tensor"):
                self._shares.setdefault(name, []).append(grad.detach().clone().cpu())

        return hook

    def _runs_backward(self, original: Any) -> Any:
        def runs(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._counting():
                given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
                self._terms += [term for x in given for term in _terms(getattr(x, "grad_fn", None))]
            return original(tensors, *args, **kwargs)

        return runs

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


def _all_bits(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """For each token of each tensor, an integer that depends on all bits of its features, and on no order of sums."""
    found = {name: _numbers(x) for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    return {name: _token_bits(tensors[name]) for name, x in found.items() if x is not None}


def _token_bits(x: torch.Tensor) -> torch.Tensor:
    """x [..., features] as int64 [..., 1]; [tokens] as [tokens].

    >>> x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0], [1.0, 2.0000002]])
    >>> [x.tolist().count(n) for n in x.tolist()], len(_token_bits(x).unique())
    ([2, 2, 1, 1], 3)
    """
    with torch.no_grad(), torch._C.DisableTorchFunction():
        x = x.detach().contiguous()
        if x.is_floating_point():
            kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
            x = x.view(kinds[x.element_size()])
        x = x.long()
        if x.ndim == 1:
            return x.cpu()
        chance = torch.Generator().manual_seed(x.shape[-1])
        weights = torch.randint(-(2**62), 2**62, (x.shape[-1],), generator=chance) * 2 + 1
        return (x * weights.to(x.device)).sum(-1, keepdim=True).cpu()  # integers wrap, so any order gives the same


def _terms(node: Any, outer: tuple[str, ...] = ()) -> list[str]:
    """The terms that add up to a loss, as in "mean of pow of logsumexp": their functions from the outside."""
    if node is None or len(outer) > _DEEPEST:
        return [" of ".join(outer)] if outer else []
    name = node.name().removesuffix("Backward0").removesuffix("Backward").lower()
    inner = [each for each, _ in node.next_functions if each is not None and "AccumulateGrad" not in each.name()]
    if name in ("add", "sub", "stack", "cat"):
        return [term for each in inner for term in _terms(each, outer)]
    if name in _LINEAR and len(inner) == 1:
        return _terms(inner[0], outer)
    if len(inner) == 1 and "nllloss" not in name:
        return _terms(inner[0], (*outer, name))
    return [" of ".join((*outer, name))]


def _mask(x: torch.Tensor) -> int:
    """A number that tells one dropped set of values from another; 0 where nothing is dropped."""
    dropped = (x.detach() == 0).flatten().cpu()
    return crc32(dropped.numpy().tobytes()) if dropped.any() else 0


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
