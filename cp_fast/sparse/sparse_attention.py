"""`select_keys`, `sparse_attention` and `index_loss`: attention over the keys that an indexer chooses, on the slices of
`attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cp_fast.api.checked_calls import agree_on_backward, layer_call
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan
from cp_fast.backends.sparse_kernels import choose_sparse, shared_storage
from cp_fast.dispatch.handles import hide_from_checkpointing, is_selective, object_of, outside_of_graphs
from cp_fast.runtime.forward_backward import sink_shares
from cp_fast.sparse.sparse_tables import KeyExchange, RowsOfHeads, sparse_tables
from cp_ref.contract import sparse_calls
from cp_ref.contract.call_checks import check_context, one_a_head
from cp_ref.contract.collectives import offset_grad
from cp_ref.contract.declared import implements
from cp_ref.contract.sparse_calls import (
    IndexLossCall,
    SparseAttentionCall,
    read_index_loss,
    read_selection,
    read_sparse_attention,
)
from cp_ref.contract.tensors import autocast, differentiable_once, no_autocast, refuse_transforms, wide_dtype

__all__ = [
    "OPERATORS",
    "IndexLoss",
    "SparseAttention",
    "index_loss",
    "select_keys",
    "sparse_attention",
]

Tensor = torch.Tensor

# ---- the calls


@implements(sparse_calls.select_keys)
def select_keys(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    *,
    cp: ContextParallel,
    plan: Plan,
    top_k: int,
    scale: float | None,
) -> torch.Tensor:
    check_context(cp, ContextParallel)
    options = {"top_k": top_k, "scale": scale}
    if torch.compiler.is_compiling():
        return outside_of_graphs(select_keys, q_index, k_index, weights, cp=cp, plan=plan, **options)
    refuse_transforms()
    given = q_index, k_index, weights
    read = partial(read_selection, cp, plan, Plan, *given, **options)
    call, _ = layer_call(cp, plan, "select_keys", [*options.values()], given, read)
    q_index, k_index, weights = (x.detach() for x in given)
    if is_selective():
        return _select_operator(q_index, k_index, weights, plan.handle, cp.handle, call.top_k, call.scale)[0]
    return _selected(plan, cp, q_index, k_index, weights, call.top_k, call.scale)


@implements(sparse_calls.sparse_attention)
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    *,
    cp: ContextParallel,
    plan: Plan,
    softmax_scale: float | None,
    softmax_offset: torch.Tensor | None,
    return_lse: bool,
) -> Any:
    check_context(cp, ContextParallel)
    options = {"softmax_scale": softmax_scale, "return_lse": return_lse}
    if torch.compiler.is_compiling():
        options["softmax_offset"] = softmax_offset
        return outside_of_graphs(sparse_attention, q, k, v, indices, cp=cp, plan=plan, **options)
    refuse_transforms()
    offset, joined = one_a_head(softmax_offset), _is_joined(v, k)
    q, k, v = autocast(q), (keys := autocast(k)), keys[..., : v.shape[-1]] if joined else autocast(v)
    given = q, k, v, indices
    how: dict[str, Any] = {"latent": joined or _is_part(v, k), "joined": joined}

    def read() -> _Call:
        found = read_sparse_attention(cp, plan, Plan, *given, softmax_offset=offset, **options)
        return _Call(**(vars(found) | how))

    call, number = layer_call(cp, plan, "sparse_attention", [*options.values(), *how.values()], (*given, offset), read)
    out, lse = SparseAttention.apply(plan, cp, call, number, *given, offset)
    return (out, lse) if return_lse else out


@implements(sparse_calls.index_loss)
def index_loss(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    indices: torch.Tensor,
    *,
    cp: ContextParallel,
    plan: Plan,
    scale: float | None,
    softmax_scale: float | None,
) -> torch.Tensor:
    check_context(cp, ContextParallel)
    options = {"scale": scale, "softmax_scale": softmax_scale}
    given = q_index, k_index, weights, lse, q, k, indices
    if torch.compiler.is_compiling():
        return outside_of_graphs(index_loss, *given, cp=cp, plan=plan, **options)
    refuse_transforms()
    given = *given[:4], autocast(q), autocast(k), indices
    read = partial(read_index_loss, cp, plan, Plan, *given, **options)
    call, number = layer_call(cp, plan, "index_loss", [*options.values()], given, read)
    constants = (x.detach() for x in given[3:])
    return IndexLoss.apply(plan, cp, call, number, *given[:3], *constants)


# ---- attention


@dataclass(frozen=True)
class _Call(SparseAttentionCall):
    """A checked call. `latent`: v is a part of k in memory, so k travels alone. `joined`: v is cut from k to autograd
    too, so their gradients travel as one.
    """

    latent: bool
    joined: bool


class _Attended:
    """The operands of a rank's kernels in one pass of `sparse_attention`, and the way of their results home.

    Attributes:
        tables, kernels, visible: of the call.
        q, k, v, rows: operands of `SparseKernels.forward`.
        heads: the rank's query heads.
    """

    def __init__(self, plan: Plan, cp: ContextParallel, where: str, latent: bool, given: list[Tensor]) -> None:
        """given: q, k, v and indices."""
        q, k, v, indices = given
        self.tables = tables = sparse_tables(plan)
        self._gathered, self._where, self._exchange = tables.of_attention, where, KeyExchange(plan, cp, tables)
        self._of_q, self._of_kv = zip(*self._gathered.heads, strict=True)
        self.heads = slice(*self._of_q[cp.rank])
        self.kernels = choose_sparse(q, cp.backend)

        rows = [tables.kv.take(x) for x in ((k,) if latent else (k, v))]
        gathered = self._exchange.gather(where, self._gathered.kv, *(RowsOfHeads(x, self._of_kv) for x in rows))
        self.k, self.v = (gathered[0], gathered[0][..., : v.shape[-1]]) if latent else gathered
        named = tables.q.take(indices)
        named = named if named.ndim == 3 else named[:, None]
        of_named = self._of_kv if named.shape[1] == k.shape[-2] else ((0, 1),) * cp.size
        self.q, named = self._travelled(RowsOfHeads(tables.q.take(q), self._of_q), RowsOfHeads(named, of_named))
        self.rows = self.kernels.rows_of(named, self._gathered.visible)

    def taken(self, *own: Tensor) -> list[Tensor]:
        """Rows of own queries [n, h_q, ...], as `q` has them."""
        return self._travelled(*(RowsOfHeads(x, self._of_q) for x in own))

    def _travelled(self, *own: RowsOfHeads) -> list[Tensor]:
        if self._gathered.q is None:
            return [x.rows for x in own]
        return self._exchange.gather(f"{self._where}, queries", self._gathered.q, *own)

    def home(self, *found: Tensor) -> list[Tensor]:
        """Results for the rows of `q` as those of the own queries [n, h_q, ...]."""
        if self._gathered.q is None:
            return list(found)
        total, n = self.tables.problem.heads_q, len(self.tables.q.rows)
        results = (RowsOfHeads(x, self._of_q) for x in found)
        return self._exchange.bring_back(f"{self._where}, results", self._gathered.q, n, total, *results)

    def keys_home(self, *found: Tensor) -> list[Tensor]:
        """Gradients of the rows of `k` as sums for the own keys [n, h_kv, ...]."""
        total, n = self.tables.problem.heads_kv, len(self.tables.kv.rows)
        gradients = (RowsOfHeads(x, self._of_kv) for x in found)
        return self._exchange.bring_back(f"{self._where}, gradients", self._gathered.kv, n, total, *gradients)


def _is_part(v: Any, k: Any) -> bool:
    """Whether v is the first part of k's last axis, in the same memory."""
    plain = all(type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided for x in (v, k))
    return plain and not v.is_nested and not k.is_nested and v.numel() > 0 and shared_storage(k, v)


