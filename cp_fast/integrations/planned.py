"""What the integrations share: lengths and contexts that are kept for all layers of a model, and refusals by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from cp_fast.api import attention
from cp_fast.context import ContextParallel

__all__ = ["attend", "check_longest", "context_for", "once", "refuse"]

KEPT = 16  # results of `once`: of the batches of an accumulation step

_contexts: dict[Any, ContextParallel] = {}
_done: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()  # with the tensors, so that their addresses stay theirs


def context_for(group: Any, cp_comm_type: str, **options: Any) -> ContextParallel:
    """One context for a group (or a list of two), a schedule and its options, however often they come."""
    group = tuple(group) if isinstance(group, list) else group
    key = group, cp_comm_type, tuple(sorted(options.items()))
    if key not in _contexts:
        _contexts[key] = ContextParallel(group, cp_comm_type, **options)
    return _contexts[key]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cp: ContextParallel, **arguments: Any) -> Any:
    """`cp_fast.attention` without a plan, which keeps the last batches'. A GPU is waited for once for all layers
    that are given the same tensors of lengths.
    """
    lengths = {name: x for name, x in arguments.items() if name.startswith("cu_seqlens")}
    on_gpu = {name: x for name, x in lengths.items() if isinstance(x, torch.Tensor) and x.is_cuda}
    return attention(q, k, v, cp=cp, **arguments | {name: once(torch.Tensor.cpu, x) for name, x in on_gpu.items()})


@torch.compiler.disable(reason="what is kept for other layers is no part of a graph")
def once(work: Callable[..., Any], *given: Any) -> Any:
    """`work(*given)`, or what it gave for the same tensors, not changed since: not every layer waits for a GPU."""
    key = work, *map(_identity, given)
    if key not in _done:
        _done[key] = work(*given), given
        if len(_done) > KEPT:
            _done.popitem(last=False)
    _done.move_to_end(key)
    return _done[key][0]


def _identity(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    version = None if value.is_inference() else value._version
    return value.data_ptr(), version, tuple(value.shape), value.stride(), value.dtype, value.device


def refuse(where: str, **given: Any) -> None:
    """Raise for the first argument that is not at a value which asks for nothing: None, False, 0 or "".

    Raises:
        NotImplementedError: naming it and its value.
    """
    for name, value in given.items():
        if isinstance(value, torch.Tensor) or value:
            shown = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise NotImplementedError(f"{name} is {shown}, which {where} does not support under context parallelism")


def check_longest(name: str, longest: int | None, cu_seqlens: torch.Tensor) -> None:
    """A stated longest length holds for the lengths. Those on a GPU are taken on trust: reading them waits for it.

    Raises:
        ValueError: a sequence is longer.
    """
    if longest is not None and cu_seqlens.device.type == "cpu" and len(cu_seqlens) > 1:
        found = int(cu_seqlens.diff().max())
        if found > longest:
            raise ValueError(f"{name} is {longest}, but a sequence has {found} tokens")
