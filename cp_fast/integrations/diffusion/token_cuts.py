"""One call of a model: which of its tokens this rank has, and the hooks that cut tensors and make them whole again.

Each stream of n tokens is cut into cp_size slices of ceil(n / cp_size) rows, one after the other. Rows behind the last
token repeat it: every layer takes them, no attention sees them as keys, and they are left out where the stream becomes
whole. All streams are cut by this one rule, so a tensor that goes with a stream has the same rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.diffusion.cut_points import (
    Count,
    Cut,
    Gather,
    Plan,
    Reach,
    Row,
    is_stream,
    modules_of,
)
from cp_ref.batches.sharding import gathered
from cp_ref.problems.cuts import read_cut

__all__ = ["SlicedCall", "Window", "current", "gather", "hook", "inside", "outer", "rows_of_slice", "unhook"]


def rows_of_slice(tokens: int, size: int) -> int:
    """The rows of every rank's slice of a stream."""
    return -(-tokens // size)


@dataclass(frozen=True)
class Window:
    """The rows of each stream that a call has: its rank's slice, or around that slice a window of twice its length.

    >>> [Window(rank, 3).of(7) for rank in range(3)], Window(1, 3, wide=True).of(7)
    ([(0, 3), (3, 3), (6, 3)], (1, 6))
    """

    rank: int
    size: int
    wide: bool = False

    def of(self, tokens: int) -> tuple[int, int]:
        """The first row, and how many."""
        rows = rows_of_slice(tokens, self.size)
        start = self.rank * rows
        if not self.wide:
            return start, rows
        more = min(2 * rows, tokens)
        return min(max(start - rows // 2, 0), tokens - more), more

    def taken(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """These rows of a tensor. Differentiable.

        >>> Window(2, 3).taken(torch.arange(7), 0)
        tensor([6, 6, 6])
        """
        tokens = x.shape[axis]
        start, rows = self.of(tokens)
        first = min(start, tokens - 1)
        real = x.narrow(axis, first, min(rows, tokens - first))
        if (missing := rows - real.shape[axis]) == 0:
            return real.contiguous()
        shape = list(x.shape)
        shape[axis] = missing
        return torch.cat([real, x.narrow(axis, tokens - 1, 1).expand(shape)], axis)


@dataclass
class SlicedCall:
    """One call of a model, while it runs and while checkpointing runs parts of it again.

    Attributes:
        cp: whose ranks have the slices.
        window: the rows that this call has.
        streams: how many tokens each stream has, by the name of its argument.
        axes: the lengths of all axes that were cut, with what was cut there.
        masks: of keys, which attention has read already.
        kernels: by a layer's name, those that diffusers' dispatcher has for keys that every rank has whole.
    """

    cp: ContextParallel
    window: Window
    streams: dict[str, int] = field(default_factory=dict)
    axes: dict[int, str] = field(default_factory=dict)
    masks: dict[Any, Any] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)

    def cut(self, x: torch.Tensor, row: Cut) -> torch.Tensor:
        """The rows of a tensor that this call has."""
        if row.axes is not None and x.ndim != row.axes:
            return x
        tokens, stream = x.shape[row.axis], is_stream(row) and x.is_floating_point()
        if tokens == 0:
            raise ValueError(f"{row.of} is {list(x.shape)}; it must have at least one token")
        if tokens == 1 and not stream:  # the same for all tokens
            return x
        if stream and self.streams.setdefault(str(row.of), tokens) != tokens:
            raise ValueError(f"{row.of} has {tokens} tokens here, and {self.streams[str(row.of)]} elsewhere")
        self.axes.setdefault(tokens, f"{row.where}: {row.of}" if row.where else str(row.of))
        return self.window.taken(x, row.axis % x.ndim)

    def count(self, last: int, stream: str) -> int:
        """How many rows of a slice are not in front of a stream's last tokens."""
        tokens = self.streams[stream]
        start, rows = self.window.of(tokens)
        return min(max(start + rows - (tokens - last), 0), rows)

    def whole(self, x: torch.Tensor, axis: int, where: str) -> torch.Tensor:
        """The whole stream of which x is a slice. where: the module whose output x is."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise for a tensor that was cut and has another length than all streams."""
        for tokens, what in self.axes.items():
            if tokens not in self.streams.values():
                lengths = ", ".join(f"{name} {n}" for name, n in self.streams.items())
                raise ValueError(f"{what} is given for {tokens} tokens, and there are {lengths}")


_CURRENT: ContextVar[SlicedCall | None] = ContextVar("call", default=None)


def current() -> SlicedCall | None:
    """The call that runs in this thread."""
    return _CURRENT.get()


@contextmanager
def inside(call: SlicedCall) -> Generator[None]:
    """While it runs."""
    token = _CURRENT.set(call)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def gather(x: torch.Tensor, axis: int, tokens: int, cp: ContextParallel) -> torch.Tensor:
    """The whole of which x is this rank's slice; the gradient of the slice is the sum of all ranks' gradients of it."""
    if cp.size == 1:
        return x
    rows = x.movedim(axis, 1) if axis else x[None]
    whole = gathered(rows, read_cut(cp, None, rows, "bshd", None, whole=False, seqlen=tokens), cp)
    whole = whole.movedim(1, axis) if axis else whole[0]
    return whole.clone() if whole._is_view() else whole  # FSDP warns of views, which may be changed in place


# ---- hooks


@dataclass(eq=False)
class _ModuleCuts:
    """The rows of a plan for one module: cuts of its arguments and outputs, and outputs that become whole.

    rows: of the plan. where: the module's name.
    """

    rows: Plan
    where: str

    @functools.cached_property
    def arguments(self) -> tuple[Cut | Count, ...]:
        """Those of arguments."""
        return tuple(row for row in self.rows if isinstance(row, Cut | Count) and isinstance(row.of, str))

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut the arguments."""
        call = current()
        if call is None or not self.arguments:
            return None
        names = list(inspect.signature(module.forward).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        for row in self.arguments:
            name, value = str(row.of), given.get(str(row.of))
            if isinstance(row, Count) and value is not None:
                given[name] = call.count(value, row.stream)
            elif isinstance(row, Cut) and isinstance(value, torch.Tensor):
                given[name] = call.cut(value, row)
            elif value is not None:
                raise NotImplementedError(f"{name} of {self.where} is a {type(value).__name__}, and no tensor")
        return tuple(given[name] for name in names[: len(args)]), {name: given[name] for name in kwargs}

    def leave(self, module: nn.Module, _: Any, out: Any) -> Any:
        """Cut outputs, and make outputs whole."""
        call = current()
        if call is None:
            return out
        alone = isinstance(out, torch.Tensor)
        outputs: list[Any] = [out] if alone else list(out)
        for row in self.rows:
            if isinstance(row, Cut) and isinstance(row.of, int):
                outputs[row.of] = call.cut(outputs[row.of], row)
            elif isinstance(row, Reach) and (weight := getattr(module, row.of, None)) is not None:
                outputs[0] = outputs[0] + (0 * weight.sum()).to(outputs[0].dtype)
            elif isinstance(row, Gather):
                for number, axis in enumerate(row.axes):
                    if axis is not None:
                        outputs[number] = call.whole(outputs[number], axis, self.where)
        return outputs[0] if alone else tuple(outputs)


def _shard(und: torch.Tensor, gen: torch.Tensor, rotary: tuple[torch.Tensor, ...]) -> Any:
    """Cut the two streams of Cosmos 3, and what goes with them: half of the tensors with each."""
    if (call := current()) is None:
        return und, gen, rotary
    und, gen = (call.cut(x, Cut("", name, 0)) for name, x in (("und_hidden_states", und), ("gen_hidden_states", gen)))
    return und, gen, tuple(call.cut(x, Cut("", "rotary_emb", 0)) for x in rotary)


def _gather(und: torch.Tensor, gen: torch.Tensor) -> Any:
    """Make them whole again."""
    call = current()
    return (und, gen) if call is None else (call.whole(und, 0, "norm"), call.whole(gen, 0, "norm_moe_gen"))


def hook(model: Any, plan: Plan) -> None:
    """Have a plan's modules cut and gather while a call runs. Of the model itself the arguments are left: `outer`."""
    if hasattr(model, "_cp_shard_fn"):
        model._cp_shard_fn, model._cp_gather_fn = _shard, _gather
    names = {module: name for name, module in model.named_modules()}
    rows: dict[nn.Module, list[Row]] = {}
    for row in plan:
        for module in modules_of(model, row.where):
            rows.setdefault(module, []).append(row)
    for module, mine in rows.items():
        if module is not model:
            cuts = _ModuleCuts(tuple(mine), names[module])
            enter, leave = cast(Any, torch.compiler.disable(cuts.enter)), cast(Any, torch.compiler.disable(cuts.leave))
            handles = (
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave),
            )
            module.__dict__["_cp_fast_cuts"] = handles


def outer(plan: Plan) -> Callable[..., Any]:
    """A function that cuts the arguments of the model itself: (model, args, kwargs) -> (args, kwargs)."""
    cuts = _ModuleCuts(tuple(row for row in plan if row.where == ""), "")

    def cut(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return cuts.enter(model, args, kwargs) or (args, kwargs)

    return cut


def unhook(model: Any) -> None:
    """Take all hooks off again."""
    if getattr(model, "_cp_shard_fn", None) is not None:
        if model._cp_shard_fn is not _shard:
            raise ValueError(f"{type(model).__name__} has a _cp_shard_fn already; call use in its place")
        model._cp_shard_fn = model._cp_gather_fn = None
    for module in model.modules():
        for handle in module.__dict__.pop("_cp_fast_cuts", ()):
            handle.remove()
    forward = model.__dict__.get("forward")
    if isinstance(forward, MethodType) and hasattr(forward, "cp_fast"):
        del model.__dict__["forward"]


def recomputing(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """A function that checkpoints a block, as `checkpoint`, and that runs it again while its own call is current."""
    if hasattr(checkpoint, "cp_fast"):
        return checkpoint

    def checkpointed(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (call := current()) is None:
            return checkpoint(block, *args, **kwargs)

        def run(*again: Any, **named: Any) -> Any:
            with inside(call):
                return block(*again, **named)

        return checkpoint(run, *args, **kwargs)

    checkpointed.cp_fast = True  # type: ignore[attr-defined]
    return checkpointed


def checkpoint_inside(modules: Sequence[Any]) -> None:
    """Have diffusers' gradient checkpointing run blocks again while their own call is current."""
    for module in modules:
        if getattr(module, "_gradient_checkpointing_func", None) is not None:
            module._gradient_checkpointing_func = recomputing(module._gradient_checkpointing_func)
