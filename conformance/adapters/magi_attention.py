"""MagiAttention (SandAI-org/MagiAttention) 1.1.1, by its public functions.

    suite                  MagiAttention
    a mask                 `magi_attn_varlen_key`; a window under a causal mask is (left, 0) without `causal`
    attention slices       `magi_attn_flex_key`
    p2p                    its one way to send K and V ("group cast")
    bshd                   `squash_batch_dim`

It places tokens itself. So the adapter gathers all rows before `dispatch`, and after `calc_attn` and `undispatch` every
rank takes its own rows, as `contiguous` has them.

    ffa (the module too)   its kernels; each is compiled for minutes at its first call
    bf16                   those of them that one build has
    sdpa                   plain PyTorch inside, in any dtype, "for testing"; without a GPU too (`magi_on_cpu`)
    accepted               `sdpa`, and the gradient through the returned LSE

Its kernels are tested for head dims of 64 and 128. The adapter adds zeros up to 128, and for `sdpa` up to a power of
two, which its merge wants. Every call reads its settings from environment variables.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from conformance.adapters.shared import magi_on_cpu
from conformance.adapters.shared.magi_ranges import magi_ranges
from conformance.adapters.shared.peer_adapter import Peer, Sizes, no_gradient, number_of_ranks, rank_in
from conformance.adapters.shared.support_tables import SupportTable, Unsupported, library
from cp_ref.schedules.attention_slices import AttentionSlices, areas_of_rows

__all__ = ["Unsupported", "accepted", "attention", "bf16", "ffa", "group_kind", "key_of", "sdpa", "supports"]

_INSTALL = "https://github.com/SandAI-org/MagiAttention, tag v1.1.1"
_magi = library("magi_attention.api", _INSTALL)
_common = library("magi_attention.common", _INSTALL)
_DEVICES = ("cpu",) if magi_on_cpu.install() else ("cuda",)

_FFA = SupportTable(
    "MagiAttention, FFA",
    {
        "qkv_format": ("bshd", "thd"),
        "attn_mask_type": ("causal", "no_mask"),
        "dtype": ("bfloat16", "float16"),
        "window": ("none", "left", "both", "right"),
        "areas": ("none", "some"),
        "softmax_type": ("vanilla", "learnable"),
        "softcap": ("none", "softcap"),
        "heads": ("equal", "grouped"),
        "sequences": ("one", "many"),
        "remainder": ("none", "some"),
        "deterministic": ("no", "yes"),
        "return_lse": ("no", "yes"),
        "return_max_logit": ("no", "yes"),
        "device": ("cuda",),
    },
    {
        "cp_comm_type": "it has one way to send K and V",
        "layout": "it places tokens itself",
        "dims": "k and v have one head dim",
        "head_dim": "head_dim must be <= 128, and its tests have 64 and 128",
        "lengths": "We only support self-attention now",
        "padding": "cu_seqlens alone, without padding",
        "softmax_type": "a learnable sink alone",
        "sequences": "its planner needs a query and a key",
        "device": "its kernels are those of a GPU",
    },
    (({"qkv_format": "bshd", "remainder": "some"}, "a sequence that does not divide has no place in a bshd tensor"),),
)
_BF16 = replace(
    _FFA.having(dtype=("bfloat16",), softcap=("none",), deterministic=("no",), return_max_logit=("no",)),
    library="MagiAttention, FFA for bfloat16",
    because={
        **_FFA.because,
        **dict.fromkeys(("dtype", "softcap", "deterministic", "return_max_logit"), "the build has no kernel for it"),
    },
)
_SDPA = replace(
    _FFA.having(
        dtype=("float64", "float32", "bfloat16", "float16"), softcap=("none",), softmax_type=("vanilla",),
        device=_DEVICES,
    ),
    library="MagiAttention, SDPA",
    because={**_FFA.because, "softcap": "non-zero softcap is not supported by now"},
)  # fmt: skip
_WIDEST = 128  # head dim


class MagiAttention(Peer):
    """One of its kernel backends, "ffa" or "sdpa"."""

    def __init__(self, supported: SupportTable, backend: str, *, lse_gradient: bool = False) -> None:
        self.supported, self._backend, self._lse_gradient = supported, backend, lse_gradient

    def sizes_refused(self, cp: Any, heads_q: int, heads_kv: int, d_qk: int, d_v: int) -> str:
        """Head dims that its kernels do not have."""
        return f"head dim {max(d_qk, d_v)}: head_dim must be <= {_WIDEST}" if max(d_qk, d_v) > _WIDEST else ""

    def why_not(self, cp: Any, sizes: Sizes, dtype: torch.dtype, device: torch.device, arguments: Any) -> str:
        """As its table, and a batch that its planner has no chunks for."""
        cu, areas = arguments.get("cu_seqlens_q"), arguments.get("areas")
        tokens = arguments.get("seqlen_q") if cu is None else int(cu[-1])
        if tokens is not None and tokens < cp.size:
            return f"{self.supported.library}: {tokens} tokens: the number of chunks must be >= cp_size"
        if areas is not None and not len(areas):
            return f"{self.supported.library}: no attention slice: the ranges are empty"
        return super().why_not(cp, sizes, dtype, device, arguments)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cp: Any, areas: Any = None, **options: Any
    ) -> Any:
        """`cp_ref.attention` in its words, attention slices too."""
        return super().attention(q, k, v, cp=cp, **options, **({} if areas is None else {"areas": areas}))

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any, options: dict[str, Any]) -> Any:
        """out, or (out, lse, max_logit), of which those that were not asked for are left out."""
        os.environ["MAGI_ATTENTION_KERNEL_BACKEND"] = self._backend
        os.environ["MAGI_ATTENTION_DETERMINISTIC_MODE"] = str(int(bool(options.get("deterministic"))))
        mine = _OwnRows(q.shape, cp.group, options)
        sizes = q.shape[-2], k.shape[-2], self._head_dim(q)
        if (areas := options.get("areas")) is None:
            key = _varlen_key(mine, *sizes, options)
        else:
            slices = areas_of_rows(tuple(map(tuple, areas.tolist())))
            key = key_of(slices, mine.tokens, *sizes, mine.group)
        wide = (F.pad(x, (0, self._head_dim(x) - x.shape[-1])) for x in (q, k, v))
        sink = options["softmax_offset"][None].float() if options.get("softmax_type") == "learnable" else None
        scale = options.get("softmax_scale")
        out, meta = _magi.calc_attn(
            *(_magi.dispatch(mine.of_all(x), key) for x in wide),
            key,
            sink=sink,
            softmax_scale=q.shape[-1] ** -0.5 if scale is None else scale,
            softcap=options.get("softcap", 0.0),
            return_max_logits=bool(options.get("return_max_logit")),
        )
        results = [mine.own(_magi.undispatch(out[..., : v.shape[-1]].contiguous(), key, is_partial_grad=True), 0.0)]
        if options.get("return_lse"):
            lse = meta.lse if self._lse_gradient else no_gradient(meta.lse, f"{self.supported.library}: through lse")
            rows = mine.own(_magi.undispatch(lse, key, is_partial_grad=True), -torch.inf)
            results.append(rows.transpose(-1, -2))
        if options.get("return_max_logit"):
            results.append(meta.max_logits)
        return results[0] if len(results) == 1 else tuple(results)

    def _head_dim(self, x: torch.Tensor) -> int:
        return _WIDEST if self._backend == "ffa" else 1 << (x.shape[-1] - 1).bit_length()


class _OwnRows:
    """Which rows of the whole batch, [t, h, d] without a tail, are in a rank's slice."""

    def __init__(self, shape: torch.Size, group: Any, options: dict[str, Any]) -> None:
        self.group, self.rank, self.ranks = group, rank_in(group), number_of_ranks(group)
        self.batch = shape[0] if options.get("qkv_format", "bshd") == "bshd" else None
        self.slice_rows = shape[0 if self.batch is None else 1]
        self.rows = self.slice_rows * self.ranks  # of a sequence of bshd
        self.tokens = self.rows * self.batch if self.batch is not None else int(options["cu_seqlens_q"][-1])
        self.part = -(-self.tokens // self.ranks)  # of each rank in thd; its part of a tail is behind them

    def of_all(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' rows [t, h, d] of slices."""
        if self.batch is not None:
            return _magi.squash_batch_dim(_Replicated.apply(x, self.group, 1))
        return _Replicated.apply(x[: self.part], self.group, 0)[: self.tokens]

    def own(self, x: torch.Tensor, empty: float) -> torch.Tensor:
        """This rank's rows of [t, h, d] or [t, h]; those of a tail are `empty`."""
        if self.batch is not None:
            begin = self.rank * self.slice_rows
            return x.unflatten(0, (self.batch, self.rows))[:, begin : begin + self.slice_rows]
        rows = x[self.rank * self.part : (self.rank + 1) * self.part]
        after = [0, 0] * (x.dim() - 1) + [0, self.slice_rows - len(rows)]
        return F.pad(rows, after, value=empty)


class _Replicated(torch.autograd.Function):
    """All ranks' slices, one after the other. The calls that follow give every rank the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, axis: int) -> torch.Tensor:
        ctx.group, ctx.axis = group, axis
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(number_of_ranks(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mine = grads[0].tensor_split(number_of_ranks(ctx.group), dim=ctx.axis)[rank_in(ctx.group)]
        return mine, None, None


def key_of(slices: AttentionSlices, tokens: int, heads_q: int, heads_kv: int, head_dim: int, group: Any) -> Any:
    """The library's plan of attention slices, by `magi_attn_flex_key`; with its default settings. Collective."""
    parts = magi_ranges(slices)
    return _magi.magi_attn_flex_key(
        q_ranges=_common.AttnRanges.from_ranges([part.q_range for part in parts]),
        k_ranges=_common.AttnRanges.from_ranges([part.k_range for part in parts]),
        attn_mask_type=[part.mask_type for part in parts],
        total_seqlen_q=tokens,
        total_seqlen_k=tokens,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        pad_size=0,
        cp_group_or_mesh=group,
    )


def _varlen_key(mine: _OwnRows, heads_q: int, heads_kv: int, head_dim: int, options: dict[str, Any]) -> Any:
    cu = options.get("cu_seqlens_q")
    if mine.batch is not None:
        cu = torch.arange(mine.batch + 1, dtype=torch.int32) * mine.rows
    causal = "causal" in options.get("attn_mask_type", "causal")
    left, right = options.get("window_size", (-1, -1))
    if causal:  # the suite's right side means nothing then, and the library's windows come without `causal`
        right = 0 if left >= 0 else -1
    return _magi.magi_attn_varlen_key(
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        pad_size=0,
        cp_group_or_mesh=mine.group,
        causal=causal and left < 0,
        window_size=(left, right),
    )


ffa, bf16, sdpa = MagiAttention(_FFA, "ffa"), MagiAttention(_BF16, "ffa"), MagiAttention(_SDPA, "sdpa")
accepted = MagiAttention(_SDPA, "sdpa", lse_gradient=True)
attention, supports = ffa.attention, ffa.supports
group_kind = MagiAttention.group_kind
