"""The interface of what computes attention over chosen keys on one rank, and the choice of it.

A rank's gathered keys are its own rows and those that arrive, sorted by row of the global buffer. So a run of visible
positions of a document is a run of rows in this buffer.

legend   n = own query rows, m = rows of gathered keys, s = intervals of a query row, top_k = indices of a query row,
         g = 1, or the kv heads of keys: sets of indices of a query row
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol, cast

import torch

from cp_fast.kernels.this_gpu import on_triton

__all__ = ["Runs", "SparseKernels", "Visible", "choose_sparse", "shared_storage"]


class Visible(NamedTuple):
    """The keys that each query row may see: s intervals, disjoint, in ascending order. Position p of the row's document
    is visible iff `positions <= p < positions + stops - starts` in one of them; its row is `starts + p - positions`.

    A causal document has one interval a row, which begins at position 0:

    >>> causal = Visible(*(torch.tensor([rows]).T for rows in ([4, 4, 4], [5, 6, 7], [0, 0, 0])))
    >>> causal.rows(torch.tensor([[2], [2], [2]])).tolist()   # of each row, position 2
    [[-1], [-1], [6]]
    """

    starts: torch.Tensor  # int32 [n, s]: the first row of gathered keys
    stops: torch.Tensor  # int32 [n, s]: behind the last; equal to starts for none
    positions: torch.Tensor  # int32 [n, s]: the position of the row `starts` in its document

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """The row of gathered keys of each position [n, ...], int32; -1 for a hidden one."""
        found = torch.full_like(positions, -1, dtype=torch.int32)
        for start, stop, first in zip(*(column.unbind(1) for column in self), strict=True):
            shape = (-1,) + (1,) * (positions.ndim - 1)
            start, stop, first = start.view(shape), stop.view(shape), first.view(shape)
            seen = (positions >= first) & (positions < first + (stop - start))
            found = torch.where(seen, (start + (positions - first)).int(), found)
        return found


class Runs(NamedTuple):
    """The keys that each query row reads besides those of its list: s intervals of gathered rows, disjoint.

    >>> runs = Runs(*(torch.tensor([rows]).T for rows in ([4, 4], [4, 6])), longest=2)
    >>> runs.listed(torch.tensor([[[9]], [[-1]]], dtype=torch.int32)).tolist()   # row 0 has none
    [[[-1, -1, 9]], [[4, 5, -1]]]
    """

    starts: torch.Tensor  # int32 [n, s]: the first row
    stops: torch.Tensor  # int32 [n, s]: behind the last; equal to starts for none
    longest: int  # the most that a query row has in all of them; known to the host

    def of(self, block: slice) -> Runs:
        """Those of some query rows."""
        return Runs(self.starts[block], self.stops[block], self.longest)

    def listed(self, rows: torch.Tensor) -> torch.Tensor:
        """All keys as lists: those of the runs, one run after the other, then `rows` [n, g, top_k]; -1 for none."""
        place = torch.arange(self.longest, dtype=torch.int32, device=rows.device).expand(len(rows), -1)
        found = torch.full_like(place, -1)
        for start, stop in zip(self.starts[:, :, None].unbind(1), self.stops[:, :, None].unbind(1), strict=True):
            found = torch.where((place >= 0) & (place < stop - start), start + place, found)
            place = place - (stop - start)
        return torch.cat([found[:, None].expand(-1, rows.shape[1], -1).to(rows.dtype), rows], dim=-1)


def shared_storage(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether v is `k[..., : v.shape[-1]]`, in the same memory.

    >>> k = torch.zeros(3, 1, 24)
    >>> shared_storage(k, k[..., :16]), shared_storage(k, k[..., 8:]), shared_storage(k, torch.zeros(3, 1, 16))
    (True, False, False)
    """
    if v.dtype != k.dtype or v.shape[:-1] != k.shape[:-1] or v.shape[-1:] > k.shape[-1:]:
        return False
    strides = zip(v.shape, v.stride(), k.stride(), strict=True)
    return v.data_ptr() == k.data_ptr() and all(one == other for size, one, other in strides if size > 1)


