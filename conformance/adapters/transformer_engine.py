"""TransformerEngine's PyTorch attention: `DotProductAttention` with `set_context_parallel_group`.

Written from its public interface and its support matrix as of 2.20. Objects: `fused` (FusedAttention, cuDNN; the module
itself too) and `flash` (FlashAttention); each switches the other off by the library's environment variables, before its
first call.

    suite                        TransformerEngine
    cp_comm_type                 the same word; "a2a+p2p" with [a2a_group, p2p_group]
    dual_chunk                   the only layout
    cu_seqlens_*_padded          cu_seqlens_*_padded, and pad_between_seqs
    window (-1, -1) causal       window_size (-1, 0)
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from conformance.adapters.peers import Peer, SupportTable, Unsupported, library

__all__ = ["Unsupported", "attention", "flash", "fused", "group_kind", "softmax_offset_grad"]

_te = library("transformer_engine.pytorch", "pip install --no-build-isolation transformer_engine[pytorch]")

_FUSED = SupportTable(
    "TransformerEngine, FusedAttention",
    {
        "cp_comm_type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
        "layout": ("dual_chunk",),
        "qkv_format": ("bshd", "sbhd", "thd"),
        "attn_mask_type": ("causal", "no_mask"),
        "dtype": ("bfloat16", "float16"),
        "window": ("none", "left", "both", "right"),
        "softmax_type": ("vanilla", "off-by-one", "learnable"),
        "heads": ("equal", "grouped"),
        "dims": ("equal", "unequal"),
        "lengths": ("self", "cross"),
        "sequences": ("one", "many"),
        "padding": ("none", "padding"),
        "deterministic": ("no", "yes"),
        "device": ("cuda",),
    },
    {
        "attn_mask_type": "padding masks need thd, and bottom-right masks have no backend under context parallelism",
        "layout": "tokens are in 2 * cp_size chunks; without load balancing all_gather alone, and thd alone",
        "return_lse": "the result is the output alone",
        "return_max_logit": "of the constructor; not mapped",
    },
    (
        *(
            ({"cp_comm_type": comm, "window": window}, "does not support sliding window attention")
            for comm in ("p2p", "a2a+p2p")
            for window in ("left", "both", "right")
        ),
        *(
            ({"cp_comm_type": comm, "softmax_type": sink}, "sinks need cp_comm_type a2a")
            for comm in ("p2p", "all_gather", "a2a+p2p")
            for sink in ("off-by-one", "learnable")
        ),
        ({"attn_mask_type": "causal", "lengths": "cross"}, "causal needs equal lengths under context parallelism"),
    ),
)
_FLASH = replace(_FUSED, library="TransformerEngine, FlashAttention").having(
    softmax_type=("vanilla",), padding=("none", "padding")
)
_SWITCHES = {"NVTE_FUSED_ATTN": "fused", "NVTE_FLASH_ATTN": "flash", "NVTE_UNFUSED_ATTN": ""}


class TransformerEngine(Peer):
    """One of its two backends."""

    supports: Any = None  # which cannot know whether a backend is left: the library says so at the call
    softmax_offset_grad = "total"  # a2a, which alone has sinks, gathers it over the heads of all ranks

    def __init__(self, supported: SupportTable, backend: str) -> None:
        self.supported, self._backend = supported, backend

    def sizes_refused(self, cp: Any, heads_q: int, heads_kv: int, d_qk: int, d_v: int) -> str:
        """Heads that a2a does not divide."""
        ranks = {"a2a": cp.size, "a2a+p2p": getattr(cp, "a2a_size", 1)}.get(cp.cp_comm_type, 1)
        if heads_q % ranks or heads_kv % ranks:
            return f"{cp.cp_comm_type} with {heads_q} heads over {heads_kv}: heads must divide by the ranks"
        return ""

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any, options: dict[str, Any]) -> torch.Tensor:
        """out."""
        for variable, backend in _SWITCHES.items():
            os.environ[variable] = str(int(backend == self._backend))
        fmt, mask = options.get("qkv_format", "bshd"), options.get("attn_mask_type", "causal")
        sizes = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
        kind = options.get("softmax_type", "vanilla")
        layer = _layer(sizes, options.get("softmax_scale"), kind, fmt, bool(options.get("deterministic")))
        if kind == "learnable":
            layer.softmax_offset = options["softmax_offset"]
        layer.set_context_parallel_group(_groups(cp.group), _ranks(cp.group), _stream(), cp.cp_comm_type)
        left, right = options.get("window_size", (-1, -1))
        lengths: dict[str, Any] = {}
        if fmt == "thd":
            mask = mask if mask.startswith("padding") else "padding_causal" if mask == "causal" else "padding"
            lengths = _lengths(options)
        window = (left, 0 if "causal" in mask else right)
        try:
            out = layer(q, k, v, qkv_format=fmt, attn_mask_type=mask, window_size=window, **lengths)
        except ValueError as error:
            if "No dot product attention backend is available" in str(error):
                raise Unsupported(f"{self.supported.library}: {error}") from error
            raise
        return out.unflatten(-1, (sizes[0], sizes[3]))


@cache
def _layer(sizes: tuple[int, int, int, int], scale: float | None, softmax_type: str, fmt: str, same_bits: bool) -> Any:
    heads_q, heads_kv, d_qk, d_v = sizes
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = str(int(not same_bits))
    layer = _te.DotProductAttention(
        heads_q, (d_qk, d_v), num_gqa_groups=heads_kv, attention_dropout=0.0, qkv_format=fmt, softmax_scale=scale,
        softmax_type=softmax_type,
    )  # fmt: skip
    layer._parameters.pop("softmax_offset", None)  # a tensor takes the parameter's place at every call
    return layer


def _lengths(options: dict[str, Any]) -> dict[str, Any]:
    cu_q = options["cu_seqlens_q"]
    cu_kv = options.get("cu_seqlens_kv")
    cu_kv = cu_q if cu_kv is None else cu_kv
    padded_q, padded_kv = options.get("cu_seqlens_q_padded"), options.get("cu_seqlens_kv_padded")
    padded_q = cu_q if padded_q is None else padded_q
    if padded_kv is None:
        padded_kv = padded_q if options.get("cu_seqlens_kv") is None else cu_kv
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_kv,
        "cu_seqlens_q_padded": padded_q,
        "cu_seqlens_kv_padded": padded_kv,
        "max_seqlen_q": int(padded_q.diff().max()),
        "max_seqlen_kv": int(padded_kv.diff().max()),
        "pad_between_seqs": not (torch.equal(cu_q, padded_q) and torch.equal(cu_kv, padded_kv)),
    }


def _groups(group: Any) -> Any:
    return list(group) if isinstance(group, tuple) else group


def _ranks(group: Any) -> list[int]:
    """The global ranks of the whole context-parallel group."""
    outer = group[1] if isinstance(group, tuple) else group
    ranks = torch.distributed.get_process_group_ranks(outer)
    if not isinstance(group, tuple):
        return ranks
    inner = torch.distributed.get_process_group_ranks(group[0])  # consecutive; this rank is in both
    mine = torch.distributed.get_rank()
    return [rank + i - mine for rank in ranks for i in inner]


@cache
def _stream() -> Any:
    return torch.cuda.Stream()


fused, flash = TransformerEngine(_FUSED, "fused"), TransformerEngine(_FLASH, "flash")
attention = fused.attention
group_kind = TransformerEngine.group_kind
softmax_offset_grad = TransformerEngine.softmax_offset_grad
