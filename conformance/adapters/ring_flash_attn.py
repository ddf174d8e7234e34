"""ring-flash-attention (zhuzilin/ring-flash-attention, PyPI ring-flash-attn 0.1.8), by its public functions.

    suite                             library                                 heads, mask
    bshd, p2p, contiguous             ring_flash_attn_func                    causal or not
    bshd, p2p, dual_chunk             zigzag_ring_flash_attn_func             causal
    thd, p2p, contiguous              ring_flash_attn_varlen_func             causal or not; one sequence, see below
    thd, p2p, dual_chunk              zigzag_ring_flash_attn_varlen_func      causal
    thd, all_gather, contiguous       llama3_flash_attn_varlen_func           causal or not
    bshd, p2p, contiguous: `stripe`   stripe_flash_attn_func                  causal; rows are exchanged around the call

`ring_flash_attn_varlen_func` cuts every sequence in cp_size parts. The suite has no such layout, but with one sequence
it is `contiguous`.

Objects: `documented` (the default: `attention` and the rest of this module), `accepted` (also what the signatures take
without an error: windows, which the README lists as not supported; other lengths of K; a gradient through the returned
LSE), `stripe`. Without the package flash-attn its kernels are stood in for, see `flash_attn_shim`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from conformance.adapters import flash_attn_shim
from conformance.adapters.peers import Peer, SupportTable, Unsupported, library, no_gradient, of_all_ranks

__all__ = ["Unsupported", "accepted", "attention", "documented", "group_kind", "stripe", "supports"]

with flash_attn_shim.stood_in():
    _rfa = library("ring_flash_attn", "pip install ring-flash-attn==0.1.8")

_DOCUMENTED = SupportTable(
    "ring-flash-attn",
    {
        "cp_comm_type": ("p2p", "all_gather"),
        "layout": ("contiguous", "dual_chunk"),
        "qkv_format": ("bshd", "thd"),
        "attn_mask_type": ("causal", "no_mask"),
        "dtype": ("bfloat16", "float16"),
        "heads": ("equal", "grouped"),
        "sequences": ("one", "many"),
        "deterministic": ("no", "yes"),
        "return_lse": ("no", "yes"),
    },
    {
        "window": "README, Known Limitations: window_size is not supported",
        "dtype": "FlashAttention has float16 and bfloat16",
        "dims": "FlashAttention 2 has one head dim",
        "head_dim": "its private functions take multiples of 8",
        "padding": "one cu_seqlens, without padding",
        "sequences": "max_seqlen of no sequence is no number",
        "lengths": "one cu_seqlens; of K with another length nothing is said",
        "softmax_type": "no sinks",
    },
    (
        ({"layout": "dual_chunk", "attn_mask_type": "no_mask"}, "assert: zigzag ring is meaningless for causal=False"),
        ({"cp_comm_type": "all_gather", "layout": "dual_chunk"}, "llama3 has contiguous parts"),
        ({"cp_comm_type": "all_gather", "qkv_format": "bshd"}, "llama3 is a varlen function"),
        (
            {"cp_comm_type": "p2p", "layout": "contiguous", "qkv_format": "thd", "sequences": "many"},
            "it cuts every sequence, and not the whole buffer",
        ),
    ),
)


class RingFlashAttn(Peer):
    """The functions of the table above."""

    supported = _DOCUMENTED
    lse_gradient = False

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any, options: dict[str, Any]) -> Any:
        """out, or (out, lse)."""
        causal = "causal" in options.get("attn_mask_type", "causal")
        left, right = options.get("window_size", (-1, -1))
        common = {
            "softmax_scale": options.get("softmax_scale"),
            "causal": causal,
            "window_size": (left, -1 if causal else right),  # under a causal mask the suite's right side means nothing
            "deterministic": bool(options.get("deterministic")),
            "return_attn_probs": bool(options.get("return_lse")),
            "group": cp.group,
        }
        if options.get("qkv_format", "bshd") == "bshd":
            function = _rfa.ring_flash_attn_func if cp.layout == "contiguous" else _rfa.zigzag_ring_flash_attn_func
            return self._results(function(q, k, v, **common), options)
        return self._packed(q, k, v, cp, options, common)

    def _packed(self, q: Any, k: Any, v: Any, cp: Any, options: dict[str, Any], common: dict[str, Any]) -> Any:
        """The library takes no tail after the last sequence: the adapter removes it, and adds it again."""
        ranks, cu = dist.get_world_size(cp.group), options["cu_seqlens_q"]
        rows = int(cu[-1]) // ranks
        tail = len(q) - rows
        q, k, v = (x[:rows] for x in (q, k, v))
        if cp.cp_comm_type == "all_gather":
            prepared = _rfa.llama3_flash_attn_prepare_cu_seqlens(cu, common["causal"], dist.get_rank(cp.group), ranks)
            cu_q, cu_k, max_q, max_k, part = prepared
            results = _rfa.llama3_flash_attn_varlen_func(
                q, k, v, cu_q, cu_k, max_q, max_k, heads_k_stride=1, local_k_slice=part, **common
            )
        else:
            zigzag = cp.layout == "dual_chunk"
            function = _rfa.zigzag_ring_flash_attn_varlen_func if zigzag else _rfa.ring_flash_attn_varlen_func
            local = cu // ranks
            results = function(q, k, v, local, int((local[1:] - local[:-1]).max()), **common)
        if not tail:
            return self._results(results, options)
        out, *rest = results if isinstance(results, tuple) else (results,)
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, tail))
        if rest:
            rest[0] = torch.nn.functional.pad(rest[0], (0, tail), value=-torch.inf)
        return self._results((out, *rest) if rest else out, options)

    def _results(self, results: Any, options: dict[str, Any]) -> Any:
        if not options.get("return_lse"):
            return results
        out, lse = results[:2]
        return out, lse if self.lse_gradient else no_gradient(lse, "ring-flash-attn: no gradient through lse")


class Accepted(RingFlashAttn):
    """Also what the functions take without an error, though the documentation does not offer it.

    With other lengths of K a causal mask means another one: FlashAttention aligns it to the last query and key.
    """

    supported = replace(
        _DOCUMENTED.having(window=("none", "left", "right", "both"), lengths=("self", "cross")),
        incompatible=(
            *_DOCUMENTED.incompatible,
            ({"lengths": "cross", "attn_mask_type": "causal"}, "FlashAttention's causal is bottom-right"),
            ({"lengths": "cross", "qkv_format": "thd"}, "one cu_seqlens"),
        ),
    )
    lse_gradient = True


class Stripe(RingFlashAttn):
    """`stripe_flash_attn_func`: rank r has the rows r, r + cp_size, ..."""

    supported = _DOCUMENTED.having(
        cp_comm_type=("p2p",), layout=("contiguous",), qkv_format=("bshd",), attn_mask_type=("causal",),
        return_lse=("no",),
    )  # fmt: skip

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any, options: dict[str, Any]) -> Any:
        """out."""
        ranks, rank = dist.get_world_size(cp.group), dist.get_rank(cp.group)
        total = q.shape[1] * ranks
        striped = [torch.arange(total, device=q.device)[r::ranks] for r in range(ranks)]
        q, k, v = (_everyone(x, cp.group)[:, striped[rank]] for x in (q, k, v))
        out = _rfa.stripe_flash_attn_func(
            q, k, v, softmax_scale=options.get("softmax_scale"), causal=True, group=cp.group,
            deterministic=bool(options.get("deterministic")),
        )  # fmt: skip
        order = torch.cat(striped).argsort()
        return _everyone(out, cp.group)[:, order].tensor_split(ranks, dim=1)[rank]


def _everyone(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All ranks' rows, rank after rank, along axis 1."""
    return torch.cat(_AllGather.apply(x, group), dim=1)


class _AllGather(torch.autograd.Function):
    """PyTorch's differentiable one takes gradients for contiguous, whatever they are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> Any:
        ctx.group = group
        return tuple(of_all_ranks(x, group))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        wide = torch.stack([grad.float() for grad in grads])
        dist.all_reduce(wide, group=ctx.group)
        return wide[dist.get_rank(ctx.group)].to(grads[0].dtype), None


documented, accepted, stripe = RingFlashAttn(), Accepted(), Stripe()
attention, supports = documented.attention, documented.supports
group_kind = RingFlashAttn.group_kind
