"""ring-flash-attention's functions by their names and arguments, with `cp` in the place of `group`.

    from cp_fast.integrations.ring_flash_attn import zigzag_ring_flash_attn_func

Each rank's rows are the same as there: "zigzag" is the layout dual_chunk, "llama3" and the plain ring are contiguous. A
name may mention a ring or a gather, but the context chooses the schedule. Each function has the forms that take one
tensor qkv [..., 3, h, d], or q and kv [..., 2, h, d], with the same arguments: `*_qkvpacked_func`, `*_kvpacked_func`.
"""

from __future__ import annotations

from itertools import pairwise
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
    lengths_on_host,
    taking_kv,
    taking_qkv,
)
from cp_ref.calls.declared import refuse_names
from cp_ref.schedules.values import FURTHEST, check_flag, read_count, read_lengths, shown

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]


@drop_in()
def ring_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    cp: ContextParallel,
) -> Asked:
    """Compute attention of [b, s/cp, h, d], rank r holding the r-th of cp equal parts. Collective.

    Returns:
        out, or with return_attn_probs (out, lse, None), lse [b, h, s/cp].

    Raises:
        NotImplementedError: dropout_p is given. ValueError: the context's layout is another; the
        others: as `cp_fast.attention`.
    """
    return as_flash_attn("ring_flash_attn_func", locals(), layout="contiguous")


@drop_in()
def zigzag_ring_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    cp: ContextParallel,
) -> Asked:
    """Compute attention of [b, s/cp, h, d], rank r holding chunks r and 2 * cp - 1 - r. Collective.

    Returns:
        out, or with return_attn_probs (out, lse, None), lse [b, h, s/cp].

    Raises:
        NotImplementedError: dropout_p is given. ValueError: the context's layout is another; the
        others: as `cp_fast.attention`.
    """
    return as_flash_attn("zigzag_ring_flash_attn_func", locals(), layout="dual_chunk")


@drop_in()
def zigzag_ring_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    cp: ContextParallel,
) -> Asked:
    """Compute attention of packed [t/cp, h, d], rank r holding chunks r and 2 * cp - 1 - r of every sequence.
    Collective.

    Args:
        cu_seqlens: cumulative lengths of this rank's slices, int32 or int64 [b + 1]: the global ones // cp, as there.
        max_seqlen: the longest of them, or longer; not needed.

    Returns, Raises: as `zigzag_ring_flash_attn_func`; lse is [h, t/cp]. ValueError: a length is odd, so that the global
    one does not divide by 2 * cp.
    """
    return as_flash_attn("zigzag_ring_flash_attn_varlen_func", locals(), _in_two_chunks, "dual_chunk")


@drop_in()
def ring_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    cp: ContextParallel,
) -> Asked:
    """Compute attention of packed [t/cp, h, d], rank r holding the r-th of cp equal parts of every sequence.
    Collective.

    Args:
        cu_seqlens: cumulative lengths of this rank's slices, int32 or int64 [b + 1]: the global ones // cp, as there.
        max_seqlen: the longest of them, or longer; not needed.

    Returns, Raises: as `ring_flash_attn_func`; lse is [h, t/cp].
    """
    return as_flash_attn("ring_flash_attn_varlen_func", locals(), _in_parts, "contiguous")


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """Return the arguments of `llama3_flash_attn_varlen_func`. In the original these are the lengths that a rank sees.
    Here they are the global ones, and each rank finds its part itself.

    Args:
        cu_seqlens: GLOBAL cumulative lengths, int32 or int64 [b + 1].
        causal, rank, world_size: as there; not needed.

    Returns:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice.
    """
    check_flag("causal", causal)
    read_count("rank", rank, at_least=0, at_most=read_count("world_size", world_size, at_least=1) - 1)
    values = read_lengths("cu_seqlens", lengths_on_host(cu_seqlens=cu_seqlens)["cu_seqlens"]) or [0]
    longest = max((b - a for a, b in pairwise(values)), default=0)
    return cu_seqlens, cu_seqlens, longest, longest, slice(0, values[-1])


@drop_in()
def llama3_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    cp: ContextParallel,
) -> Asked:
    """Compute attention of packed [t/cp, h, d], rank r holding the r-th of cp equal parts of the whole. Collective.

    Args:
        cu_seqlens_q ... local_k_slice: from this module's `llama3_flash_attn_prepare_cu_seqlens`.
        heads_k_stride: how many kv heads to send at once, a divisor of h_kv. Here all are sent at once.

    Returns, Raises: as `zigzag_ring_flash_attn_func`; lse is [h, t/cp]. ValueError: lengths from elsewhere.
    """
    return as_flash_attn("llama3_flash_attn_varlen_func", locals(), _in_one_part, "contiguous")