_CUTS = ("SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0", "AliasBackward0")


def _is_joined(v: Any, k: Any) -> bool:
    """Whether the gradient of k can have that of v in it: autograd would only add v's to k's, and nobody sees v's on
    its way. So v is cut from k itself. Of a longer way, PyTorch does not say who looks at the tensors between.
    """
    if not _is_part(v, k) or v.grad_fn is None or v.retains_grad or v._backward_hooks or _has_hooks(v.grad_fn):
        return False
    ((parent, _), *_) = v.grad_fn.next_functions
    of_k = parent is k.grad_fn if k.grad_fn is not None else getattr(parent, "variable", None) is k
    return type(v.grad_fn).__name__ in _CUTS and of_k


def _has_hooks(node: Any) -> bool:
    """Whether a node of autograd's graph calls functions of the user. Only a further hook's handle knows of them."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        others = len(handle.hooks_dict_ref()) > 1
        handle.remove()
        if others:
            return True
    return False


def _forward(plan: Plan, cp: ContextParallel, given: list[Any], scale: float, latent: bool) -> list[Tensor]:
    """out and lse in the user's format. given: q, k, v, indices and offset."""
    *tensors, offset = given
    q = tensors[0]
    where = "sparse_attention, forward"
    with hide_from_checkpointing(), cp.naming_errors(where), no_autocast(q.device):
        work = _Attended(plan, cp, where, latent, tensors)
        sink = None if offset is None else offset.detach().to(wide_dtype(q.dtype))[work.heads]
        out, lse = work.home(*work.kernels.forward(work.q, work.k, work.v, work.rows, scale, sink))
        own = work.tables.q
        return [own.put(out, q), own.put_lse(lse, q)]