class SparseKernels(Protocol):
    """Rows of tensors may have strides, the last axis is contiguous. v may be a view of k, `k[..., :d_v]`: neither is
    copied. Sums are in float32, or in float64 for float64.
    """

    def select(
        self,
        q_index: torch.Tensor,
        k_index: torch.Tensor,
        weights: torch.Tensor,
        visible: Visible,
        top_k: int,
        scale: float,
    ) -> torch.Tensor:
        """The positions of the visible keys with the largest scores, int32 [n, top_k]: best first, of equal ones the
        lower position first, -1 behind the last.

        A score has one order of operations for all shapes. Products of float32 are added over d_i by halves (of d_i
        rounded up to a power of two). Then relu(scale * dot) times the weight is added over the heads 0, 1, 2, ...

        Args:
            q_index: [n, h_i, d_i].
            k_index: [m, d_i].
            weights: [n, h_i], float32 or float64.
            scale: of dot products.
        """
        ...

    def rows_of(self, indices: torch.Tensor, visible: Visible) -> torch.Tensor:
        """The rows of gathered keys of the positions in `indices` [n, g, top_k], int32 of the same shape, in any order;
        -1 for those that are hidden, beyond the document, negative, or there before.
        """
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None,
        *,
        runs: Runs | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of each query row over its own rows of keys: out [n, h_q, d_v] in q's dtype, and lse [n, h_q],
        float32 or float64, the sink included. A row without keys has out 0 and lse -inf, or the sink.

        Args:
            q: [n, h_q, d_qk].
            k: [m, h_kv, d_qk].
            v: [m, h_kv, d_v].
            rows: int32 [n, g, top_k], those of `rows_of`; top_k may be 0.
            scale: of scores.
            sink: the sinks' logits [h_q], in lse's dtype; None without sinks.
            runs: further keys of each query row, none of which is in `rows`.
        """
        ...

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        scale: float,
        deterministic: bool,
        *,
        one_sum: bool = False,
        runs: Runs | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The gradients dq in q's dtype, dk and dv in lse's, given the forward pass's results and their gradients.

        Args:
            dout: [n, h_q, d_v]; of a row without keys dout and dlse may be anything, and reach nothing.
            dlse: [n, h_q], in lse's dtype; None for zero.
            deterministic: whether gradients of keys are added in a fixed order.
            runs: as in `forward`.
            one_sum: where v is a view of k, dk has the gradient of v too, in its first columns, and dv is None.
        """
        ...

    def loss(
        self,
        q_index: torch.Tensor,
        k_index: torch.Tensor,
        weights: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        lse: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        softmax_scale: float,
    ) -> torch.Tensor:
        """The divergence of each row [n], in lse's dtype: KL(p || softmax of the indexer's scores), over its chosen
        keys. p is exp(softmax_scale * q.k - lse), added over the query heads and normalised over these keys. 0 where a
        row has none.

        Args:
            q_index, k_index, weights, scale: as in `select`.
            q, k, rows, softmax_scale: as in `forward`, rows with g = 1.
            lse: [n, h_q].
        """
        ...

    def loss_backward(
        self,
        q_index: torch.Tensor,
        k_index: torch.Tensor,
        weights: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        lse: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        softmax_scale: float,
        dloss: torch.Tensor,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q_index in its dtype, and of k_index and weights in lse's, given dloss [n]."""
        ...


_TORCH, _TRITON = "cp_fast.kernels.sparse.torch_sparse", "cp_fast.kernels.sparse.triton_sparse.triton_kernels"


def choose_sparse(x: torch.Tensor, backend: str) -> SparseKernels:
    """Triton on NVIDIA GPUs from Ampere on, for the dtypes that its module lists in `DTYPES`. Other dtypes and devices,
    and `ContextParallel.backend` "torch" or "cpu", take plain PyTorch.

    x: a tensor of the call: its device and dtype decide.
    """
    if x.device.type == "cuda" and backend not in ("torch", "cpu") and on_triton("sparse attention"):
        kernels: Any = importlib.import_module(_TRITON)
        if x.dtype in kernels.DTYPES:
            return cast(SparseKernels, kernels)
    return cast(SparseKernels, importlib.import_module(_TORCH))
