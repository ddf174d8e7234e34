"""Megatron-LM with layout "balanced": packed batches with documents placed to balance the work.

Megatron cuts every document in 2 * cp_size chunks, and its rotary embedding expects that. The self attention here gets
the embedding of this rank's actual rows.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from cp_fast.integrations.shared.balanced_table import BalancedTable, table_of_batch
from cp_fast.integrations.shared.drop_in import context_for, lengths_on_host, of_whole_batch, refuse
from cp_ref.batches.sharding import position_ids, shard
from cp_ref.groups.agreement import merged
from cp_ref.groups.group import PaperGroup
from cp_ref.schedules.values import kind_of, read_count

__all__ = ["get_batch_on_this_cp_rank", "group_of_batch", "self_attention", "seq_params"]


def group_of_batch(packed: Any, group: Any) -> Any:
    """The ranks over which a batch is spread: those of its `cp_group`, or of `group`; a PaperGroup of one rank for
    `local_cp_size` 1 without a group.

    Args:
        packed: PackedSeqParams, or None.

    Raises:
        ValueError: `local_cp_size` without a group, or of another size. TypeError: it is no number.

    >>> from types import SimpleNamespace
    >>> group_of_batch(SimpleNamespace(cp_group=None, local_cp_size=1), "those of the layer")
    PaperGroup(size=1, rank=0)
    >>> group_of_batch(SimpleNamespace(cp_group=None, local_cp_size=2), "those of the layer")
    Traceback (most recent call last):
        ...
    ValueError: packed_seq_params.local_cp_size is 2, and cp_group is None; give the group of these ranks as cp_group
    """
    own, size = getattr(packed, "cp_group", None), getattr(packed, "local_cp_size", None)
    if size is not None:
        name = "packed_seq_params.local_cp_size"
        size = size.item() if isinstance(size, torch.Tensor) and size.numel() == 1 else size
        size = read_count(name, size, at_least=1)
        if own is None and size == 1:
            return PaperGroup(1)
        if own is None:
            raise ValueError(f"{name} is {size}, and cp_group is None; give the group of these ranks as cp_group")
        if (ranks := own.size()) != size:
            raise ValueError(f"{name} is {size}, and cp_group has {ranks} ranks; they must be equal")
    return group if own is None else own


@cache
def seq_params() -> type[Any]:
    """Megatron's PackedSeqParams, of a batch whose layout is a table."""
    from megatron.core.packed_seq_params import PackedSeqParams

    @dataclass
    class BalancedSeqParams(PackedSeqParams):
        """Adds the table of rows, and the positions of this rank's rows in documents and in the batch, int64 [t/cp]."""

        table: BalancedTable | None = None
        position_ids: torch.Tensor | None = None
        rows: torch.Tensor | None = None

    return BalancedSeqParams


@cache
def self_attention() -> type[torch.nn.Module]:
    """Megatron's SelfAttention, for batches of any layout.

    For a batch with a table it raises NotImplementedError for multi-token prediction, inference and positions of
    several axes: Megatron cuts these as for "dual_chunk".
    """
    from megatron.core.transformer.attention import SelfAttention

    class BalancedSelfAttention(SelfAttention):
        def forward(
            self,
            hidden_states: torch.Tensor,
            attention_mask: Any,
            key_value_states: torch.Tensor | None = None,
            inference_context: Any = None,
            rotary_pos_emb: Any = None,
            *more: Any,
            packed_seq_params: Any = None,
            **others: Any,
        ) -> Any:
            if isinstance(packed_seq_params, seq_params()):
                config = self.config
                refused = {"mtp_num_layers": config.mtp_num_layers, "mrope_section": config.mrope_section}
                refuse("layout 'balanced'", inference_context=inference_context, **refused)
                both = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
                if rotary_pos_emb is not None:
                    rotary_pos_emb = tuple(_of_rows(x, packed_seq_params) for x in both)
                # one sequence [t/cp, 1, h, d] to Megatron
                packed_seq_params = replace(packed_seq_params, qkv_format="sbhd")
            given = hidden_states, attention_mask, key_value_states, inference_context, rotary_pos_emb, *more
            return super().forward(*given, packed_seq_params=packed_seq_params, **others)

    return BalancedSelfAttention


def _of_rows(embedding: torch.Tensor | None, packed: Any) -> torch.Tensor | None:
    """Select this rank's rows from an embedding [s, 1, 1, d] of positions or of all rows of the batch."""
    if embedding is None:
        return None
    lengths = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    total, longest = int(lengths[-1]), int(lengths.diff().max())
    if len(embedding) == total:
        return embedding.index_select(0, packed.rows.to(embedding.device))
    if len(embedding) < longest:
        raise ValueError(
            f"rotary_pos_emb has {len(embedding)} positions, but a document has {longest} tokens, padding included; "
            "max_seqlen_q and max_seqlen_kv of packed_seq_params are of the whole documents"
        )
    return embedding.index_select(0, packed.position_ids.to(embedding.device))