zigzag_ring_flash_attn_qkvpacked_func: Any = taking_qkv(zigzag_ring_flash_attn_func)
zigzag_ring_flash_attn_kvpacked_func: Any = taking_kv(zigzag_ring_flash_attn_func)
zigzag_ring_flash_attn_varlen_qkvpacked_func: Any = taking_qkv(zigzag_ring_flash_attn_varlen_func)
zigzag_ring_flash_attn_varlen_kvpacked_func: Any = taking_kv(zigzag_ring_flash_attn_varlen_func)
ring_flash_attn_qkvpacked_func: Any = taking_qkv(ring_flash_attn_func)
ring_flash_attn_kvpacked_func: Any = taking_kv(ring_flash_attn_func)
ring_flash_attn_varlen_qkvpacked_func: Any = taking_qkv(ring_flash_attn_varlen_func)
ring_flash_attn_varlen_kvpacked_func: Any = taking_kv(ring_flash_attn_varlen_func)
llama3_flash_attn_varlen_qkvpacked_func: Any = taking_qkv(llama3_flash_attn_varlen_func)
llama3_flash_attn_varlen_kvpacked_func: Any = taking_kv(llama3_flash_attn_varlen_func)
_STRIPED = (
    "striped rows are those of no layout here. Cut the batch by cp_fast.shard in layout 'dual_chunk', which balances "
    "causal masks as well, and call zigzag_ring_flash_attn"
)
__getattr__ = refuse_names(
    __name__,
    {
        "stripe_flash_attn_func": f"{_STRIPED}_func",
        "stripe_flash_attn_kvpacked_func": f"{_STRIPED}_kvpacked_func",
        "stripe_flash_attn_qkvpacked_func": f"{_STRIPED}_qkvpacked_func",
        "substitute_hf_flash_attn": (
            "cp_fast.integrations.transformers.prepare(model, cp) switches a model of transformers"
        ),
        "update_ring_flash_attn_params": (
            "cp_fast.integrations.transformers.shard_batch(batch, cp=cp) gives each batch its lengths"
        ),
    },
)


def _in_two_chunks(given: dict[str, Any]) -> GivenLengths:
    """Of every sequence a rank has two equal chunks."""
    return GivenLengths.packed(_of_all_ranks(lengths_of_one(given), given["cp"].size, chunks=2))


def _in_parts(given: dict[str, Any]) -> GivenLengths:
    """Of every sequence a rank has one of equal parts."""
    cp, own = given["cp"], lengths_of_one(given)
    cu_seqlens = _of_all_ranks(own, cp.size, chunks=1)
    lengths: list[int] = own.diff().tolist()
    table = [(rank, n, rank * x, (rank + 1) * x) for rank in range(cp.size) for n, x in enumerate(lengths) if x]
    return GivenLengths.packed(cu_seqlens, cp=cp.holding(table))


def _in_one_part(given: dict[str, Any]) -> GivenLengths:
    """A rank has one of equal parts of the whole."""
    heads, local_k_slice = given["k"].shape[1], given["local_k_slice"]
    if heads % read_count("heads_k_stride", given["heads_k_stride"], at_least=1):
        raise ValueError(f"heads_k_stride is {given['heads_k_stride']}; it must divide the {heads} heads of k")
    cu_q, others = lengths_of_both(given)
    if others is not None or not isinstance(local_k_slice, slice) or local_k_slice != slice(0, int(cu_q[-1])):
        raise ValueError(
            f"cu_seqlens_q, cu_seqlens_k and local_k_slice {shown(local_k_slice)} are not from this module's "
            "llama3_flash_attn_prepare_cu_seqlens, which keeps the global lengths"
        )
    return GivenLengths.packed(cu_q)


def _of_all_ranks(cu_seqlens: torch.Tensor, cp_size: int, chunks: int) -> torch.Tensor:
    """The global cumulative lengths, int64, from those of one rank's slices. A slice has equal `chunks`."""
    values = read_lengths("cu_seqlens", cu_seqlens) or [0]
    if values[-1] * cp_size > FURTHEST:
        raise ValueError(f"cu_seqlens[-1] is {values[-1]}; times cp_size {cp_size} it must be at most {FURTHEST}")
    for n, (start, stop) in enumerate(pairwise(values)):
        if cp_size > 1 and (stop - start) % chunks:
            raise ValueError(
                f"cu_seqlens gives sequence {n} {stop - start} tokens on this rank; zigzag slices are two equal "
                f"chunks, so that the global length divides by 2 * cp_size = {2 * cp_size}"
            )
    return torch.tensor([value * cp_size for value in values], dtype=torch.int64, device="cpu")