class SparseAttention(torch.autograd.Function):
    """From q, k, v, indices and offset to out and lse."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        cp: ContextParallel,
        call: _Call,
        number: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        given: list[Any] = [*(x.detach() for x in (q, k, v)), indices, offset]
        if is_selective():
            out, lse = _forward_operator(*given, plan.handle, cp.handle, call.scale, call.latent)
        else:
            out, lse = _forward(plan, cp, given, call.scale, call.latent)
        ctx.save_for_backward(*given, out.detach(), lse.detach())
        ctx.plan, ctx.tables, ctx.cp, ctx.call, ctx.number = plan, sparse_tables(plan), cp, call, number
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        where, cp, call = "sparse_attention, backward", ctx.cp, ctx.call
        agree_on_backward(ctx, where)
        q, k, v, indices, offset, out, lse = ctx.saved_tensors
        with hide_from_checkpointing(), cp.naming_errors(where), no_autocast(q.device):
            work = _Attended(ctx.plan, cp, where, call.latent, [q, k, v, indices])
            own, of_keys = work.tables.q, work.tables.kv
            dout = torch.zeros_like(out) if dout is None else dout.detach()
            if dlse is None and call.return_lse:  # on another rank it may have one
                dlse = torch.zeros_like(lse)
            results = [own.take(out), own.take_lse(lse), own.take(dout)]
            if dlse is not None:
                results.append(own.take_lse(dlse.detach()))
            doffset = None
            if offset is not None:
                share = sink_shares(offset.detach().to(lse.dtype), *results)  # of the own rows
                doffset = offset_grad(cp, -share.sum(0)).to(offset.dtype)
            out, lse, dout, *rest = work.taken(*results)
            operands = work.q, work.k, work.v, work.rows, out, lse, dout, rest[0] if rest else None
            deterministic = _deterministic(ctx.plan)
            dq, dk, dv = work.kernels.backward(*operands, call.scale, deterministic, one_sum=call.joined)
            (dq,) = work.home(dq)
            dk, *of_values = work.keys_home(dk) if dv is None else work.keys_home(dk, dv)
            dq, dk = own.put(dq, q), of_keys.put(dk.to(k.dtype), k)
            dv = of_keys.put(of_values[0].to(v.dtype), v) if of_values else None
        return None, None, None, None, dq, dk, dv, None, doffset


def _deterministic(plan: Plan) -> bool:
    """Whether gradients of keys are added in a fixed order."""
    return plan.deterministic or torch.are_deterministic_algorithms_enabled()


# ---- the indexer: both of its functions gather keys as all_gather does, whatever the schedule of attention is


def _selected(
    plan: Plan, cp: ContextParallel, q_index: Tensor, k_index: Tensor, weights: Tensor, top_k: int, scale: float
) -> Tensor:
    """The indices in the user's format."""
    where = "select_keys"
    with hide_from_checkpointing(), cp.naming_errors(where), no_autocast(q_index.device):
        tables = sparse_tables(plan)
        own, gathered = tables.q, tables.by_rows
        keys = RowsOfHeads(tables.kv.take(k_index)[:, None], ((0, 1),) * cp.size)
        (found,) = KeyExchange(plan, cp, tables).gather(where, gathered.kv, keys)
        operands = own.take(q_index), found[:, 0], own.take(weights).to(wide_dtype(q_index.dtype))
        return own.put(
            choose_sparse(q_index, cp.backend).select(*operands, gathered.visible, top_k, scale), q_index, -1
        )