def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any], packed_seq_params: Any, *, cp_group: Any = None
) -> tuple[dict[str, Any], Any]:
    """Cut this rank's part, in layout "balanced", out of a packed batch that every rank has in full: documents are
    distributed by their work. Collective. Megatron's function of this name cuts all documents in 2 * cp_size chunks.

    Args:
        batch: by name tensors [1, t, ...], such as tokens, labels, loss_mask and position_ids, which are cut, or None.
        packed_seq_params: of the whole batch, with qkv_format "thd". t is the end of its lengths, padding included, and
            divides by cp_size. Documents may have any lengths.
        cp_group: by default that of packed_seq_params, or Megatron's context parallel group.

    Returns:
        The batch with tensors [1, t / cp, ...], and packed_seq_params for the layers that `use_cp_fast` has changed. It
        has the table of each rank's rows; its lengths are on the CPU.

    Raises:
        ValueError, TypeError: another format or shape, t does not divide, or keys have other lengths than queries; here
        or on another rank. ValueError: the ranks have other lengths.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    layers = parallel_state.get_context_parallel_group(check_initialized=False)
    asked = SimpleNamespace(
        cp_group=cp_group or getattr(packed_seq_params, "cp_group", None),
        local_cp_size=getattr(packed_seq_params, "local_cp_size", None),
    )
    wrong = None
    try:
        group = group_of_batch(asked, layers)
    except (TypeError, ValueError) as error:  # told where the others read
        group, wrong = asked.cp_group or layers, error
    cp = context_for(group, "p2p", layout="balanced")

    def read() -> list[list[int]]:
        if wrong is not None:
            raise wrong
        return _lengths(batch, packed_seq_params, cp.size)

    same = of_whole_batch("packed_seq_params has other lengths")
    both = merged(cp, "get_batch_on_this_cp_rank", read, same)
    real, padded = (torch.tensor(lengths, dtype=torch.int32, device="cpu") for lengths in both)
    table = table_of_batch(cp, "thd", real, padded)
    local = {name: x if x is None else shard(x[0], cp=cp, plan=table)[None] for name, x in batch.items()}
    device = next((x.device for x in batch.values() if x is not None), torch.device("cpu"))
    own: dict[str, Any] = {field.name: getattr(packed_seq_params, field.name) for field in fields(PackedSeqParams)}
    own |= {"cu_seqlens_q": real, "cu_seqlens_kv": real, "cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    if asked.cp_group is not layers:
        own["cp_group"] = asked.cp_group  # the layers' too
    positions = position_ids(cp=cp, plan=table, device=device)
    rows = shard(torch.arange(int(padded[-1]), device=device), cp=cp, plan=table)
    return local, seq_params()(**own, table=table, position_ids=positions, rows=rows)


def _lengths(batch: Any, packed: Any, cp_size: int) -> list[list[int]]:
    """Cumulative lengths of the documents, without and with padding; checked against the batch's number of tokens."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if not isinstance(packed, PackedSeqParams) or packed.qkv_format != "thd":
        what = (
            f"has qkv_format {packed.qkv_format!r}" if isinstance(packed, PackedSeqParams) else f"is {kind_of(packed)}"
        )
        raise ValueError(f"packed_seq_params {what}; layout 'balanced' is for packed batches, qkv_format 'thd'")
    names = {"cu_seqlens_q": packed.cu_seqlens_q}
    optional = ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    names |= {name: x for name in optional if (x := getattr(packed, name)) is not None}
    lengths = {name: x.tolist() for name, x in lengths_on_host(**names).items()}
    real = lengths["cu_seqlens_q"]
    slots = lengths.get("cu_seqlens_q_padded", real)
    keys = lengths.get("cu_seqlens_kv", real), lengths.get("cu_seqlens_kv_padded", slots)
    if keys != (real, slots):
        raise ValueError(
            "packed_seq_params has other lengths for keys than for queries; documents attend to themselves"
        )
    tokens = slots[-1]
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch is {kind_of(batch)}; it must be a dict of tensors [1, t, ...]")
    for name, x in batch.items():
        if x is not None and (not isinstance(x, torch.Tensor) or tuple(x.shape[:2]) != (1, tokens)):
            what = f"has shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"is {kind_of(x)}"
            raise ValueError(
                f"batch[{name!r}] {what}; it must be [1, {tokens}, ...], as packed_seq_params says, or None"
            )
    if tokens % cp_size:
        raise ValueError(f"packed_seq_params ends at {tokens} tokens; they must divide by cp_size = {cp_size}")
    return [real, slots]
