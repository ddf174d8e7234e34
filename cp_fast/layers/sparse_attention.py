"""`select_keys`, `sparse_attention` and `index_loss`: attention over the keys that an indexer chooses, on the slices of
`attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan
from cp_fast.kernels.sparse.sparse_kernels import choose_sparse, shared_storage
from cp_fast.layers.layer_operators import called, registered
from cp_fast.layers.layers import Layer, Outputs, Run
from cp_fast.layers.sparse_tables import KeyExchange, RowsOfHeads, SparseTables, sparse_tables
from cp_fast.runtime.run import sink_shares
from cp_ref.batches.tensors import lse_shape, wide_dtype
from cp_ref.calls import sparse_calls
from cp_ref.calls.declared import implements
from cp_ref.calls.sparse_calls import SparseAttentionCall
from cp_ref.groups.collectives import offset_grad

__all__ = [
    "LOSS",
    "OPERATORS",
    "SELECTION",
    "SPARSE",
    "LossLayer",
    "SelectionLayer",
    "SparseLayer",
    "index_loss",
    "select_keys",
    "sparse_attention",
]

Tensor = torch.Tensor

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

    def __init__(self, run: Run, where: str, given: list[Tensor]) -> None:
        """given: q, k, v and indices."""
        (q, k, v, indices), cp, latent = given, run.cp, run.call.latent
        self.tables = tables = run.tables
        self._gathered, self._where, self._exchange = tables.of_attention, where, KeyExchange(run.group, tables)
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


class SparseLayer(Layer):
    """Attention to the keys that indices name."""

    declared = sparse_calls.SPARSE
    tables = staticmethod(sparse_tables)
    reads_results = True

    def __init__(self) -> None:
        super().__init__(joined="bool")

    def prepared(self, tensors: Sequence[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """As autocast has them; v that autograd sees as cut from k stays so. A compiler sees no memory."""
        joined = not torch.compiler.is_compiling() and _is_joined(tensors[2], tensors[1])
        given = self.declared.cast(tensors)
        if joined:
            given[2] = given[1][..., : tensors[2].shape[-1]]
        return given, options | {"joined": joined}

    def facts(self, tensors: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
        """Whether v is a part of k in memory."""
        return (options["joined"] or _is_part(tensors[2], tensors[1]),)

    def read(self, cp: ContextParallel, plan: Any, tensors: Any, options: dict[str, Any], facts: Any) -> _Call:
        """The call, with the form of its keys."""
        options = dict(options)
        joined = options.pop("joined")
        found = super().read(cp, plan, tensors, options, facts)
        return _Call(**vars(found), latent=facts[0], joined=joined)

    def without_gradient(self, options: dict[str, Any]) -> Sequence[str]:
        """The gradient of k has that of a v that autograd sees as a part of it."""
        return ("v",) if options["joined"] else ()

    def shapes(self, tensors: Sequence[Any], qkv_format: str, options: dict[str, Any]) -> list[Tensor]:
        """Out and lse."""
        q, _, v, *_ = tensors
        lse = q.new_empty(lse_shape(q.shape[:-1], qkv_format), dtype=wide_dtype(q.dtype))
        return [q.new_empty(*q.shape[:-1], v.shape[-1]), lse]

    def forward(self, run: Run, *tensors: Any) -> Outputs:
        """Out and lse in the user's format."""
        *given, offset = tensors
        q = given[0]
        work = _Attended(run, self.forward_name, given)
        sink = None if offset is None else offset.to(wide_dtype(q.dtype))[work.heads]
        out, lse = work.home(*work.kernels.forward(work.q, work.k, work.v, work.rows, run.call.scale, sink))
        own = run.tables.q
        return (own.put(out, q), own.put_lse(lse, q)), ()

    def backward(self, run: Run, tensors: Any, results: Any, hidden: Any, grads: Any) -> Any:
        """Gradients of q, k, v and softmax_offset."""
        (q, k, v, indices, offset), (out, lse), call, cp = tensors, results, run.call, run.cp
        dout, dlse = (*grads, None)[:2]
        work = _Attended(run, self.backward_name, [q, k, v, indices])
        own, of_keys = run.tables.q, run.tables.kv
        given = [own.take(out), own.take_lse(lse), own.take(dout)]
        if dlse is not None:
            given.append(own.take_lse(dlse))
        doffset = None
        if offset is not None:
            share = sink_shares(offset.to(lse.dtype), *given)  # of the own rows
            doffset = offset_grad(cp, -share.sum(0)).to(offset.dtype)
        out, lse, dout, *rest = work.taken(*given)
        operands = work.q, work.k, work.v, work.rows, out, lse, dout, rest[0] if rest else None
        dq, dk, dv = work.kernels.backward(*operands, call.scale, _deterministic(run.plan), one_sum=call.joined)
        (dq,) = work.home(dq)
        dk, *of_values = work.keys_home(dk) if dv is None else work.keys_home(dk, dv)
        dq, dk = own.put(dq, q), of_keys.put(dk.to(k.dtype), k)
        dv = of_keys.put(of_values[0].to(v.dtype), v) if of_values else None
        return dq, dk, dv, None, doffset


