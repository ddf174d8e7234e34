"""yunchang (feifeibear/long-context-attention, USP), PyPI 0.6.4, by `LongContextAttention`.

    suite                  yunchang
    p2p                    ring degree cp_size, Ulysses degree 1
    a2a                    ring degree 1, Ulysses degree cp_size
    a2a+p2p                both, Ulysses inside
    contiguous             ring_impl_type "basic"
    dual_chunk, p2p        ring_impl_type "zigzag"; causal

Objects: `fa` (AttnType.FA, the module itself too), `accepted` (also what its forward takes and says nothing about:
window and softcap across the ring), `torch_math` (AttnType.TORCH_MATH; it has no backward pass). Without the package
flash-attn its kernels are stood in for, see `flash_attn_shim`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from conformance.adapters import flash_attn_shim
from conformance.adapters.peers import Peer, SupportTable, Unsupported, library

__all__ = ["Unsupported", "accepted", "attention", "fa", "group_kind", "supports", "torch_math"]

with flash_attn_shim.stood_in():
    _usp = library("yunchang", "pip install yunchang==0.6.4")
    _globals = library("yunchang.globals", "pip install yunchang==0.6.4")
    _kernels = library("yunchang.kernels", "pip install yunchang==0.6.4")

_SUPPORTED = SupportTable(
    "yunchang",
    {
        "cp_comm_type": ("p2p", "a2a", "a2a+p2p"),
        "layout": ("contiguous", "dual_chunk"),
        "attn_mask_type": ("causal", "no_mask"),
        "dtype": ("bfloat16", "float16"),
        "heads": ("equal", "grouped"),
        "deterministic": ("no", "yes"),
    },
    {
        "cp_comm_type": "no gathering of K and V",
        "qkv_format": "LongContextAttention takes [b, s, h, d]",
        "dims": "FlashAttention 2 has one head dim",
        "window": "an argument that is passed to every block; of its meaning across the ring nothing is said",
        "softcap": "an argument of which nothing is said",
        "return_lse": "the result is the output alone",
    },
    (
        ({"layout": "dual_chunk", "attn_mask_type": "no_mask"}, "assert: zigzag ring is meaningless for causal=False"),
        ({"cp_comm_type": "a2a", "device": "cpu"}, "a ring of one rank sends to itself, which gloo cannot"),
        ({"layout": "dual_chunk", "cp_comm_type": "a2a"}, "zigzag parts are those of the ring"),
        ({"layout": "dual_chunk", "cp_comm_type": "a2a+p2p"}, "zigzag parts are those of the ring, cut again inside"),
    ),
)


class Yunchang(Peer):
    """`LongContextAttention` with one kind of kernel."""

    def __init__(self, supported: SupportTable, attn_type: str = "fa") -> None:
        self.supported, self._attn_type = supported, attn_type

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any, options: dict[str, Any]) -> torch.Tensor:
        """out."""
        groups = _globals.PROCESS_GROUP  # what `set_seq_parallel_pg` fills, for the whole world and no other
        alone = _alone()
        groups.ULYSSES_PG, groups.RING_PG = {
            "p2p": (alone, cp.group), "a2a": (cp.group, alone), "a2a+p2p": cp.group,
        }[cp.cp_comm_type]  # fmt: skip
        layer = _usp.LongContextAttention(
            ring_impl_type="basic" if cp.layout == "contiguous" else "zigzag",
            attn_type=_kernels.AttnType.from_string(self._attn_type),
        )
        causal = "causal" in options.get("attn_mask_type", "causal")
        left, right = options.get("window_size", (-1, -1))
        return layer(
            q, k, v, softmax_scale=options.get("softmax_scale"), causal=causal,
            window_size=(left, -1 if causal else right), softcap=options.get("softcap", 0.0),
            deterministic=bool(options.get("deterministic")),
        )  # fmt: skip


class TorchMath(Yunchang):
    """AttnType.TORCH_MATH, forward alone: "Not implemented backward for PyTorch attention types"."""

    supports: Any = None  # which cannot know whether a gradient is wanted

    def __init__(self) -> None:
        half = _SUPPORTED.having(dtype=("float64", "float32", "bfloat16", "float16"))
        super().__init__(replace(half, library="yunchang, TORCH_MATH"), "torch_math")

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any, options: dict[str, Any]) -> torch.Tensor:
        """out."""
        if any(x.requires_grad for x in (q, k, v)):
            raise Unsupported("yunchang, TORCH_MATH: no backward pass")
        return super().call(q, k, v, cp, options)


@cache
def _alone() -> Any:
    """A group of this process alone."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


fa = Yunchang(_SUPPORTED)
accepted = Yunchang(_SUPPORTED.having(window=("none", "left", "right", "both"), softcap=("none", "softcap")))
torch_math = TorchMath()
attention, supports = fa.attention, fa.supports
group_kind = Yunchang.group_kind
