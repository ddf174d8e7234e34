"""flash-attn's functions over sequences that are spread over ranks: the same arguments, and `cp`.

    from cp_fast.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

Each has the forms of flash-attn that take one tensor qkv [..., 3, h, d], or q and kv [..., 2, h, d].
"""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.shared.drop_in import (
    Asked,
    GivenLengths,
    as_flash_attn,
    drop_in,
    lengths_of_both,
    lengths_of_one,
    taking_kv,
    taking_qkv,
)
from cp_ref.calls.declared import refuse_names

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]


@drop_in()
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    cp: ContextParallel,
) -> Asked:
    """Compute `flash_attn.flash_attn_func` of this rank's slices. Collective.

    Args:
        q, k, v: this rank's slices, [b, s/cp, h, d], as `cp_fast.shard` cuts them.
        softmax_scale ... deterministic: as there. Causal masks, windows and ALiBi are aligned to the last query and
            key. alibi_slopes: float32 [h], or [b, h]; the same on all ranks, without a gradient.
        return_attn_probs: return (out, lse, None); there are no probabilities.
        cp: the group, the schedule and the layout.

    Raises:
        NotImplementedError: dropout_p is given; a window on both sides for several sequences whose q and k have other
        lengths, in another layout than dual_chunk. The others: as `cp_fast.attention`.
    """
    return as_flash_attn("flash_attn_func", locals())


@drop_in()
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    cp: ContextParallel,
) -> Asked:
    """Compute `flash_attn.flash_attn_varlen_func` of this rank's slices. Collective.

    Args:
        q, k, v: this rank's slices of the packed tensors, [t/cp, h, d], as `cp_fast.shard` cuts them.
        cu_seqlens_q, cu_seqlens_k: GLOBAL cumulative lengths, int32 or int64 [b + 1]. Best on the CPU: every call reads
            them there, which waits for a GPU that has them.
        max_seqlen_q, max_seqlen_k: not needed; no sequence may be longer.
        The others: as in `flash_attn_func`; with return_attn_probs lse is [h, t/cp].

    Raises:
        NotImplementedError: dropout_p or block_table is given. The others: as `cp_fast.attention`.
    """
    return as_flash_attn("flash_attn_varlen_func", locals(), lambda given: GivenLengths.packed(*lengths_of_both(given)))


@drop_in()
def _varlen_of_one_length(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    cp: ContextParallel,
) -> Asked:
    """`flash_attn_varlen_func` of keys as long as the queries."""
    return as_flash_attn(
        "flash_attn_varlen_qkvpacked_func", locals(), lambda given: GivenLengths.packed(lengths_of_one(given))
    )


flash_attn_qkvpacked_func: Any = taking_qkv(flash_attn_func)
flash_attn_kvpacked_func: Any = taking_kv(flash_attn_func)
flash_attn_varlen_qkvpacked_func: Any = taking_qkv(_varlen_of_one_length, "flash_attn_varlen_qkvpacked_func")
flash_attn_varlen_kvpacked_func: Any = taking_kv(flash_attn_varlen_func)
__getattr__ = refuse_names(
    __name__,
    {"flash_attn_with_kvcache": "a cache of keys is for generation, which runs on one rank: use that of flash_attn"},
)
