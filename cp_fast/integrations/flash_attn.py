"""flash-attn's functions over sequences that are spread over ranks: the same arguments, and `cp`.

    from cp_fast.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

Each has the forms of flash-attn that take one tensor qkv [..., 3, h, d], or q and kv [..., 2, h, d].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.shared.drop_in import (
    Asked,
    check_longest,
    check_tensors,
    drop_in,
    lengths_of_both,
    lengths_on_host,
    refuse,
    refuse_names,
    taking_kv,
    taking_qkv,
)
from cp_ref.contract.masks import documents
from cp_ref.schedules.values import check_flag, read_window

__all__ = [
    "asked_aligned",
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
    """`flash_attn.flash_attn_func` of this rank's slices. Collective.

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
    refuse("flash_attn_func", dropout_p=dropout_p)
    check_tensors("b s/cp h d", q=q, k=k, v=v)
    return asked_aligned(
        *(q, k, v, cp, causal, window_size, q.shape[1] == k.shape[1], return_attn_probs),
        alibi_slopes=alibi_slopes,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
    )


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
    """`flash_attn.flash_attn_varlen_func` of this rank's slices. Collective.

    Args:
        q, k, v: this rank's slices of the packed tensors, [t/cp, h, d], as `cp_fast.shard` cuts them.
        cu_seqlens_q, cu_seqlens_k: GLOBAL cumulative lengths, int32 or int64 [b + 1]. Best on the CPU: every call reads
            them there, which waits for a GPU that has them.
        max_seqlen_q, max_seqlen_k: not needed; no sequence may be longer.
        The others: as in `flash_attn_func`; with return_attn_probs lse is [h, t/cp].

    Raises:
        NotImplementedError: dropout_p or block_table is given. The others: as `cp_fast.attention`.
    """
    refuse("flash_attn_varlen_func", dropout_p=dropout_p, block_table=block_table)
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    cu_q, cu_k, same = lengths_of_both({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}, longest)
    return asked_aligned(
        *(q, k, v, cp, causal, window_size, same, return_attn_probs),
        qkv_format="thd",
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=None if same else cu_k,
        alibi_slopes=alibi_slopes,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
    )


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
    refuse("flash_attn_varlen_qkvpacked_func", dropout_p=dropout_p)
    (lengths,) = lengths_on_host(cu_seqlens=cu_seqlens).values()
    check_longest("max_seqlen", max_seqlen, lengths)
    return asked_aligned(
        *(q, k, v, cp, causal, window_size, True, return_attn_probs),
        qkv_format="thd",
        cu_seqlens_q=lengths,
        alibi_slopes=alibi_slopes,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
    )


flash_attn_qkvpacked_func: Any = taking_qkv(flash_attn_func)
flash_attn_kvpacked_func: Any = taking_kv(flash_attn_func)
flash_attn_varlen_qkvpacked_func: Any = taking_qkv(_varlen_of_one_length, "flash_attn_varlen_qkvpacked_func")
flash_attn_varlen_kvpacked_func: Any = taking_kv(flash_attn_varlen_func)
__getattr__ = refuse_names(
    __name__,
    {"flash_attn_with_kvcache": "a cache of keys is for generation, which runs on one rank: use that of flash_attn"},
)


def asked_aligned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    causal: bool,
    window_size: tuple[int, int],
    same_lengths: bool,
    return_attn_probs: bool,
    **problem: Any,
) -> Asked:
    """A call by flash-attn's rule: whatever the mask, query and key are counted from their sequence's end.

    Args:
        same_lengths: whether each sequence has as many queries as keys.
        return_attn_probs: give (out, lse, None).
        problem: other arguments of `attention`.
    """
    check_flag("causal", causal)
    check_flag("return_attn_probs", return_attn_probs)
    left, right = read_window(window_size)
    give: Callable[[Any], Any] = lambda results: results  # noqa: E731
    if causal or (right == 0 and not same_lengths):
        mask = "causal" if same_lengths else "causal_bottom_right"
        visible: dict[str, Any] = {"attn_mask_type": mask, "window_size": (left, 0)}
    elif same_lengths or (left < 0 and right < 0):
        visible = {"attn_mask_type": "no_mask", "window_size": window_size}
    else:  # no named mask aligns such a window to the end
        if problem.get("qkv_format") != "thd":
            (q, k, v), lengths, give = _as_packed(q, k, v, cp)
            problem |= lengths
        both = (problem[name] for name in ("cu_seqlens_q", "cu_seqlens_kv"))
        visible = {"areas": documents(*both, window_size=(left, right), **_padded(problem))}
    arguments = visible | problem
    if not return_attn_probs:
        return Asked(q, k, v, cp, arguments, give)
    return Asked(q, k, v, cp, arguments | {"return_lse": True}, lambda results: (*give(results), None))


def _padded(problem: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in problem.items() if name.endswith("_padded")}


def _as_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel
) -> tuple[list[torch.Tensor], dict[str, Any], Callable[[Any], Any]]:
    """Slices [b, s/cp, h, d] as those of packed sequences: the rows are the same in dual_chunk, and for one sequence in
    any layout.

    Returns:
        The packed slices, the arguments of `attention` that say so, and a function that gives its results the axes of
        [b, s/cp, h, d].

    Raises:
        NotImplementedError: several sequences in another layout.
    """
    batch, rows = q.shape[:2]
    if batch > 1 and cp.layout != "dual_chunk":
        raise NotImplementedError(
            f"window_size without causal, with other lengths of q and k, needs layout 'dual_chunk' for {batch} "
            f"sequences, and cp has {cp.layout!r}; flash_attn_varlen_func takes every layout"
        )
    lengths: dict[str, Any] = {"qkv_format": "thd"}
    for side, x in (("q", q), ("kv", k)):
        slot = x.shape[1] * cp.size
        starts = torch.arange(x.shape[0] + 1, device="cpu") * slot
        lengths[f"cu_seqlens_{side}_padded"] = starts
        real = torch.full((x.shape[0],), cp.uneven.get(x.shape[1], slot), device="cpu").cumsum(0)
        lengths[f"cu_seqlens_{side}"] = torch.nn.functional.pad(real, (1, 0))

    def give(results: Any) -> Any:
        out, *lse = results if isinstance(results, tuple) else (results,)
        out = out.unflatten(0, (batch, rows))
        return (out, lse[0].unflatten(1, (batch, rows)).transpose(0, 1)) if lse else out

    return [x.flatten(0, 1) for x in (q, k, v)], lengths, give