class _Compared:
    """The operands of a rank's kernels in one pass of `index_loss`.

    Attributes:
        operands: those of `SparseKernels.loss` before the scales.
    """

    def __init__(self, plan: Plan, cp: ContextParallel, where: str, given: list[Tensor]) -> None:
        """given: the tensors of `index_loss`."""
        q_index, k_index, weights, lse, q, k, indices = given
        self.tables = tables = sparse_tables(plan)
        self._where, self._exchange, self._keys = where, KeyExchange(plan, cp, tables), tables.by_rows.kv
        self.kernels = choose_sparse(q if q.dtype == torch.float64 else q_index, cp.backend)
        own, everything = tables.q, ((0, tables.problem.heads_kv),) * cp.size
        self._one = ((0, 1),) * cp.size
        keys = RowsOfHeads(tables.kv.take(k_index)[:, None], self._one), RowsOfHeads(tables.kv.take(k), everything)
        k_index, k = self._exchange.gather(where, self._keys, *keys)
        rows = self.kernels.rows_of(own.take(indices)[:, None], tables.by_rows.visible)
        weights = own.take(weights).to(wide_dtype(q_index.dtype))
        of_attention = own.take(q), k, own.take_lse(lse).to(wide_dtype(q_index.dtype, lse.dtype)), rows
        self.operands = own.take(q_index), k_index[:, 0], weights, *of_attention

    def keys_home(self, dk: Tensor) -> Tensor:
        """Gradients of the gathered keys of the indexer as sums for the own ones [n, d_i]."""
        where, n = f"{self._where}, gradients", len(self.tables.kv.rows)
        (found,) = self._exchange.bring_back(where, self._keys, n, 1, RowsOfHeads(dk[:, None], self._one))
        return found[:, 0]


def _diverged(plan: Plan, cp: ContextParallel, given: list[Any], scale: float, softmax_scale: float) -> Tensor:
    """The loss of each row in the user's format. given: the tensors of `index_loss`."""
    where, q_index = "index_loss, forward", given[0]
    with hide_from_checkpointing(), cp.naming_errors(where), no_autocast(q_index.device):
        work = _Compared(plan, cp, where, given)
        found = work.kernels.loss(*work.operands, scale, softmax_scale)
        return work.tables.q.put(found.to(wide_dtype(q_index.dtype)), q_index)


class IndexLoss(torch.autograd.Function):
    """From q_index, k_index, weights, and the constants lse, q, k and indices to the loss of each row."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, cp: ContextParallel, call: IndexLossCall, number: int, *tensors: Tensor
    ) -> Tensor:
        given: list[Any] = [x.detach() for x in tensors]
        scales = call.scale, call.softmax_scale
        if is_selective():
            (found,) = _loss_operator(*given, plan.handle, cp.handle, *scales)
        else:
            found = _diverged(plan, cp, given, *scales)
        ctx.save_for_backward(*given)
        ctx.plan, ctx.tables, ctx.cp, ctx.scales, ctx.number = plan, sparse_tables(plan), cp, scales, number
        return found

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dloss: Tensor) -> Any:
        where, cp = "index_loss, backward", ctx.cp
        agree_on_backward(ctx, where)
        given = list(ctx.saved_tensors)
        q_index, k_index, weights, *_ = given
        with hide_from_checkpointing(), cp.naming_errors(where), no_autocast(q_index.device):
            work = _Compared(ctx.plan, cp, where, given)
            own = work.tables.q
            dloss = own.take(dloss.detach()[..., None])[:, 0].to(work.operands[5].dtype)
            scale, softmax_scale = ctx.scales
            dq, dk, dweights = work.kernels.loss_backward(
                *work.operands, scale, softmax_scale, dloss, _deterministic(ctx.plan)
            )
            dk = work.tables.kv.put(work.keys_home(dk).to(k_index.dtype), k_index)
            dq, dweights = own.put(dq, q_index), own.put(dweights.to(weights.dtype), weights)
        return None, None, None, None, dq, dk, dweights, None, None, None, None


# ---- the forward passes as operators
#
# Selective checkpointing sees each as one operator, and keeps its results: see `cp_fast.checkpoint`.


@torch.library.custom_op("cp_attention::select_keys", mutates_args=())
def _select_operator(
    q_index: Tensor, k_index: Tensor, weights: Tensor, plan: Tensor, cp: Tensor, top_k: int, scale: float
) -> list[Tensor]:
    return [_selected(object_of(plan), object_of(cp), q_index, k_index, weights, top_k, scale)]


@torch.library.custom_op("cp_attention::sparse_attention_forward", mutates_args=())
def _forward_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    offset: Tensor | None,
    plan: Tensor,
    cp: Tensor,
    scale: float,
    latent: bool,
) -> list[Tensor]:
    return _forward(object_of(plan), object_of(cp), [q, k, v, indices, offset], scale, latent)


@torch.library.custom_op("cp_attention::index_loss_forward", mutates_args=())
def _loss_operator(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    plan: Tensor,
    cp: Tensor,
    scale: float,
    softmax_scale: float,
) -> list[Tensor]:
    given = [q_index, k_index, weights, lse, q, k, indices]
    return [_diverged(object_of(plan), object_of(cp), given, scale, softmax_scale)]


_ops: Any = torch.ops.cp_attention
OPERATORS: tuple[Any, ...] = (
    _ops.select_keys.default,
    _ops.sparse_attention_forward.default,
    _ops.index_loss_forward.default,
)
