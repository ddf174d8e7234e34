"""What stands in for MagiAttention where its adapter is tested: its public calls over gloo, by plain PyTorch.

As in the library, every rank has the whole tensors around `dispatch` and `undispatch`, a token's place is the library's
own, and rows are padded until they divide.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


@dataclass(frozen=True)
class Key:
    """A mask, bool [t, t], and where tokens are: from the last to the first."""

    seen: torch.Tensor
    group: Any

    @property
    def order(self) -> torch.Tensor:
        """The tokens [t, padding included], rank after rank."""
        ranks = dist.get_world_size(self.group)
        return torch.arange(-(-len(self.seen) // ranks) * ranks).flip(0)

    @property
    def mine(self) -> torch.Tensor:
        """This rank's tokens."""
        return self.order.tensor_split(dist.get_world_size(self.group))[dist.get_rank(self.group)]


class _Dispatch(torch.autograd.Function):
    """Its own rows of what every rank has; the whole gradient on every rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, key: Key) -> torch.Tensor:
        ctx.key = key
        return x[key.mine]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _gathered(grads[0], ctx.key.group)[ctx.key.order.argsort()], None


class _Gather(torch.autograd.Function):
    """All ranks' rows; the gradient is the sum of what every rank has of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total.tensor_split(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def magi_attn_varlen_key(
    cu_seqlens_q: Any, cu_seqlens_k: Any, num_heads_q: int, num_heads_kv: int, head_dim: int, pad_size: int,
    cp_group_or_mesh: Any, causal: bool, window_size: tuple[int, int],
) -> Key:  # fmt: skip
    """Documents; a window comes without `causal`."""
    assert not causal or window_size == (-1, -1)
    assert pad_size == 0
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    left, right = (-1, 0) if causal else window_size
    row = torch.arange(int(cu_seqlens_q[-1]))
    document = torch.bucketize(row, cu_seqlens_q[1:], right=True)
    ahead = row[None] - row[:, None]
    seen = document[:, None] == document[None]
    seen &= (ahead >= -left) if left >= 0 else seen
    seen &= (ahead <= right) if right >= 0 else seen
    return Key(seen, cp_group_or_mesh)


def magi_attn_flex_key(
    q_ranges: Any, k_ranges: Any, attn_mask_type: list[str], total_seqlen_q: int, total_seqlen_k: int,
    num_heads_q: int, num_heads_kv: int, head_dim: int, pad_size: int, cp_group_or_mesh: Any,
) -> Key:  # fmt: skip
    """Rectangles, each of a type; no pair is in two."""
    times = torch.zeros(total_seqlen_q, total_seqlen_k, dtype=torch.int32)
    for (q0, q1), (k0, k1), kind in zip(q_ranges, k_ranges, attn_mask_type, strict=True):
        q, k = torch.arange(q0, q1)[:, None], torch.arange(k0, k1)[None]
        behind, before = k - k1 <= q - q1, k - k0 >= q - q0
        every = torch.ones_like(behind)
        part = {"full": every, "causal": behind, "inv_causal": before, "bi_causal": behind & before}[kind]
        times[q0:q1, k0:k1] += part
    assert times.max() <= 1
    return Key(times.bool(), cp_group_or_mesh)


def dispatch(x: torch.Tensor, key: Key) -> torch.Tensor:
    """This rank's rows of [t, ...]."""
    return _Dispatch.apply(F.pad(x, [0, 0] * (x.dim() - 1) + [0, len(key.order) - len(x)]), key)


def undispatch(x: torch.Tensor, key: Key, is_partial_grad: bool) -> torch.Tensor:
    """All rows; the gradients of all ranks add up."""
    assert is_partial_grad
    return _Gather.apply(x, key.group)[key.order.argsort()][: len(key.seen)]


def calc_attn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: Key, sink: torch.Tensor | None, softmax_scale: float,
    softcap: float, return_max_logits: bool,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """(out [rows, h, d], lse [rows, h] and max_logits [h])."""
    assert sink is None
    assert softcap == 0.0
    order = key.order
    seen = F.pad(key.seen, [0, len(order) - len(key.seen)] * 2)[key.mine][:, order]
    k, v = (_Gather.apply(x, key.group).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (softmax_scale * torch.einsum("nhd,mhd->hnm", q, k)).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    highest = scores.detach().amax((1, 2)).float() if q.dtype != torch.float64 else scores.detach().amax((1, 2))
    if return_max_logits:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=key.group)
    return torch.einsum("hnm,mhd->nhd", weights, v), SimpleNamespace(lse=lse.t(), max_logits=highest)


@contextmanager
def _stood_in() -> Iterator[None]:
    """The library's modules in `sys.modules`, while its adapter is loaded. Nothing of either stays there."""
    api, common = ModuleType("magi_attention.api"), ModuleType("magi_attention.common")
    functions = magi_attn_varlen_key, magi_attn_flex_key, dispatch, undispatch, calc_attn
    for function in functions:
        setattr(api, function.__name__, function)
    api.squash_batch_dim = lambda x: x.flatten(0, 1)  # type: ignore[attr-defined]
    common.AttnRanges = SimpleNamespace(from_ranges=list)  # type: ignore[attr-defined]
    others = ("magi_attention", "magi_attention.comm.primitive.grpcoll.utils", "magi_attention.functional.dist_attn")
    modules = {name: ModuleType(name) for name in others} | {api.__name__: api, common.__name__: common}
    sys.modules |= modules
    yield
    for name in (*modules, "conformance.adapters.magi_attention"):
        del sys.modules[name]


with _stood_in():
    adapter = import_module("conformance.adapters.magi_attention")

adapter.sdpa.supported = adapter.sdpa.supported.having(dtype=("float64", "float32"))
sdpa = adapter.sdpa
