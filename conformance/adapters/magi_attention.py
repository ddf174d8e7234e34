"""MagiAttention (SandAI-org/MagiAttention) 1.1.1, by its public functions.

    suite                  MagiAttention
    a mask                 `magi_attn_varlen_key`; a window under a causal mask is (left, 0) without `causal`
    areas       `magi_attn_flex_key`
    p2p                    its one way to send K and V ("group cast")
    bshd                   `squash_batch_dim`

It places tokens itself. So the adapter gathers all rows before `dispatch`, and after `calc_attn` and `undispatch` every
rank takes its own rows, as `contiguous` has them.

    ffa (the module too)   its kernels; each is compiled for minutes at its first call
    bf16                   those of them that one build has
    sdpa                   plain PyTorch inside, in any dtype, "for testing"; without a GPU too (`install_on_cpu`)
    accepted               `sdpa`, and the gradient through the returned LSE

Its kernels are tested for head dims of 64 and 128. The adapter adds zeros up to 128, and for `sdpa` up to a power of
two, which its merge wants. Every call reads its settings from environment variables.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from conformance.adapters.peers import Peer, Sizes, SupportTable, Unsupported, library, no_gradient, of_all_ranks
from cp_ref.schedules.areas import Areas, areas_of_windows

__all__ = [
    "MagiRange",
    "Unsupported",
    "accepted",
    "attention",
    "bf16",
    "ffa",
    "group_kind",
    "install_on_cpu",
    "key_of",
    "magi_ranges",
    "sdpa",
    "supports",
]

# ---- without a GPU
#
# MagiAttention without a GPU: its planner, its messages over gloo, and its own backend of plain PyTorch.
#
# PyTorch replaces three Triton kernels: the gathering and the sum of ranges of rows, and the merge of two partial
# results. The current device is the CPU. All of it is for the whole process.


def install_on_cpu() -> bool:
    """Put the stand-ins into the library, where there is no GPU; whether that is so."""
    if torch.cuda.is_available():
        return False
    for function, module in _USED_IN.items():
        setattr(import_module(f"magi_attention.{module}"), function.__name__, function)
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_: 0)
    return True


def range_gather(input: torch.Tensor, ranges: torch.Tensor, dim: int = 0, output: Any = None, **_: Any) -> torch.Tensor:
    """The rows of ranges [n, 2], one after the other.

    >>> range_gather(torch.tensor([5, 6, 7, 8]), torch.tensor([[2, 4], [0, 1]])).tolist()
    [7, 8, 5]
    """
    rows = torch.cat([torch.arange(a, b) for a, b in ranges.tolist()] or [torch.empty(0, dtype=torch.long)])
    gathered = input.index_select(dim, rows)
    return gathered if output is None else output.copy_(gathered)


def range_reduce(
    input: torch.Tensor, output: torch.Tensor, input_ranges: torch.Tensor, output_ranges: torch.Tensor,
    reduce_op: str = "sum", **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Add each range of the input to one of the output, in place.

    >>> where = torch.tensor([[0, 2], [2, 3]]), torch.tensor([[1, 3], [1, 2]])
    >>> range_reduce(torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30]), *where).tolist()
    [10, 24, 32]
    """
    if reduce_op != "sum":
        raise NotImplementedError(f"reduce_op is {reduce_op!r}; what stands in for the kernel has sums alone")
    for (a, b), (c, d) in zip(input_ranges.tolist(), output_ranges.tolist(), strict=True):
        output[c:d] += input[a:b]
    return output


def correct_attn_out_lse(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor, inplace: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first partial result, merged with the second, in place: out [n, h, d], lse [n, h].

    >>> out, lse = torch.zeros(1, 1, 1), torch.zeros(1, 1)
    >>> [x.item() for x in correct_attn_out_lse(out, lse, out + 1, lse, inplace=True)] == [0.5, torch.tensor(2.0).log()]
    True
    """
    if not inplace:
        out1, lse1 = out1.clone(), lse1.clone()
    wide = torch.promote_types(lse1.dtype, torch.float32)
    parts = lse1.to(wide), lse2.to(wide)
    lse = torch.logaddexp(*parts)
    first, second = ((part - lse).exp().nan_to_num(0.0)[..., None] for part in parts)
    out1.copy_(first * out1 + second * out2)
    lse1.copy_(lse)
    return out1, lse1


_USED_IN = {
    range_gather: "comm.primitive.grpcoll.utils",
    range_reduce: "comm.primitive.grpcoll.utils",
    correct_attn_out_lse: "functional.dist_attn",
}


# ---- ranges
#
# Areas as MagiAttention has them: pairs of ranges, whose diagonals begin and end in their corners.


class MagiRange(NamedTuple):
    """Query rows, key rows, and "full", "causal" (aligned to the last row and key), "inv_causal" (to the first ones) or
    "bi_causal" (both).
    """

    q_range: tuple[int, int]
    k_range: tuple[int, int]
    mask_type: str


def magi_ranges(areas: Areas) -> list[MagiRange]:
    """The same visible pairs. An area is cut where an edge of its diagonal band meets a side of its rectangle: then
    each part's edge of the band goes through a corner, or hides nothing.

    >>> for part in magi_ranges(Areas.parse("area q[0:4] k[0:3] band 0:1")):
    ...     print(*part)
    (0, 2) (0, 3) bi_causal
    (2, 3) (2, 3) inv_causal
    """
    return [part for row in areas.rows() for part in _parts(*row)]


def _parts(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> list[MagiRange]:
    """Query row i sees keys from max(k0, i + lo) to min(k1, i + hi + 1)."""
    begin, end = max(q0, k0 - hi), min(q1, k1 - lo)  # the rows that see a key
    if begin >= end or k0 >= k1:
        return []
    cuts = sorted({begin, end, *(cut for cut in (k0 - lo, k1 - hi) if begin < cut < end)})
    found = []
    for a, b in pairwise(cuts):
        below, above = a + lo >= k0, b + hi <= k1
        keys = (a + lo if below else k0, b + hi if above else k1)
        found.append(MagiRange((a, b), keys, _TYPES[below, above]))
    return found


_TYPES = {
    (False, False): "full",
    (False, True): "causal",
    (True, False): "inv_causal",
    (True, True): "bi_causal",
}


_INSTALL = "https://github.com/SandAI-org/MagiAttention, tag v1.1.1"
_magi = library("magi_attention.api", _INSTALL)
_common = library("magi_attention.common", _INSTALL)
_DEVICES = ("cpu",) if install_on_cpu() else ("cuda",)

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
            return f"{self.supported.library}: no area: the ranges are empty"
        return super().why_not(cp, sizes, dtype, device, arguments)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cp: Any, areas: Any = None, **options: Any
    ) -> Any:
        """`cp_ref.attention` in its words, areas too."""
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
            found = areas_of_windows(tuple(map(tuple, areas.tolist())))
            key = key_of(found, mine.tokens, *sizes, mine.group)
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
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
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
        return torch.cat(of_all_ranks(x, group), dim=axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mine = grads[0].tensor_split(dist.get_world_size(ctx.group), dim=ctx.axis)[dist.get_rank(ctx.group)]
        return mine, None, None


def key_of(areas: Areas, tokens: int, heads_q: int, heads_kv: int, head_dim: int, group: Any) -> Any:
    """The library's plan of areas, by `magi_attn_flex_key`; with its default settings. Collective."""
    parts = magi_ranges(areas)
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
