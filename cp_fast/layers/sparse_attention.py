"""`select_keys`, `sparse_attention` and `index_loss`: attention over the keys that an indexer chooses, on the slices of
`attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan
from cp_fast.kernels.sparse.sparse_kernels import Runs, choose_sparse, shared_storage
from cp_fast.layers.layer_operators import called, registered
from cp_fast.layers.layers import Layer, Outputs, Run
from cp_fast.layers.sparse_tables import KEYS, SparseTables, sparse_tables
from cp_fast.runtime.run import sink_shares
from cp_ref.batches.tensors import lse_shape, wide_dtype
from cp_ref.calls import compressed_calls, sparse_calls
from cp_ref.calls.layer import public_function
from cp_ref.calls.sparse_calls import SparseAttentionCall
from cp_ref.groups.collectives import offset_grad

__all__ = [
    "COMPRESSED",
    "LOSS",
    "OPERATORS",
    "SELECTION",
    "SPARSE",
    "CompressedLayer",
    "LossLayer",
    "SelectionLayer",
    "SparseLayer",
    "compressed_attention",
    "index_loss",
    "select_keys",
    "sparse_attention",
]

Tensor = torch.Tensor

# ---- attention


@dataclass(frozen=True)
class _Call(SparseAttentionCall):
    """A checked call.

    Attributes:
        latent: values are parts of their keys in memory, so keys travel alone.
        joined: values are cut from keys to autograd too, so their gradients travel as one.
    """

    latent: bool
    joined: bool


class _Keys(NamedTuple):
    """Keys that rows see: tokens, or compressed keys of one rate.

    Attributes:
        indices: those that rows name; None: rows see all that the mask shows.
    """

    tables: SparseTables
    k: Tensor
    v: Tensor
    indices: Tensor | None


class _Attended:
    """The operands of a rank's kernels in one pass of attention, and the way of their results home. Keys of several
    kinds lie one behind the other.

    Attributes:
        kernels: of the call.
        q, more, k, v, rows, runs: operands of `SparseKernels.forward`; more own rows of queries, as `q` has them.
        heads: the rank's query heads.
    """

    def __init__(self, run: Run, q: Tensor, kinds: Sequence[_Keys], more: Sequence[Tensor] = ()) -> None:
        """more: rows of own queries [n, h_q, ...]."""
        latent, tables = run.call.latent, kinds[0].tables
        self._run, self._kinds = run, kinds
        self._gathered = [keys.tables.of_attention for keys in kinds]
        self.heads = slice(*self._gathered[0].heads)
        self.kernels = choose_sparse(q, run.cp.backend)
        parts = [
            run.of(keys.tables).gather(of.keys, *map(keys.tables.kv.take, (keys.k,) if latent else (keys.k, keys.v)))
            for keys, of in zip(kinds, self._gathered, strict=True)
        ]
        joined = [x[0] if len(kinds) == 1 else torch.cat(x) for x in zip(*parts, strict=True)]
        self.k, self.v = (joined[0], joined[0][..., : kinds[0].v.shape[-1]]) if latent else joined
        self._sizes = [len(part[0]) for part in parts]

        indices = next((keys.indices for keys in kinds if keys.indices is not None), None)
        named = None if indices is None else tables.q.take(indices)
        named = named[:, None] if named is not None and named.ndim == 2 else named
        self.q, self.more = tables.q.take(q), more
        if self._gathered[0].queries is not None:
            travels = self.q.new_full((len(self.q), 1, 1), -1, dtype=torch.int32) if named is None else named
            way = self._gathered[0].queries_of(travels)
            self.q, *self.more, travels = run.of(tables).gather(way, self.q, *more, indices=travels)
            named = None if named is None else travels
        self.rows, self.runs = self._chosen(named)

    def _chosen(self, named: Tensor | None) -> tuple[Tensor, Runs | None]:
        """The rows of keys that rows of `q` name, and those that they see without names."""
        rows, runs, first = self.q.new_empty(len(self.q), 1, 0, dtype=torch.int32), list[Runs](), 0
        for keys, of, size in zip(self._kinds, self._gathered, self._sizes, strict=True):
            if keys.indices is None:
                runs.append(Runs(of.runs.starts + first, of.runs.stops + first, of.longest))
            else:
                assert named is not None
                rows = self.kernels.rows_of(named, of.visible)
                rows = torch.where(rows < 0, rows, rows + first) if first else rows
            first += size
        if not runs:
            return rows, None
        starts, stops = (torch.cat(columns, 1) for columns in zip(*(x[:2] for x in runs), strict=True))
        return rows, Runs(starts, stops, sum(x.longest for x in runs))

    def home(self, *found: Tensor) -> Sequence[Tensor]:
        """Results for the rows of `q` as those of the own queries [n, h_q, ...]."""
        queries = self._gathered[0].queries
        return found if queries is None else self._run.of(self._kinds[0].tables).give_back(queries, *found)

    def keys_home(self, *found: Tensor) -> list[Tensor | None]:
        """Gradients of the rows of `k` as those of each kind's own keys and values, in the user's format; None for
        values whose gradients are in those of the keys.
        """
        results, first = list[Tensor | None](), 0
        for keys, of, size in zip(self._kinds, self._gathered, self._sizes, strict=True):
            part = [x[first : first + size] for x in found]
            home = self._run.of(keys.tables).give_back(of.keys, *part)
            own = [keys.tables.kv.put(g.to(x.dtype), x) for g, x in zip(home, (keys.k, keys.v), strict=False)]
            results += [own[0], own[1] if len(own) > 1 else None]
            first += size
        return results


def _is_part(v: Any, k: Any) -> bool:
    """Whether v is the first part of k's last axis, in the same memory."""
    plain = all(type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided for x in (v, k))
    return plain and not v.is_nested and not k.is_nested and v.numel() > 0 and shared_storage(k, v)


