"""torchtitan: its varlen attention over packed documents that are spread over ranks.

    from cp_fast.integrations import torchtitan as cp_titan

    cp_titan.apply_cp_to_forward([block.attention.inner_attention for block in model.layers.values()], context)
    inputs, labels, extra_kwargs = cp_titan.prepare_context_parallel_input(inputs, labels, extra_kwargs, context)

Both replace torchtitan's functions of these names, with a `ContextParallel` for `cp_mesh`. torchtitan itself is not
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from cp_fast.api.attention import PlanInGraph, attention_as_operator
from cp_fast.api.calls import plan_of_call
from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.shared.balanced_table import table_of_batch
from cp_fast.integrations.shared.drop_in import (
    Asked,
    check_tensors,
    drop_in,
    lengths_of_both,
    lengths_on_host,
    of_whole_batch,
    refuse,
)
from cp_fast.runtime.handles import copy_of, object_of
from cp_ref.batches.sharding import shard
from cp_ref.calls.attention_call import AttentionCall, CallFlags
from cp_ref.calls.declared import replaced
from cp_ref.calls.scores import PLAIN
from cp_ref.groups.agreement import agreed, merged
from cp_ref.problems.arguments import problem_arguments
from cp_ref.problems.call_checks import check_context
from cp_ref.schedules.values import kind_of
from cp_ref.schedules.words import Unsupported

__all__ = ["apply_cp_to_forward", "attention_forward", "check_backend", "prepare_context_parallel_input"]


def check_backend(parallelism: Any) -> None:
    """Raise ValueError unless torchtitan's ParallelismConfig has the backend that calls `apply_cp_to_forward`.

    >>> from types import SimpleNamespace
    >>> check_backend(SimpleNamespace(context_parallel_degree=2, spmd_backend="full_dtensor"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: parallelism.spmd_backend is 'full_dtensor' with context_parallel_degree 2; ...='partial_dtensor'
    """
    degree, backend = parallelism.context_parallel_degree, getattr(parallelism, "spmd_backend", "partial_dtensor")
    if degree > 1 and backend != "partial_dtensor":
        raise ValueError(
            f"parallelism.spmd_backend is {backend!r} with context_parallel_degree {degree}; varlen attention over "
            "ranks needs spmd_backend='partial_dtensor'"
        )


def apply_cp_to_forward(attention_modules: Iterable[torch.nn.Module], cp: ContextParallel) -> None:
    """Give every VarlenAttention module this package's forward. Its window stays.

    Raises:
        TypeError: a module of another kind; `cp` is no ContextParallel.
    """
    check_context(cp, ContextParallel)
    modules = list(attention_modules)
    for module in modules:
        if type(module).__name__ != "VarlenAttention":
            raise TypeError(f"attention_modules has a {type(module).__name__}; each must be a VarlenAttention")
    for module in modules:
        module.forward = partial(attention_forward, cp=cp, window_size=module.window_size)  # type: ignore[method-assign]


def prepare_context_parallel_input(
    inputs: torch.Tensor, labels: torch.Tensor, extra_kwargs: dict[str, Any], cp: ContextParallel
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Cut this rank's part out of a batch that every rank has whole. Collective.

    Args:
        inputs, labels: [b, s]; seen as one packed row [1, b * s]. b * s divides by cp_size.
        extra_kwargs: "positions" [b, s] and "attention_masks", the VarlenMetadata of the whole batch. Its lengths are
            best on the CPU; on a GPU they are waited for.
        cp: documents may have any lengths. Layout "balanced" shares them out by the work that they make.

    Returns:
        inputs, labels and positions as [1, b * s / cp]; attention_masks stay those of the whole batch, with lengths on
        the CPU.

    Raises:
        ValueError, TypeError: b * s does not divide, or the rows have other shapes, here or on another rank; or the
        ranks have other documents.
    """
    check_context(cp, ContextParallel)

    def read() -> list[int]:
        masks, positions = (_entry(extra_kwargs, name) for name in ("attention_masks", "positions"))
        rows = {"inputs": inputs, "labels": labels, "positions": positions}
        check_tensors("b s", **rows)
        for name, x in rows.items():
            if x.shape != inputs.shape:
                raise ValueError(
                    f"{name} has shape {list(x.shape)} and inputs {list(inputs.shape)}; they must be equal"
                )
        _check_metadata(masks)
        lengths = lengths_on_host(cu_seq_q=masks.cu_seq_q)["cu_seq_q"]
        _check_divides(lengths, inputs.numel(), cp)
        return lengths.tolist()

    same = of_whole_batch("attention_masks has other documents")
    everyone = merged(cp, "prepare_context_parallel_input", read, same)
    lengths = torch.tensor(everyone, dtype=torch.int32, device="cpu")
    cut: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_padded": lengths}
    if cp.layout == "balanced":
        cut = {"plan": table_of_batch(cp, "thd", lengths)}
    rows = inputs, labels, extra_kwargs["positions"]
    parts = [shard(x.flatten(), cp=cp, **cut)[None] for x in rows]
    masks = extra_kwargs["attention_masks"]._replace(cu_seq_q=lengths, cu_seq_k=lengths)
    return parts[0], parts[1], {**extra_kwargs, "positions": parts[2], "attention_masks": masks}


def attention_in_block(
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    *,
    attention_masks: Any,
    scale: float | None = None,
    out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    enable_gqa: bool = False,
    cp: ContextParallel,
    window_size: tuple[int, int],
    **kwargs: Any,
) -> torch.Tensor:
    """`attention_forward` while torch.compile makes a graph of a block. An operator finds the plan when the graph runs,
    and another one attends with it.
    """
    if cp.schedules[0] not in ("p2p", "all_gather"):
        from cp_fast.runtime.graph_break import graph_break_of_a2a  # imports Dynamo, as slow as importing PyTorch

        return graph_break_of_a2a(
            *(attention_forward, q_BLNH, k_BLNH, v_BLNH),
            attention_masks=attention_masks,
            scale=scale,
            out_transform=out_transform,
            **{"enable_gqa": enable_gqa, "cp": cp, "window_size": window_size, **kwargs},
        )
    refuse("VarlenAttention", **kwargs)
    q, k, v = (_narrowed(x) for x in (q_BLNH, k_BLNH, v_BLNH))
    lengths = attention_masks.cu_seq_q, attention_masks.cu_seq_k
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    how = [*window_size], scale, enable_gqa, out_transform is not None, wanted
    handle = _plan_of_documents(q.detach(), k.detach(), v.detach(), *lengths, cp.handle, *how)
    flags = CallFlags(False, False, out_transform is not None)
    out, lse, *_ = attention_as_operator(PlanInGraph(handle, *_OF_GRAPHS), cp, flags, None, q[0], k[0], v[0], None)
    out = out[None].to(q_BLNH.dtype)
    return out if out_transform is None else out_transform(out, lse.transpose(0, 1)[None])


_OF_GRAPHS = "thd", "", True  # What is equal in all plans of graphs: see `PlanInGraph`.


@torch.library.custom_op("cp_attention::plan_of_documents", mutates_args=())
def _plan_of_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    cp: torch.Tensor,
    window_size: list[int],
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    requires_grad: bool,
) -> torch.Tensor:
    """The handle of the plan of a batch's documents: the one that an eager call would take. Collective if it is new."""
    context = object_of(cp)

    def read() -> tuple[Asked, dict[str, Any]]:
        mine = [x.detach().requires_grad_(requires_grad) for x in (q, k, v)]
        window = window_size[0], window_size[1]
        asked = _documents(mine[0], mine[1], mine[2], cu_seq_q, cu_seq_k, {}, scale, enable_gqa, context, window)
        return asked, problem_arguments(asked.arguments)

    asked, problem = agreed(context, "an agreement on a call", read)
    tensors, flags = (asked.q, asked.k, asked.v), CallFlags(False, False, return_lse)
    given = dict(zip("qkv", tensors, strict=True))
    plan = plan_of_call(AttentionCall(_in_graph(asked.cp), None, flags, given, tensors, None, PLAIN, problem))
    if PlanInGraph.of(plan)[1:] != _OF_GRAPHS:
        raise Unsupported(
            "this plan in a graph of torch.compile",
            {f"torchtitan's attention over {plan.backend.name!r}": set()},
            "its backward pass needs other tensors than the graph keeps; leave compile off",
        )
    return copy_of(plan.handle)  # The backward pass may come when the plan is no longer cached.


_of_graphs: WeakKeyDictionary[ContextParallel, ContextParallel] = WeakKeyDictionary()


def _in_graph(cp: ContextParallel) -> ContextParallel:
    """The context whose plans a graph can have: a2a keeps other tensors, so one that chooses takes all_gather here."""
    if len(cp.schedules) == 1:
        return cp
    if cp not in _of_graphs:
        named = isinstance(cp.layout, str)
        made = replaced(cp, cp_comm_type="all_gather", **({} if named else {"layout": "dual_chunk"}))
        _of_graphs[cp] = made if named else made.holding(cp.layout)
    return _of_graphs[cp]


@_plan_of_documents.register_fake
def _(*given: Any) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@drop_in(in_graph=attention_in_block)
def attention_forward(
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    *,
    attention_masks: Any,
    scale: float | None = None,
    out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    enable_gqa: bool = False,
    cp: ContextParallel,
    window_size: tuple[int, int],
    **kwargs: Any,
) -> Asked:
    """Compute one layer's attention, [1, t/cp, n, h] -> [1, t/cp, n, h_v]. Collective. Under torch.compile it is part
    of its block's graph, with cp_comm_type "p2p" and "all_gather"; "auto" takes "all_gather" there.

    Args:
        attention_masks: VarlenMetadata of the whole batch: documents by their global cumulative lengths.
        out_transform: gets out and lse [1, t/cp, n], and gives what is returned.
        window_size: (left, right), counted from the query. On a GPU float32 inputs are cast to bfloat16, as there.

    Raises:
        ValueError: more than one row, or numbers of heads that differ without enable_gqa. NotImplementedError: other
        keywords; the others: as `cp_fast.attention`.
    """
    refuse("VarlenAttention", **kwargs)
    check_tensors("1 t/cp n h", q=q_BLNH, k=k_BLNH, v=v_BLNH)
    _check_metadata(attention_masks)
    longest = {"max_q": attention_masks.max_q, "max_k": attention_masks.max_k}
    lengths = attention_masks.cu_seq_q, attention_masks.cu_seq_k
    q, k, v = (_narrowed(x) for x in (q_BLNH, k_BLNH, v_BLNH))
    asked = _documents(q, k, v, *lengths, longest, scale, enable_gqa, cp, window_size)

    def give(results: Any) -> torch.Tensor:
        if out_transform is None:
            return results[None].to(q_BLNH.dtype)
        out, lse = results
        return out_transform(out[None].to(q_BLNH.dtype), lse.transpose(0, 1)[None])

    return asked._replace(arguments=asked.arguments | {"return_lse": out_transform is not None}, give=give)


def _narrowed(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16) if x.is_cuda and x.dtype == torch.float32 else x


def _documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seq_q: Any,
    cu_seq_k: Any,
    longest: dict[str, Any],
    scale: float | None,
    enable_gqa: bool,
    cp: ContextParallel,
    window_size: tuple[int, int],
) -> Asked:
    """Attention of one packed row's documents, as the arguments of `attention`. longest: max_q and max_k."""
    check_tensors("1 t/cp n h", q=q, k=k, v=v)
    if q.shape[0] != 1:
        raise ValueError(f"q has {q.shape[0]} rows; prepare_context_parallel_input makes one packed row of a batch")
    if not enable_gqa and q.shape[2] != k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads and k {k.shape[2]}; that needs enable_gqa=True")
    given = {"cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k, "max_q": None, "max_k": None} | longest
    cu_q, others = lengths_of_both(given, ("cu_seq_q", "cu_seq_k"), ("max_q", "max_k"))
    if others is not None:
        raise ValueError("attention_masks has other lengths for keys than for queries; documents attend to themselves")
    arguments: dict[str, Any] = {
        "qkv_format": "thd",
        "attn_mask_type": "causal" if window_size[1] == 0 else "no_mask",
        "window_size": window_size,
        "cu_seqlens_q": cu_q,
        "softmax_scale": scale,
    }
    of_batch = table_of_batch(cp, "thd", cu_q).over(cp) if cp.layout == "balanced" else cp
    return Asked(q[0], k[0], v[0], of_batch, arguments)


def _entry(extra_kwargs: Any, name: str) -> Any:
    if not isinstance(extra_kwargs, Mapping) or name not in extra_kwargs:
        raise ValueError(f"extra_kwargs has no {name!r}; it must be a dict with positions and attention_masks")
    return cast("Mapping[str, Any]", extra_kwargs)[name]


def _check_metadata(masks: Any) -> None:
    """Other attention of torchtitan has None, a BlockMask, or a dict of them."""
    if not all(hasattr(masks, name) for name in ("cu_seq_q", "cu_seq_k", "max_q", "max_k")):
        raise TypeError(f"attention_masks is {kind_of(masks)}; it must be torchtitan's VarlenMetadata")


def _check_divides(lengths: torch.Tensor, tokens: int, cp: ContextParallel) -> None:
    """Every rank gets equally many tokens of the batch, and none that is not the batch's."""
    if int(lengths[-1]) != tokens:
        raise ValueError(f"attention_masks has documents of {int(lengths[-1])} tokens, and inputs has {tokens}")
    if tokens % cp.size:
        raise ValueError(f"inputs has {tokens} tokens; they must divide by cp_size = {cp.size}")