def _deterministic(plan: Plan) -> bool:
    """Whether gradients of keys are added in a fixed order."""
    return plan.deterministic or torch.are_deterministic_algorithms_enabled()


# ---- the indexer: both of its functions gather keys as all_gather does, whatever the schedule of attention is


class SelectionLayer(Layer):
    """The choice of an indexer."""

    declared = sparse_calls.SELECTION
    tables = staticmethod(sparse_tables)
    differentiable = False

    def shapes(self, tensors: Sequence[Any], qkv_format: str, options: dict[str, Any]) -> list[Tensor]:
        """The indices."""
        q_index = tensors[0]
        return [q_index.new_empty(*q_index.shape[:-2], options["top_k"], dtype=torch.int32)]

    def forward(self, run: Run, q_index: Tensor, k_index: Tensor, weights: Tensor) -> Outputs:
        """The indices in the user's format."""
        tables, call, cp = run.tables, run.call, run.cp
        own, gathered = tables.q, tables.by_rows
        keys = RowsOfHeads(tables.kv.take(k_index)[:, None], ((0, 1),) * cp.size)
        (found,) = KeyExchange(run.group, tables).gather(self.forward_name, gathered.kv, keys)
        operands = own.take(q_index), found[:, 0], own.take(weights).to(wide_dtype(q_index.dtype))
        chosen = choose_sparse(q_index, cp.backend).select(*operands, gathered.visible, call.top_k, call.scale)
        return (own.put(chosen, q_index, -1),), ()


class _Compared:
    """The operands of a rank's kernels in one pass of `index_loss`.

    Attributes:
        operands: those of `SparseKernels.loss` before the scales.
    """

    def __init__(self, run: Run, where: str, given: Sequence[Any]) -> None:
        """given: the tensors of `index_loss`."""
        q_index, k_index, weights, lse, q, k, indices = given
        self.tables, size = run.tables, run.cp.size
        tables: SparseTables = self.tables
        self._where, self._exchange, self._keys = where, KeyExchange(run.group, tables), tables.by_rows.kv
        self.kernels = choose_sparse(q if q.dtype == torch.float64 else q_index, run.cp.backend)
        own, everything = tables.q, ((0, tables.problem.heads_kv),) * size
        self._one = ((0, 1),) * size
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


class LossLayer(Layer):
    """How far the choice of an indexer is from attention."""

    declared = sparse_calls.INDEX_LOSS
    tables = staticmethod(sparse_tables)

    def shapes(self, tensors: Sequence[Any], qkv_format: str, options: dict[str, Any]) -> list[Tensor]:
        """A number a row."""
        q_index = tensors[0]
        return [q_index.new_empty(q_index.shape[:-2], dtype=wide_dtype(q_index.dtype))]

    def forward(self, run: Run, *tensors: Any) -> Outputs:
        """The loss of each row in the user's format."""
        q_index, call = tensors[0], run.call
        work = _Compared(run, self.forward_name, tensors)
        found = work.kernels.loss(*work.operands, call.scale, call.softmax_scale)
        return (run.tables.q.put(found.to(wide_dtype(q_index.dtype)), q_index),), ()

    def backward(self, run: Run, tensors: Any, results: Any, hidden: Any, grads: Any) -> Any:
        """Gradients of the indexer's tensors."""
        (q_index, k_index, weights, *constants), (dloss,), call = tensors, grads, run.call
        work = _Compared(run, self.backward_name, tensors)
        own, of_keys = run.tables.q, run.tables.kv
        dloss = own.take(dloss[..., None])[:, 0].to(work.operands[5].dtype)
        how = call.scale, call.softmax_scale, dloss, _deterministic(run.plan)
        dq, dk, dweights = work.kernels.loss_backward(*work.operands, *how)
        dk = of_keys.put(work.keys_home(dk).to(k_index.dtype), k_index)
        return own.put(dq, q_index), dk, own.put(dweights.to(weights.dtype), weights), *(None for _ in constants)


# ---- the functions


SELECTION, SPARSE, LOSS = registered(SelectionLayer()), registered(SparseLayer()), registered(LossLayer())
OPERATORS = SELECTION.operator, SPARSE.operator, LOSS.operator  # whose results checkpointing saves


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
    return called(SELECTION, cp, plan, (q_index, k_index, weights), top_k=top_k, scale=scale)[0]


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
    tensors, how = (q, k, v, indices, softmax_offset), {"softmax_scale": softmax_scale, "return_lse": return_lse}
    out, *lse = called(SPARSE, cp, plan, tensors, **how)
    return (out, *lse) if return_lse else out


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
    tensors = q_index, k_index, weights, lse, q, k, indices
    return called(LOSS, cp, plan, tensors, scale=scale, softmax_scale=softmax_scale)[0]