def _is_empty(x: Any) -> bool:
    """Whether a rank has no rows of it: it cannot tell whether others have them as parts of keys."""
    return isinstance(x, Tensor) and not x.is_nested and not x.numel()


_CUTS = ("SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0", "AliasBackward0")


def _is_joined(v: Any, k: Any) -> bool:
    """Whether the gradient of k can have that of v in it: autograd would only add v's to k's, and nobody sees v's on
    its way. So v is k, or cut from k itself. Of a longer way, PyTorch does not say who looks at the tensors between.
    """
    if v is k:
        return type(v) in (Tensor, torch.nn.Parameter) and not v.is_nested
    part = _is_part(v, k) or (_is_empty(v) and _is_empty(k))
    if not part or v.grad_fn is None or v.retains_grad or v._backward_hooks or _has_hooks(v.grad_fn):
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
    """Attention to the keys that indices name, or to all that the mask shows."""

    declared = sparse_calls.SPARSE
    tables = staticmethod(sparse_tables)
    reads_results = True
    pairs: tuple[tuple[int, int], ...] = ((1, 2),)  # The places of keys and their values among the operands.

    def __init__(self) -> None:
        super().__init__(joined="bool")

    def cast_operands(self, tensors: Sequence[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """As autocast has them; v that autograd sees as cut from k stays so. A compiler sees no memory."""
        compiling = torch.compiler.is_compiling()
        joined = not compiling and all(_is_joined(tensors[v], tensors[k]) for k, v in self.pairs)
        given = self.declared.cast(tensors)
        for k, v in self.pairs if joined else ():
            given[v] = given[k][..., : tensors[v].shape[-1]]
        return given, options | {"joined": joined}

    def facts(self, tensors: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
        """Whether v is a part of k in memory; and the name of further values that are no part of their keys."""
        (k, v), *others = self.pairs
        latent = options["joined"] or _is_part(tensors[v], tensors[k])
        apart = (self.names[v] for k, v in others if not (_is_empty(tensors[v]) or _is_part(tensors[v], tensors[k])))
        return latent, "" if options["joined"] else next(apart, "")

    def read(self, cp: ContextParallel, plan: Any, tensors: Any, options: dict[str, Any], facts: Any) -> Any:
        """The call, with the form of its keys."""
        options = dict(options)
        joined = options.pop("joined")
        found, (latent, apart) = super().read(cp, plan, tensors, options, facts), facts
        if latent and apart:
            raise ValueError(
                f"v is a part of k in memory, and {apart} is no part of its keys; values are parts of keys in both or "
                "in none: give v.clone(), or a slice of the keys"
            )
        return _Call(**vars(found), latent=latent, joined=joined)

    def without_gradient(self, options: dict[str, Any]) -> Sequence[str]:
        """The gradient of k has that of a v that autograd sees as a part of it."""
        return [self.names[v] for _, v in self.pairs] if options["joined"] else ()

    def shapes(self, tensors: Sequence[Any], qkv_format: str, options: dict[str, Any]) -> list[Tensor]:
        """Out and lse."""
        q, _, v, *_ = tensors
        lse = q.new_empty(lse_shape(q.shape[:-1], qkv_format), dtype=wide_dtype(q.dtype))
        return [q.new_empty(*q.shape[:-1], v.shape[-1]), lse]

    def kinds(self, run: Run, tensors: Sequence[Any]) -> list[_Keys]:
        """The keys of a call."""
        _, k, v, indices, _ = tensors
        return [_Keys(run.tables.of_rate(run.call.rate), k, v, indices)]

    def forward(self, run: Run, *tensors: Any) -> Outputs:
        """Out and lse in the user's format."""
        q, *_, offset = tensors
        work = _Attended(run, q, self.kinds(run, tensors))
        sink = None if offset is None else offset.to(wide_dtype(q.dtype))[work.heads]
        operands = work.q, work.k, work.v, work.rows, run.call.scale, sink
        out, lse = work.home(*work.kernels.forward(*operands, runs=work.runs))
        own = run.tables.q
        return (own.put(out, q), own.put_lse(lse, q)), ()

    def backward(self, run: Run, tensors: Any, results: Any, hidden: Any, grads: Any) -> Any:
        """Gradients of the operands."""
        (q, *_, offset), (out, lse), call, cp = tensors, results, run.call, run.cp
        dout, dlse = (*grads, None)[:2]
        own = run.tables.q
        given = [own.take(out), own.take_lse(lse), own.take(dout)]
        if dlse is not None:
            given.append(own.take_lse(dlse))
        work = _Attended(run, q, self.kinds(run, tensors), given)
        doffset = None
        if offset is not None:
            share = sink_shares(offset.to(lse.dtype), *given)  # of the own rows
            doffset = offset_grad(cp, -share.sum(0)).to(offset.dtype)
        out, lse, dout, *rest = work.more
        operands = work.q, work.k, work.v, work.rows, out, lse, dout, rest[0] if rest else None
        how: dict[str, Any] = {"one_sum": call.joined, "runs": work.runs}
        dq, dk, dv = work.kernels.backward(*operands, call.scale, _deterministic(run.plan), **how)
        (dq,) = work.home(dq)
        of_keys = work.keys_home(dk) if dv is None else work.keys_home(dk, dv)
        return own.put(dq, q), *of_keys, None, doffset


class CompressedLayer(SparseLayer):
    """Attention to the tokens that the mask shows, and to compressed keys, in one softmax."""

    declared = compressed_calls.COMPRESSED
    pairs = ((1, 2), (3, 4))

    def kinds(self, run: Run, tensors: Sequence[Any]) -> list[_Keys]:
        """Tokens, then entries."""
        _, k, v, k_entries, v_entries, indices, _ = tensors
        entries = _Keys(run.tables.of_rate(run.call.rate), k_entries, v_entries, indices)
        return [_Keys(run.tables, k, v, None), entries]


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
        call, cp = run.call, run.cp
        tables: SparseTables = run.tables.of_rate(call.rate)
        own = tables.q
        (keys,) = run.of(tables).gather(KEYS, tables.kv.take(k_index))
        operands = own.take(q_index), keys, own.take(weights).to(wide_dtype(q_index.dtype))
        chosen = choose_sparse(q_index, cp.backend).select(*operands, tables.by_rows.visible, call.top_k, call.scale)
        return (own.put(chosen, q_index, -1),), ()


class _Compared:
    """The operands of a rank's kernels in one pass of `index_loss`.

    Attributes:
        kernels: of the call.
        operands: those of `SparseKernels.loss` before the scales.
    """

    def __init__(self, run: Run, given: Sequence[Any]) -> None:
        """given: the tensors of `index_loss`."""
        q_index, k_index, weights, lse, q, k, indices = given
        tables: SparseTables = run.tables.of_rate(run.call.rate)
        own = tables.q
        self.kernels = choose_sparse(q if q.dtype == torch.float64 else q_index, run.cp.backend)
        k_index, k = run.of(tables).gather(KEYS, tables.kv.take(k_index), tables.kv.take(k))
        rows = self.kernels.rows_of(own.take(indices)[:, None], tables.by_rows.visible)
        weights = own.take(weights).to(wide_dtype(q_index.dtype))
        of_attention = own.take(q), k, own.take_lse(lse).to(wide_dtype(q_index.dtype, lse.dtype)), rows
        self.operands = own.take(q_index), k_index, weights, *of_attention


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
        work = _Compared(run, tensors)
        found = work.kernels.loss(*work.operands, call.scale, call.softmax_scale)
        return (run.tables.q.put(found.to(wide_dtype(q_index.dtype)), q_index),), ()

    def backward(self, run: Run, tensors: Any, results: Any, hidden: Any, grads: Any) -> Any:
        """Gradients of the indexer's tensors."""
        (q_index, k_index, weights, *constants), (dloss,), call = tensors, grads, run.call
        work = _Compared(run, tensors)
        tables: SparseTables = run.tables.of_rate(call.rate)
        own, of_keys = tables.q, tables.kv
        dloss = own.take(dloss[..., None])[:, 0].to(work.operands[5].dtype)
        how = call.scale, call.softmax_scale, dloss, _deterministic(run.plan)
        dq, dk, dweights = work.kernels.loss_backward(*work.operands, *how)
        (dk,) = run.of(tables).give_back(KEYS, dk)
        dk = of_keys.put(dk.to(k_index.dtype), k_index)
        return own.put(dq, q_index), dk, own.put(dweights.to(weights.dtype), weights), *(None for _ in constants)


# ---- the functions


SELECTION, SPARSE, LOSS = registered(SelectionLayer()), registered(SparseLayer()), registered(LossLayer())
COMPRESSED = registered(CompressedLayer())
OPERATORS = (*(x.operator for x in (SELECTION, SPARSE, LOSS, COMPRESSED)),)  # whose results checkpointing saves

select_keys = public_function(sparse_calls.select_keys, called, SELECTION, __name__)
sparse_attention = public_function(sparse_calls.sparse_attention, called, SPARSE, __name__)
compressed_attention = public_function(compressed_calls.compressed_attention, called, COMPRESSED, __name__)
index_loss = public_function(sparse_calls.index_loss, called, LOSS, __name__)
