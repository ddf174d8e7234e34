"""`attend`: `attention` that plans by itself once for a batch, not once for every layer. And refusals by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from cp_fast.api import attention
from cp_fast.context import ContextParallel
from cp_fast.plan import Plan, make_plan
from cp_ref.spec import check_context, local_part, read_sizes

__all__ = ["attend", "check_longest", "context_for", "once", "plan_once", "refuse"]

KEPT = 16  # plans of a context: the kinds of layers of a model, for the batches of an accumulation step


class _Recent(OrderedDict[Any, tuple[Any, Any]]):
    """The last `KEPT` results, and what each was made from: as its tensors are kept, their addresses stay theirs."""

    def find_or_make(self, key: Any, given: Any, make: Callable[[], Any]) -> Any:
        if key not in self:
            self[key] = make(), given
            if len(self) > KEPT:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key][0]


_contexts: dict[Any, ContextParallel] = {}
_done = _Recent()
_plans: WeakKeyDictionary[ContextParallel, _Recent] = WeakKeyDictionary()


def context_for(group: Any, cp_comm_type: str, **options: Any) -> ContextParallel:
    """One context for a group (or a list of two), a schedule and its options, however often they come."""
    group = tuple(group) if isinstance(group, list) else group
    key = group, cp_comm_type, tuple(sorted(options.items()))
    if key not in _contexts:
        _contexts[key] = ContextParallel(group, cp_comm_type, **options)
    return _contexts[key]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: ContextParallel,
    softmax_offset: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    **problem: Any,
) -> Any:
    """`cp_fast.attention`, with the plan that an earlier call with the same arguments made."""
    check_context(cp, ContextParallel)
    results: dict[str, Any] = {
        "deterministic": deterministic,
        "return_lse": return_lse,
        "return_max_logit": return_max_logit,
    }
    qkv_format = problem.get("qkv_format", "bshd")
    try:
        sizes = read_sizes(local_part(q), local_part(k), local_part(v), qkv_format, cp.size)
    except (TypeError, ValueError):  # which `attention` finds too, and tells the other ranks
        return attention(q, k, v, cp=cp, softmax_offset=softmax_offset, **results, **problem)
    given = {name: getattr(sizes, name) for name in ("heads_q", "heads_kv", "d_qk", "d_v")}
    if qkv_format != "thd":
        given |= {name: getattr(sizes, name) for name in ("batch_size", "seqlen_q", "seqlen_kv")}
    plan = plan_once(cp, dtype=_dtype(q), device=q.device, **given, **results, **problem)
    return attention(q, k, v, cp=cp, plan=plan, softmax_offset=softmax_offset, **results)


@torch.compiler.disable(reason="making a plan is no graph")
def plan_once(cp: ContextParallel, **arguments: Any) -> Plan:
    """`make_plan`, or what it gave for the same arguments: the same tensors of lengths, not changed since."""
    key = tuple((name, _identity(value)) for name, value in sorted(arguments.items()))
    lengths = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    return _plans.setdefault(cp, _Recent()).find_or_make(key, lengths, lambda: make_plan(cp=cp, **arguments))


def once(work: Callable[..., Any], *given: Any) -> Any:
    """`work(*given)`, or what it gave for the same tensors, not changed since: the same object, so that all layers find
    one plan, and are not each made to wait for a GPU.
    """
    return _done.find_or_make((work, *map(_identity, given)), given, lambda: work(*given))


def _identity(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    version = None if value.is_inference() else value._version
    return value.data_ptr(), version, tuple(value.shape), value.stride(), value.dtype, value.device


def _dtype(q: torch.Tensor) -> torch.dtype:
    """q's, or what autocast makes of it."""
    device = q.device.type
    castable = q.is_floating_point() and q.dtype != torch.float64 and device in ("cpu", "cuda")
    return torch.get_autocast_dtype(device) if castable and torch.is_autocast_enabled(device) else q.dtype


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
